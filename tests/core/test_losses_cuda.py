"""What only a GPU can show of the losses: graphs, no synchronisation, memory, agreement at sizes of many programs."""

import pytest
import torch
from gpu_checks import forbid_waiting, measure_peak
from losses_cases import call, check, make
from test_losses import mask_of

pytestmark = pytest.mark.gpu
OPTIONS = {"normalize_advantages": True, "value_clip": 0.2, "value_clip_mode": "cleanrl", "entropy_coef": 0.01}


def on_gpu(head, n):
    case = make(head, n=n, size=8)
    network = {name: x.cuda().requires_grad_() for name, x in case.network.items()}
    return case, network


@pytest.mark.parametrize("head", ["ppo", "categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize("mask", [None, "flags"])
def test_many_programs(target, head, mask):
    if target.backend == "triton":
        check(make(head, n=300_001, size=6), target, mask=mask_of(300_001, mask), rtol=1e-5, **OPTIONS)


@pytest.mark.parametrize("head", ["ppo", "categorical", "gaussian"])
def test_no_synchronisation_and_capture(head):
    case, network = on_gpu(head, 5000)
    data = {name: x.cuda() for name, x in case.data.items()}
    case = case._replace(data=data)
    clip = torch.tensor(0.2, device="cuda")

    def step():
        return torch.autograd.grad(
            call(case, network, device="cuda", backend="triton", clip=clip, **OPTIONS).loss, list(network.values())
        )

    want = step()
    with forbid_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for value in (0.2, 0.05):
        clip.fill_(value)
        graph.replay()
        for x, expected in zip(got, step(), strict=True):
            assert torch.equal(x, expected)
    assert not torch.equal(got[0], want[0]), "the clip in the graph is the tensor's"


def test_coefficients_may_lie_in_host_memory():
    case, network = on_gpu("categorical", 300)
    numbers = {"clip": 0.1, "entropy_coef": 0.3, "value_coef": 0.7}
    on_host = {name: torch.tensor(x) for name, x in numbers.items()}
    got, want = (call(case, network, device="cuda", backend="triton", **given).loss for given in (on_host, numbers))
    assert torch.equal(got, want)


def test_memory_is_that_of_the_gradient():
    n, actions = 1 << 18, 16
    logits = torch.randn(n, actions, device="cuda", requires_grad=True)
    from rl_triton_core.losses import Categorical, ppo_loss

    old, advantages = torch.randn(2, n, device="cuda")
    index = torch.zeros(n, dtype=torch.int64, device="cuda")

    def step():
        torch.autograd.grad(ppo_loss(Categorical(logits), index, old, advantages).loss, logits)

    step()
    assert measure_peak(step) < 1.1 * logits.nbytes
