"""What only a GPU can show of log-probabilities from logits: graphs, no waiting, memory, assertions, wide rows."""

import subprocess
import sys

import pytest
import torch
from gpu_checks import capture_graph, forbid_waiting, measure_peak
from test_losses_logits import check, draw

from rl_triton_core.losses import token_log_probs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "size"), [(2000, 151_936), (300, 128_256), (1, 1 << 20), (5000, 50_257)])
def test_vocabularies_of_models(target, dtype, tokens, size):
    if target.backend == "triton":
        check(target, *draw((tokens,), size, dtype), temperature=0.8)


def make_step(in_place):
    logits, tokens = (x.cuda() for x in draw((600,), 30_000, torch.bfloat16))
    leaf = logits.requires_grad_()

    def step():
        result = leaf * 1
        got = token_log_probs(result, tokens, entropy=True, inplace_backward=in_place)
        gradients = torch.autograd.grad((got.log_probs.sum(), got.entropy.sum()), leaf)
        return [x.detach() for x in (*got, *gradients)]  # a graph that is kept belongs to the stream before the capture

    return step


@pytest.mark.parametrize("in_place", [False, True])
def test_no_waiting_and_capture(in_place):
    step = make_step(in_place)
    wanted = [step() for _ in range(3)][-1]
    with forbid_waiting():
        step()
    graph, results = capture_graph(step)
    graph.replay()
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("in_place", "most"), [(False, 2.05), (True, 1.05)])
def test_memory_is_that_of_logits_and_one_gradient_or_none(in_place, most):
    leaf, tokens = torch.randn(1000, 100_000, device="cuda").requires_grad_(), torch.arange(1000, device="cuda")

    def step():
        result = leaf.clone()
        got = token_log_probs(result, tokens, entropy=True, inplace_backward=in_place)
        torch.autograd.grad((got.log_probs.sum(), got.entropy.sum()), leaf)

    step()
    assert measure_peak(step) < most * leaf.nbytes


def test_a_token_that_there_is_not_is_asserted():
    code = (
        "import torch; from rl_triton_core.losses import token_log_probs\n"
        "token_log_probs(torch.zeros(2, 5, device='cuda'), torch.tensor([0, 5], device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode
    assert "tokens: expected 0 or more" in result.stderr + result.stdout
