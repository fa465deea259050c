"""Losses that are computed again like earlier ones are what whole calls give, with their gradients, and errors stay."""

import importlib
import itertools
import math
from functools import partial

import pytest
import torch
from gpu_checks import GPU
from losses_cases import HEADS, differentiate, make
from test_fast_path import Kernel, Launcher

from rl_triton_core import fast_path_status
from rl_triton_core._internal import backend as backends
from rl_triton_core._internal.launch import fast_path, launcher
from rl_triton_core._internal.loss import solve
from rl_triton_core.losses import LogProbs, get_gradients, grpo_loss, ppo_loss

pytestmark = pytest.mark.covering

NORMALIZED = {"normalize_advantages": True, "entropy_coef": 0.02}


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """Of the tensors, of whose backend the launches are repeated."""
    if request.param == "cpu":
        pytest.importorskip("numba")
    fast_path.forget_plans()
    return request.param


@pytest.fixture
def normal_calls(monkeypatch):
    """A list to which every call that takes the normal path adds one."""
    calls, run = [], solve.run_backend
    monkeypatch.setattr(solve, "run_backend", lambda *given: (calls.append(1), run(*given))[1])
    return calls


def take_normal_path(compute):
    """What a function of no arguments gives where no launch is repeated."""
    enabled, fast_path.Switch.enabled = fast_path.Switch.enabled, False
    plans = [(memory, {**memory.forms}) for memory in fast_path.MEMORIES]
    for memory, _ in plans:
        memory.forms.clear()
    try:
        return compute()
    finally:
        fast_path.Switch.enabled = enabled
        for memory, kept in plans:
            memory.forms.update(kept)


def derive(case, **options):
    result, inputs = differentiate(case, **options)
    return [*(x.detach() for x in result), *(x.grad for x in inputs)]


def assert_same_bits(got, want):
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.equal(x.nan_to_num(77), y.nan_to_num(77))


@pytest.mark.parametrize("exact_kl", [False, True], ids=["", "exact KL"])
@pytest.mark.parametrize("head", HEADS)
def test_repeated_calls(device, head, exact_kl, normal_calls):
    """Other tensors and numbers give what the normal path gives, bit for bit."""
    for seed in range(6):
        numbers = {"clip": 0.1 + seed / 50, "entropy_coef": seed / 100, "value_coef": seed, "value_factor": 1.5 * seed}
        case, factor = make(head, seed=seed), 1.0 + seed % 2
        if head == "bernoulli":  # the cpu backend copies others
            case.data["actions"] = case.data["actions"].float()
        numbers |= {"exact_kl": exact_kl, "kl_coef": 0.1 * seed if exact_kl and case.old else 0.0}
        options = {"device": device, "factor": factor, "normalize_advantages": True, **numbers}
        want = take_normal_path(partial(derive, case, **options))
        assert_same_bits(derive(case, **options), want)
    assert len(normal_calls) == 6 + 2


def call_tokens(x, data, **options):
    x = x.clone().requires_grad_()
    result = grpo_loss(x, data[0], data[1][:, 0].contiguous(), ref_log_probs=data[2], **options)
    result.loss.backward()
    return [*(y.detach() for y in result), x.grad]


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_tokens(device, aggregation, normal_calls):
    """Numbers of tokens are not kept either."""
    for numbers in (5 * (None,), (60, 60, 60, 30, 30.0, 7, 60)):
        for seed, number in enumerate(numbers):
            x, *data = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(seed)).to(device)
            options = {"aggregation": aggregation, "kl_coef": 0.1 * seed, "normalizer": number}
            want = take_normal_path(partial(call_tokens, x, data, **options))
            assert_same_bits(call_tokens(x, data, **options), want)
        assert numbers[0] or len(normal_calls) == 5 + 2


def list_variants(case):
    """Calls that differ in what is given, in dtypes, shapes, memory formats, gradients or options."""
    rows = {name: x for name, x in case.data.items() if name in ("old_log_probs", "advantages")}
    yield {}
    yield {"mask": torch.arange(37) % 3 > 0}
    yield {"mask": torch.rand(37, generator=torch.Generator().manual_seed(1))}
    yield {"values": None, "returns": None, "old_values": None}
    yield {"value_clip": 0.2, "value_clip_mode": "cleanrl"}
    yield {"value_loss": "huber"}
    yield {"clip": None}
    yield {"clip": math.inf}
    yield {"clip": 1}
    yield {"clip": torch.tensor(0.3)}
    yield {"dual_clip": 1.5}
    yield {"log_ratio_clamp": 0.2}
    yield {"kl_estimator": "k3", "kl_coef": 0.3}
    yield {name: x.bfloat16() for name, x in rows.items()}
    yield {name: torch.stack([x, x], 1)[:, 0] for name, x in rows.items()}
    yield {name: torch.cat([x[:1], x])[1:] for name, x in rows.items()}
    yield {"old_log_probs": case.data["advantages"]}
    yield {"normalize_advantages": False}
    yield {"epsilon_mode": "floor"}
    yield {"epsilon": 0.5}
    yield {"backend": "reference"}


def test_what_changes_is_noticed(device):
    """One after another and back again."""
    case = make("multi")
    wants = {}
    for _ in range(3):
        for i, changes in enumerate(list_variants(case)):
            given = {name: x for name, x in changes.items() if name in case.data or name == "values"}
            options = {**NORMALIZED, **{name: x for name, x in changes.items() if name not in given}}
            network = {name: x for name, x in case.network.items() if given.get(name, x) is not None}
            data = {name: x for name, x in {**case.data, **given}.items() if name not in case.network}
            changed = partial(derive, case._replace(network=network, data=data), device=device, **options)
            if i not in wants:
                wants[i] = take_normal_path(changed)
            assert_same_bits(changed(), wants[i])


def test_what_requires_grad_is_noticed(device):
    """The gradients that are wanted, and whether there is a graph at all."""
    x, old, advantages, values, returns = torch.randn(5, 64, device=device)
    for _ in range(4):
        for grads in ((True, True), (True, False), (False, True), (False, False)):
            log_probs, v = (y.clone().requires_grad_(grad) for y, grad in zip((x, values), grads, strict=True))
            for graph in (True, False):
                with torch.set_grad_enabled(graph):
                    loss = ppo_loss(LogProbs(log_probs), None, old, advantages, values=v, returns=returns).loss
                assert loss.requires_grad == (graph and any(grads))
            if any(grads):
                ppo_loss(LogProbs(log_probs), None, old, advantages, values=v, returns=returns).loss.backward()
                assert (log_probs.grad is not None, v.grad is not None) == grads


def test_graphs_stay(device, normal_calls):
    """One that is retained, gradients that are ready, and no second derivative; of a parameter, too."""
    x, old, advantages = torch.randn(3, 64, device=device)
    x = torch.nn.Parameter(x)
    for _ in range(4):
        loss = ppo_loss(LogProbs(x), None, old, advantages).loss
        (ready,) = get_gradients(loss)
        first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second) and torch.equal(first, ready) and first.shape == x.shape
        with pytest.raises(RuntimeError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)
        assert torch.equal(torch.autograd.grad(2 * loss, x)[0], 2 * second)
    assert len(normal_calls) == 2


def test_errors_stay(device):
    x, old, advantages, values, returns = torch.randn(5, 64, device=device)
    x.requires_grad_()
    given = {"old_log_probs": old, "advantages": advantages, "values": values, "returns": returns}
    given |= {"clip": 0.2, "value_clip": 0.1, "old_values": values}
    for _ in range(4):
        ppo_loss(LogProbs(x), None, **given)
    for bad in (
        {"clip": float("nan")},
        {"clip": True},
        {"value_factor": -1.0},
        {"advantages": advantages[1:]},
        {"advantages": advantages.clone().requires_grad_()},
        {"old_log_probs": None},
        {"backend": "none"},
    ):
        for _ in range(3):
            with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
                ppo_loss(LogProbs(x), None, **{**given, **bad})


def test_tensors_of_coefficients_are_read_in_every_call(device):
    """On the device of the others, and in host memory, where schedules of frameworks are."""
    x, old, advantages = torch.randn(3, 64, device=device)
    for at, is_new in itertools.product({"cpu", device}, (False, True)):
        number = torch.tensor(0.5, device=at)
        for _ in range(4):
            number = number * 0.9 if is_new else number.mul_(0.9)
            got = ppo_loss(LogProbs(x), None, old, advantages, entropy_coef=number)
            want = ppo_loss(LogProbs(x), None, old, advantages, entropy_coef=float(number))
            assert torch.equal(got.loss, want.loss)


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("part", ["loss", "policy_loss", "approx_kl"])
def test_a_part_of_a_loss_in_a_function_with_a_fast_path(device, part, is_made):
    """What a launch writes beside it has memory too. Inputs that are made in the function are no arguments of it."""

    def compute_part(x, old, advantages):
        return getattr(ppo_loss(LogProbs(x + 1 if is_made else x), None, old, advantages), part)

    function = fast_path.with_fast_path(compute_part)
    for seed in range(5):
        x, old, advantages = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)).to(device)
        assert torch.equal(function(x, old, advantages), compute_part(x, old, advantages))
        x.requires_grad_()
        found = [compute(x, old, advantages) for compute in (function, compute_part)]
        assert all(y.requires_grad == (part == "loss") for y in found)
        assert part != "loss" or torch.equal(*(torch.autograd.grad(y, x)[0] for y in found))


# --- launches of Triton's, without a GPU -----------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch, no_device):
    """A list of the launches of the triton backend, whose results keep what their memory held."""
    triton_losses = pytest.importorskip("rl_triton_core._internal.loss.triton")
    calls, names = [], ("moments", "compute_tiles", "finish_sums", "scale_gradients")
    kernels = {name: GridOf(Kernel(Launcher(calls))) for name in names}
    for name, kernel in kernels.items():
        kernel.__name__, kernel.arg_names = name, ()
        monkeypatch.setattr(triton_losses.moments if name == "moments" else triton_losses.kernels, name, kernel)
    monkeypatch.setattr("rl_triton_core._internal.launch.kernels.KERNELS", {})
    monkeypatch.setattr(triton_losses, "compile_chosen", lambda choices: {})
    monkeypatch.setattr(backends, "why_unavailable", lambda *given: None)
    monkeypatch.setattr(launcher, "launch_hooks", lambda: (None, None))
    fast_path.forget_plans()
    yield calls
    fast_path.forget_plans()


class GridOf:
    """In the place of a kernel that is not compiled yet."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps, enable_fp_fusion, **options):
            self.kernel[(*grid, 1, 1)](*arguments, *options.values())
            return self.kernel

        return compile_and_launch


def describe_launches(calls, given):
    """Arguments with the names of tensors in the place of addresses: of those given, or "new"."""
    names = {range(x.data_ptr(), x.data_ptr() + x.nbytes): f"given {i}" for i, x in enumerate(given)}

    def describe(x):
        if isinstance(x, tuple):
            return tuple(map(describe, x))
        at = x.data_ptr() if isinstance(x, torch.Tensor) else x
        if type(at) is not int or at < 1 << 20:  # no address: a process begins above
            return x
        return next((f"{name} + {at - memory.start}" for memory, name in names.items() if at in memory), "new")

    return [describe(tuple(launch)) for launch in calls]


@pytest.mark.parametrize("n", [37, 3000], ids=["one tile", "several tiles"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("head", HEADS)
def test_launches_are_repeated(launched, head, masked, n):
    """With the same arguments as in whole calls, but for the addresses of other tensors."""
    case = make(head, n=n)
    options = {"backend": "triton", "mask": torch.arange(n) % 3 > 0 if masked else None, **NORMALIZED}
    described = []
    for _ in range(5):
        launched.clear()
        data = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in case.data.items()}
        _, inputs = differentiate(case._replace(data=data), **options)
        given = [*inputs, *(x for x in data.values() if isinstance(x, torch.Tensor))]
        described.append(describe_launches(launched, given))
    assert all(x == described[0] for x in described)
    assert len(described[0]) == (4 if n > 37 else 2)
    assert fast_path_status().shapes["ppo_loss"] == 1


def test_numbers_in_host_memory_make_no_plan(launched):
    """They are read in every call, so that a launch that is repeated would have an old one."""
    read_elsewhere = importlib.import_module("rl_triton_core._internal.loss.triton").read_elsewhere
    with launcher.record_launches() as launches:
        assert read_elsewhere(torch.tensor(2.0), torch.device("cuda")) == 2
    with pytest.raises(launcher.NoPlanError):
        launches[0].resolve()
