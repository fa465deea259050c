"""What only a GPU can show of normalised advantages: graphs, no synchronisation, memory, NCCL, a second device."""

from functools import partial

import pytest
import torch
from cases import same_bits
from gpu_checks import capture_graph, forbid_waiting, measure_peak
from processes import run_ranks
from test_normalization import RANKS, check_ranks, compute_oracle, draw_advantages, run_rank
from torch import distributed

from rl_triton_core import normalize_advantages
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.gpu


def on_gpu(*shape, device="cuda", **options):
    return [None if x is None else x.to(device) for x in draw_advantages(*shape, **options)]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_synchronisation(backend):
    for valid in (1.0, 0.8):
        streams, out = on_gpu(64, 128, valid=valid), torch.empty(64, 128, device="cuda")
        want = normalize_advantages(*streams, backend=backend)
        leaf = streams[0].clone().requires_grad_()
        normalize_advantages(leaf, streams[1]).sum().backward()
        with forbid_waiting():
            got = normalize_advantages(*streams, out=out, backend=backend)
            normalize_advantages(leaf, streams[1]).sum().backward()
        assert same_bits(got, want)


def test_graph_capture():
    (advantages, mask), out = on_gpu(64, 128, valid=0.8), torch.empty(64, 128, device="cuda")

    def normalize_both():
        normalize_advantages(advantages, mask, out=out)
        return normalize_advantages(advantages)

    graph, fresh = capture_graph(normalize_both)
    for seed in (1, 2):
        advantages.copy_(draw_advantages(64, 128, seed=seed)[0])
        graph.replay()
        assert same_bits(out, normalize_advantages(advantages, mask))
        assert same_bits(fresh, normalize_advantages(advantages))


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


def test_equal_inputs_give_equal_bits():
    advantages, mask = on_gpu(2048, 2049, valid=0.9)
    first = normalize_advantages(advantages, mask)
    assert all(same_bits(normalize_advantages(advantages, mask), first) for _ in range(10))


def test_a_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    streams = on_gpu(64, 128, valid=0.8, device="cuda:1")
    got = normalize_advantages(*streams)
    assert torch.cuda.current_device() == 0 and got.device == torch.device("cuda:1")
    assert same_bits(got, normalize_advantages(*(x.to("cuda:0") for x in streams)))


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_with_inductor(grad):
    torch._dynamo.reset()
    advantages, mask = on_gpu(64, 128, valid=0.8)
    advantages.requires_grad_(grad)
    results = []
    for function in (normalize_advantages, torch.compile(normalize_advantages, fullgraph=True)):
        result = function(advantages, mask)
        results.append([result, *(torch.autograd.grad(result.exp().sum(), advantages) if grad else [])])
    assert_close(results[1][0], results[0][0], rtol=2e-7)
    if grad:
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-5)


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
