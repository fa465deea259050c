"""What only a GPU can show of losses and normalised advantages: graphs, no waiting, memory, devices, large sizes."""

import subprocess
import sys
from functools import partial

import pytest
import test_losses_logits as logits
import torch
from cases import check_full_graph, same_bits
from gpu_checks import assert_replays, forbid_waiting, measure_peak
from losses_cases import call, check, make
from processes import run_ranks
from test_losses import mask_of
from test_normalization import RANKS, check_ranks, compute_oracle, draw_advantages, run_rank
from torch import distributed

from rl_triton_core import normalize_advantages
from rl_triton_core.losses import Categorical, ppo_loss, token_log_probs
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.gpu
OPTIONS = {"normalize_advantages": True, "value_clip": 0.2, "value_clip_mode": "cleanrl", "entropy_coef": 0.01}


@pytest.fixture
def triton(target):
    if target.backend != "triton":
        pytest.skip("of the GPU")
    return target


def on_gpu(*shape, device="cuda", **options):
    return [None if x is None else x.to(device) for x in draw_advantages(*shape, **options)]


def make_normalization(backend, valid):
    (advantages, mask), out = on_gpu(64, 128, valid=valid), torch.empty(64, 128, device="cuda")

    def step():
        leaf = advantages.detach().requires_grad_()
        gradients = torch.autograd.grad(normalize_advantages(leaf, mask).exp().sum(), leaf)
        fresh = normalize_advantages(advantages, mask, backend=backend)
        return [normalize_advantages(advantages, mask, out=out, backend=backend), fresh, *gradients]

    return step, lambda seed: advantages.copy_(draw_advantages(64, 128, seed=seed)[0])


def make_loss(head):
    case, clip = make(head, n=5000, size=8), torch.tensor(0.2, device="cuda")
    network = {name: x.cuda().requires_grad_() for name, x in case.network.items()}
    case = case._replace(data={name: x.cuda() for name, x in case.data.items()})

    def step():
        loss = call(case, network, device="cuda", backend="triton", clip=clip, **OPTIONS).loss
        return torch.autograd.grad(loss, [*network.values()])

    return step, lambda seed: clip.fill_(0.2 / (1 + seed) ** 2)


def make_log_probs(in_place):
    leaf, tokens = (x.cuda() for x in logits.draw((600,), 30_000, torch.bfloat16))
    leaf.requires_grad_()

    def step():
        got = token_log_probs(leaf * 1, tokens, entropy=True, inplace_backward=in_place)
        gradients = torch.autograd.grad((got.log_probs.sum(), got.entropy.sum()), leaf)
        return [x.detach() for x in (*got, *gradients)]  # a graph that is kept belongs to the stream before the capture

    return step, lambda seed: leaf.data.mul_(0.5)


STEPS = {
    **{f"normalisation, {x}": (make_normalization, x, 0.8) for x in ("triton", "reference")},
    "normalisation of all": (make_normalization, "triton", 1.0),
    **{head: (make_loss, head) for head in ("ppo", "categorical", "gaussian")},
    **{f"tokens, in place {x}": (make_log_probs, x) for x in (False, True)},
}


@pytest.mark.parametrize("name", STEPS)
def test_nothing_waits_and_a_graph_follows_what_it_reads(name):
    make_step, *options = STEPS[name]
    step, change = make_step(*options)
    want = [[x.clone() for x in step()] for _ in range(3)][-1]
    with forbid_waiting():
        got = step()
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
    changed = assert_replays(step, partial(change, 1), partial(change, 2))
    assert not same_bits(changed[0], want[0]), "the change counts"


@pytest.mark.parametrize("head", ["ppo", "categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize("mask", [None, "flags"])
def test_many_programs(triton, head, mask):
    check(make(head, n=300_001, size=6), triton, mask=mask_of(300_001, mask), rtol=1e-5, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "size"), [(2000, 151_936), (300, 128_256), (1, 1 << 20), (5000, 50_257)])
def test_vocabularies_of_models(triton, dtype, tokens, size):
    logits.check(triton, *logits.draw((tokens,), size, dtype), temperature=0.8)


def test_memory_is_that_of_the_gradient():
    n, actions = 1 << 18, 16
    leaf = torch.randn(n, actions, device="cuda", requires_grad=True)
    old, advantages = torch.randn(2, n, device="cuda")
    index = torch.zeros(n, dtype=torch.int64, device="cuda")

    def step():
        torch.autograd.grad(ppo_loss(Categorical(leaf), index, old, advantages).loss, leaf)

    step()
    assert measure_peak(step) < 1.1 * leaf.nbytes


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


@pytest.mark.parametrize("view", ["contiguous", "time-major", "padded", "mask the other way"])
def test_strided_views_are_read_in_place(view):
    advantages, mask = on_gpu(1032, 520, valid=0.8)
    if view == "time-major":
        advantages, mask = advantages.t(), mask.t()
    if view == "padded":
        advantages, mask = advantages[1:-1, 3:-2], mask[1:-1, 3:-2]
    if view == "mask the other way":
        mask = mask.t().contiguous().t()
    out = torch.empty_like(advantages)
    normalize = partial(normalize_advantages, advantages, mask, out=out)
    normalize()
    assert measure_peak(normalize) < 2**16  # the flags alone take 2**19 bytes
    assert_close(out, compute_oracle(advantages.cpu(), mask.cpu()), rtol=2e-7)


def test_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    streams = on_gpu(64, 128, valid=0.8, device="cuda:1")
    got = normalize_advantages(*streams)
    assert torch.cuda.current_device() == 0 and got.device == torch.device("cuda:1")
    assert same_bits(got, normalize_advantages(*(x.to("cuda:0") for x in streams)))


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_with_inductor(grad):
    def normalize(advantages, mask):
        return normalize_advantages(advantages, mask).exp()

    advantages, mask = on_gpu(64, 128, valid=0.8)
    compare = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    check_full_graph(normalize, advantages.requires_grad_(grad), mask, compiler="inductor", compare=compare)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(much_memory):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("not enough memory on the device")
    size, piece = 2**31 + 1000, 2**27
    advantages = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    advantages.normal_(generator=torch.Generator("cuda").manual_seed(0)).add_(3)
    pieces = advantages.split(piece)
    mean = sum(x.double().sum() for x in pieces) / size
    std = (sum((x.double() - mean).square().sum() for x in pieces) / (size - 1)).sqrt()
    want = [((x.double() - mean) / std).to(torch.bfloat16) for x in (advantages[:1000], advantages[-1000:])]
    normalize_advantages(advantages, out=advantages)
    for got, expected in zip((advantages[:1000], advantages[-1000:]), want, strict=True):
        assert_close(got, expected, rtol=1e-3)


def test_nccl_on_a_second_device(tmp_path):
    if torch.cuda.device_count() < RANKS or not distributed.is_nccl_available():
        pytest.skip("needs two CUDA devices and NCCL")
    ranks = run_ranks(run_rank, tmp_path, ("triton", "reference"), "nccl", kind="nccl")
    for backend in ("triton", "reference"):
        check_ranks(ranks, backend)
