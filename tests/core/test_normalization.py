"""Normalised advantages: equation, edge cases, accuracy, memory, gradients, and statistics over several processes."""

import math

import numpy as np
import pytest
import torch
from cases import LAYOUTS, check_full_graph, place_array, same_bits
from processes import GLOO, run_ranks
from torch import distributed

from rl_triton_core import available_backends, normalize_advantages
from rl_triton_core._internal.arguments import groups
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

NAN, INF = math.nan, math.inf
MODES = ("add", "floor", "variance")
RULES = [
    (1, 1e-8, "add"),
    (0, 1e-4, "floor"),
    (1, 1e-8, "variance"),
    (0, 0.5, "add"),
    (2.5, 2.0, "floor"),
    (1, 0.5, "variance"),
    (0, 0, "add"),
]


def compute_oracle(advantages, mask=None, correction=1, epsilon=1e-8, epsilon_mode="add"):
    """Exact sums over the valid elements, in float64."""
    a = np.asarray(advantages, np.float64)
    valid = np.ones(a.shape, bool) if mask is None else np.asarray(mask, bool)
    x = a[valid].tolist()
    result = np.zeros(a.shape)
    if len(x) <= correction:
        result[valid] = x
        return result
    mean = math.fsum(x) / len(x)
    variance = math.fsum((v - mean) ** 2 for v in x) / (len(x) - correction)
    divisor = {
        "add": math.sqrt(variance) + epsilon,
        "floor": max(math.sqrt(variance), epsilon),
        "variance": math.sqrt(variance + epsilon),
    }[epsilon_mode]
    result[valid] = [(v - mean) / divisor for v in x]
    return result


def draw_advantages(*shape, seed=0, valid=1.0, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    advantages = torch.as_tensor(3 + 2 * rng.standard_normal(shape)).to(dtype)
    return advantages, None if valid == 1 else torch.as_tensor(rng.random(shape) < valid)


def run_on(target, advantages, mask=None, **options):
    """The call's result on the CPU, from tensors there, after what must hold of any call."""
    streams = [None if x is None else x.to(target.device) for x in (advantages, mask)]
    result = normalize_advantages(*streams, **{"backend": target.backend, **options})
    assert result.shape == advantages.shape and not result.requires_grad
    if "out" not in options:
        assert result.dtype == (torch.float64 if advantages.dtype == torch.float64 else torch.float32)
    return result.cpu()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("valid", [1.0, 0.6])
@pytest.mark.parametrize("shape", [(6, 11), (7,), (70, 101), (2, 3, 5)], ids=str)
def test_the_equation(target, shape, valid, rule):
    advantages, mask = draw_advantages(*shape, valid=valid)
    assert_close(run_on(target, advantages, mask, **options(rule)), compute_oracle(advantages, mask, *rule), rtol=2e-7)


def options(rule):
    return dict(zip(("correction", "epsilon", "epsilon_mode"), rule, strict=True))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_float64(float64_target, rule):
    advantages, mask = draw_advantages(40, 33, valid=0.7, dtype=torch.float64)
    for given, rtol in ((advantages, 1e-13), (1e6 + 1e-3 * advantages, 1e-7)):
        got = run_on(float64_target, given, mask, **options(rule))
        assert_close(got, compute_oracle(given, mask, *rule), rtol=rtol)
    assert not run_on(float64_target, torch.full_like(advantages, 0.1), **options(rule)).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epsilon", [0, 1e-8, 1e-4])
@pytest.mark.parametrize("value", [0.1, -1e30, 1e-30, 0.0])
def test_equal_elements_give_zero(target, value, epsilon, mode):
    advantages = torch.full((9, 301), value)
    mask = draw_advantages(9, 301, valid=0.5)[1]
    for given in (None, mask):
        assert not run_on(target, advantages, given, epsilon=epsilon, epsilon_mode=mode).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_no_more_elements_than_the_correction_stay_as_they_are(target, epsilon, mode):
    advantages = torch.tensor([[5.0, -7.0, NAN, 2.5]])
    rule = {"epsilon": epsilon, "epsilon_mode": mode}
    one = torch.tensor([[False, True, False, False]])
    two = torch.tensor([[True, True, False, False]])
    assert run_on(target, advantages, one, **rule).tolist() == [[0, -7, 0, 0]]
    assert run_on(target, advantages, two, correction=2, **rule).tolist() == [[5, -7, 0, 0]]
    assert run_on(target, advantages, one, correction=0, **rule).tolist() == [[0, 0, 0, 0]]
    assert run_on(target, torch.tensor([3.0]), **rule).tolist() == [3]
    assert run_on(target, torch.tensor(3.0), **rule).tolist() == 3


@pytest.mark.parametrize("correction", [0, 1])
def test_no_valid_element(target, correction):
    advantages, mask = torch.full((3, 5), NAN), torch.zeros(3, 5, dtype=torch.bool)
    got = run_on(target, advantages, mask, correction=correction, epsilon=0)
    assert same_bits(got, torch.zeros(3, 5))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty(target, shape):
    assert run_on(target, torch.ones(shape)).shape == shape
    assert run_on(target, torch.ones(shape), torch.ones(shape)).shape == shape


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_valid_element_that_is_not_finite(target, value):
    advantages, mask = draw_advantages(5, 700, valid=0.8)
    mask[2, 3] = True
    advantages[2, 3] = value
    got = run_on(target, advantages, mask)
    assert got[mask].isnan().all() and not got[~mask].any()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_masked_cells_have_no_effect(target, value):
    advantages, mask = draw_advantages(6, 800, valid=0.7)
    mask[0, 0] = False
    want = run_on(target, advantages.where(mask, 0), mask)
    assert same_bits(run_on(target, advantages.where(mask, value), mask), want)
    assert same_bits(want[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("valid", [1.0, 0.7])
@pytest.mark.parametrize(("mean", "spread"), [(1e6, 1), (-3e7, 4), (1e-20, 1e-25), (1e30, 1e25), (0, 1e-40)])
def test_a_large_mean_with_a_small_spread(target, mean, spread, valid):
    advantages, mask = draw_advantages(12, 500, valid=valid, dtype=torch.float64)
    advantages = (mean + spread * advantages).float()
    got = run_on(target, advantages, mask, epsilon=0)
    assert_close(got, compute_oracle(advantages, mask, epsilon=0), rtol=2e-7)


@pytest.mark.parametrize("place_of_it", [0, 1234, -1])
def test_one_element_far_from_the_others(target, place_of_it):
    advantages = draw_advantages(3000)[0]
    advantages[place_of_it] = 1e7
    assert_close(run_on(target, advantages), compute_oracle(advantages), rtol=2e-7)


def test_parts_with_means_of_their_own(target, monkeypatch):
    """Statistics of parts that differ, some with nothing valid in them, are merged."""
    shrink_parts(target, monkeypatch)
    advantages, mask = draw_advantages(20_000, valid=0.5)
    advantages += 1e4 * torch.arange(20_000).div(2000, rounding_mode="floor")
    mask[:5000], mask[12_000:16_000] = False, False
    for given in (None, mask):
        assert_close(run_on(target, advantages, given), compute_oracle(advantages, given), rtol=2e-7)
        equal = run_on(target, torch.full_like(advantages, 0.1), given, epsilon=0)
        assert not equal.any()


def shrink_parts(target, monkeypatch):
    if target.backend == "cpu":
        monkeypatch.setattr("rl_triton_core._internal.moments.cpu.SPAN", 1500)
    if target.backend == "triton":
        monkeypatch.setattr("rl_triton_core._internal.moments.triton.PROGRAMS", 3)


def test_large(target):
    """More elements than one round of programs, or of threads, takes."""
    shape = (5, 300_007) if target.backend != "triton" or not target.interpreted else (5, 3001)
    advantages, mask = draw_advantages(*shape, valid=0.9)
    valid = advantages[mask].double()
    want = torch.where(mask, (advantages.double() - valid.mean()) / valid.std(), 0)
    assert_close(run_on(target, advantages, mask), want, rtol=2e-7)


@pytest.mark.parametrize("mask_layout", [None, *LAYOUTS[:5]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target, layout, mask_layout):
    advantages, mask = draw_advantages(6, 9, valid=0.0 if mask_layout is None else 0.7)
    if layout == "expanded":
        advantages[:] = advantages[:, :1]
    placed = place_array(advantages, layout, torch.float32, target.device)
    flags = None if mask_layout is None else place_array(mask, mask_layout, torch.bool, target.device)
    want = compute_oracle(advantages, None if flags is None else mask)
    before = placed.base.clone()
    for out_layout in (None, *LAYOUTS[:5]):
        given = {}
        if out_layout is not None:
            out = place_array(np.full((6, 9), NAN), out_layout, torch.float32, target.device)
            given["out"] = out.view
        got = normalize_advantages(placed.view, None if flags is None else flags.view, backend=target.backend, **given)
        assert_close(got.cpu(), want, rtol=2e-7)
        assert same_bits(placed.base, before)
        if given:
            assert got is out.view
            beside = out.base.clone()
            out.same_view(beside).fill_(NAN)
            assert beside.isnan().all(), "wrote beside the output"


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (1, 0, 3, 2)])
def test_many_dimensions(target, permutation):
    base, flags = draw_advantages(4, 5, 6, 7, valid=0.8)
    for view in (np.s_[:], np.s_[::2, 1:, ::3, 2:]):
        advantages, mask = base[view].permute(permutation), flags.permute(permutation).contiguous()
        mask = mask[tuple(slice(size) for size in advantages.shape)]
        out = torch.full(base.shape, NAN).permute(permutation)[tuple(slice(size) for size in advantages.shape)]
        want = compute_oracle(advantages, mask)
        assert_close(run_on(target, advantages, mask), want, rtol=2e-7)
        assert_close(run_on(target, advantages, mask, out=out.to(target.device)), want, rtol=2e-7)


def test_the_result_lies_as_the_advantages_do(target):
    assert normalize_advantages(torch.randn(7, 5, device=target.device).t(), backend=target.backend).stride() == (1, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(target, dtype):
    advantages, mask = draw_advantages(9, 70, valid=0.7, dtype=dtype)
    want = compute_oracle(advantages.double(), mask)
    assert_close(run_on(target, advantages, mask), want, rtol=2e-7)
    out = torch.full((9, 70), NAN, dtype=dtype, device=target.device)
    got = run_on(target, advantages, mask, out=out)
    assert got.dtype == dtype
    assert_close(got.double(), want, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS[:5])
def test_in_place(target, layout, dtype):
    advantages, mask = draw_advantages(8, 12, valid=0.7, dtype=dtype)
    want = compute_oracle(advantages.double(), mask)
    placed = place_array(advantages, layout, dtype, target.device)
    flags = mask.to(target.device)
    got = normalize_advantages(placed.view, flags, out=placed.view, backend=target.backend)
    assert got is placed.view
    assert_close(got.double().cpu(), want, rtol=torch.finfo(dtype).eps)
    again = placed.view.view_as(placed.view)
    assert normalize_advantages(placed.view, out=again, backend=target.backend) is again


def test_equal_inputs_give_equal_bits(target, monkeypatch):
    """Whatever the number of threads."""
    shrink_parts(target, monkeypatch)
    advantages, mask = draw_advantages(4, 5000, valid=0.9)
    results = []
    for number in (1, 1, 2, 3):
        monkeypatch.setattr("rl_triton_core._internal.launch.threads.Setting.num_threads", number)
        results.append(run_on(target, advantages, mask))
    assert all(same_bits(result, results[0]) for result in results)


GOOD = torch.ones(3, 5)
EXPANDED = torch.ones(3, 1).expand(3, 5)
BAD = [
    (TypeError, "advantages", ["list", "torch.Tensor"], {"advantages": [1.0]}),
    (TypeError, "advantages", ["int64", "float32"], {"advantages": torch.ones(3, 5, dtype=torch.int64)}),
    (TypeError, "mask", ["list"], {"mask": [True]}),
    (TypeError, "mask", ["complex64", "bool"], {"mask": torch.ones(3, 5, dtype=torch.complex64)}),
    (ValueError, "mask", ["(5, 3)", "(3, 5)", "advantages"], {"mask": torch.ones(5, 3)}),
    (ValueError, "mask", ["meta", "cpu"], {"mask": torch.ones(3, 5, device="meta")}),
    (ValueError, "correction", ["-1", ">= 0"], {"correction": -1}),
    (ValueError, "correction", ["nan"], {"correction": NAN}),
    (TypeError, "correction", ["bool", "float"], {"correction": True}),
    (ValueError, "epsilon", ["-0.1", ">= 0"], {"epsilon": -0.1}),
    (ValueError, "epsilon", ["inf"], {"epsilon": INF}),
    (TypeError, "epsilon", ["str"], {"epsilon": "1e-8"}),
    (ValueError, "epsilon_mode", ["'max'", "add, floor, variance"], {"epsilon_mode": "max"}),
    (ValueError, "group", ["'world'", "initialised"], {"group": "world"}),
    (ValueError, "group", ["3", "initialised"], {"group": 3}),
    (TypeError, "out", ["list"], {"out": [1.0]}),
    (TypeError, "out", ["int64"], {"out": torch.ones(3, 5, dtype=torch.int64)}),
    (ValueError, "out", ["(5, 3)", "(3, 5)"], {"out": torch.ones(5, 3)}),
    (ValueError, "out", ["meta", "cpu"], {"out": torch.ones(3, 5, device="meta")}),
    (ValueError, "out", ["requires grad"], {"out": torch.ones(3, 5, requires_grad=True)}),
    (ValueError, "out", ["strides"], {"out": EXPANDED}),
    (ValueError, "out", ["strides"], {"out": EXPANDED, "advantages": EXPANDED}),
    (ValueError, "out", ["memory"], {"out": (buffer := torch.ones(4, 5))[1:], "advantages": buffer[:3]}),
    (ValueError, "out", ["memory"], {"out": (square := torch.ones(5, 5)).t(), "advantages": square}),
    (ValueError, "out", ["memory"], {"out": (flags := torch.ones(3, 5)), "mask": flags}),
    (ValueError, "backend", ["'numpy'", "triton, cpu, reference"], {"backend": "numpy"}),
]


@pytest.mark.parametrize(("error", "name", "words", "changes"), BAD, ids=lambda x: x if isinstance(x, str) else None)
def test_bad_input(error, name, words, changes):
    with pytest.raises(error) as caught:
        normalize_advantages(**{"advantages": GOOD, **changes})
    message = str(caught.value)
    assert message.startswith(name) and all(word in message for word in words), message
    assert (GOOD == 1).all()


def test_triton_takes_no_float64(target):
    if target.backend == "triton":
        with pytest.raises(TypeError, match=r"^advantages: .*float64.*float32"):
            run_on(target, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("valid", [1.0, 0.7])
def test_gradients(target, valid, rule):
    advantages, mask = draw_advantages(4, 6, valid=valid, dtype=torch.float64)
    advantages = advantages.to(target.device).requires_grad_()
    mask = None if mask is None else mask.to(target.device)
    assert torch.autograd.gradcheck(
        lambda x: normalize_advantages(x, mask, **options(rule), backend=target.backend), advantages
    )


def test_gradients_where_nothing_spreads_or_nothing_is_valid(target):
    for advantages, mask in (
        (torch.full((3, 4), 0.1), None),
        (torch.full((3, 4), NAN), torch.zeros(3, 4)),
        (torch.tensor([3.0, INF, NAN]), torch.tensor([1, 0, 0], dtype=torch.uint8)),
    ):
        x = advantages.to(target.device).requires_grad_()
        result = normalize_advantages(x, None if mask is None else mask.to(target.device), backend=target.backend)
        result.sum().backward()
        assert result.dtype == torch.float32 and result.isfinite().all() and x.grad.isfinite().all()


def test_a_graph_only_where_one_is_wanted(target):
    advantages = draw_advantages(4, 6)[0].to(target.device).requires_grad_()
    with torch.no_grad():
        assert not normalize_advantages(advantages, backend=target.backend).requires_grad
    out = torch.empty(4, 6, device=target.device)
    assert normalize_advantages(advantages, out=out, backend=target.backend) is out and out.requires_grad
    assert_close(out.detach().cpu(), compute_oracle(advantages.detach().cpu()), rtol=2e-7)


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_without_a_break(grad):
    """With a gradient, or into memory that is given."""
    advantages, mask = draw_advantages(6, 8, valid=0.7)

    def function(advantages, mask, out):
        options = {"epsilon_mode": "floor", "out": None if grad else out}
        return normalize_advantages(advantages + 1, mask, **options) * 2

    check_full_graph(function, advantages.requires_grad_(grad), mask, torch.empty(6, 8), compare=assert_close)


RANKS = 2
CASES = ("plain", "masked", "one rank without a valid step", "one rank empty", "one element in all", "none", "equal")


def make_share(case, rank):
    advantages, mask = draw_advantages(3 + rank, 40, seed=rank, valid=0.7)
    advantages += 1e5 * rank
    advantages[0, 0], mask[0, 0] = 2.5, True  # the same everywhere
    if case == "plain":
        return advantages, None
    if case == "masked":
        return advantages, mask
    if case == "one rank without a valid step":
        return advantages, mask & (rank == 0)
    if case == "one rank empty":
        return (advantages, mask) if rank else (advantages[:0], mask[:0])
    if case == "equal":
        return torch.full_like(advantages, 0.1), mask
    only = torch.zeros_like(mask)
    only[1, 2] = case == "one element in all" and rank == 1
    return advantages, only


def run_rank(rank, backends, kind):
    """One rank: every case on every backend, and what went wrong with bad input."""
    device = torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu")
    gather, calls = groups.all_gather, []
    groups.all_gather = lambda *args, **kwargs: (calls.append(1), gather(*args, **kwargs))[1]
    results = {}
    for backend in backends:
        for case in CASES:
            streams = [None if x is None else x.to(device) for x in make_share(case, rank)]
            calls.clear()
            result = normalize_advantages(*streams, group="world", backend=backend)
            results[backend, case] = result.cpu(), len(calls)
        alone = distributed.new_group([0]), distributed.new_group([1])
        streams = [x.to(device) for x in make_share("masked", rank)]
        by_itself = normalize_advantages(*streams, group=alone[rank], backend=backend)
        results[backend, "alone"] = by_itself.cpu(), normalize_advantages(*streams, backend=backend).cpu()
        results[backend, "not a member"] = describe_error(streams[0], alone[1 - rank])
    results["requires grad"] = describe_error(torch.ones(3, device=device, requires_grad=True), "world")
    groups.all_gather = gather
    if kind == "gloo":
        function = torch.compile(lambda x: normalize_advantages(x, group="world"), fullgraph=True, backend="aot_eager")
        results["compiled"] = function(make_share("plain", rank)[0])
    return results


def describe_error(advantages, group):
    try:
        normalize_advantages(advantages, group=group)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_ranks(ranks, backend):
    for case in CASES:
        shares = [make_share(case, rank) for rank in range(RANKS)]
        advantages = torch.cat([x.flatten() for x, _ in shares])
        mask = None if case == "plain" else torch.cat([x.flatten() for _, x in shares])
        got, calls = zip(*(results[backend, case] for results in ranks), strict=True)
        assert calls == (1, 1), case
        assert_close(torch.cat([x.flatten() for x in got]), compute_oracle(advantages, mask), rtol=2e-7, name=case)
    for case in ("plain", "masked"):
        first, second = (results[backend, case][0][0, 0] for results in ranks)
        assert same_bits(first, second), "equal elements differ between ranks"
    for rank, results in enumerate(ranks):
        assert_close(*results[backend, "alone"])
        assert results[backend, "not a member"].startswith("TypeError: group: "), rank
        assert results["requires grad"].startswith("ValueError: group: ")


@pytest.fixture(scope="session")  # tests of other files come between those of two backends
def gloo(tmp_path_factory):
    """What two processes computed, by rank."""
    return run_ranks(run_rank, tmp_path_factory.mktemp("gloo"), available_backends("cpu"), "gloo")


@GLOO
def test_two_processes(gloo, target):
    if target.device != "cpu":
        pytest.skip("gloo is for the CPU")
    check_ranks(gloo, target.backend)
    advantages = torch.cat([make_share("plain", rank)[0] for rank in range(RANKS)])
    assert_close(torch.cat([results["compiled"] for results in gloo]), compute_oracle(advantages), rtol=2e-7)
