"""Numbers that are tensors without dimensions, such as schedules in PyTorch: read anew in every call, or traced."""

import pytest
import torch
from cases import ESTIMATORS, GAE, get_name, skip_repeated_tracing
from test_estimators_transforms import NUMBERS, check_one_compilation, make_arguments, results_of

import rl_triton_core as ours

NAMES = {name: [x for x in names if x != "bootstrap_values"] for name, names in NUMBERS.items()} | {"traces": ["decay"]}
WITH_NUMBERS = [estimator for estimator in ESTIMATORS if estimator.name in NAMES]
ALL = pytest.mark.parametrize("estimator", WITH_NUMBERS, ids=get_name)


def call_estimator(estimator, numbers, target, **changes):
    """With the numbers in their order, the rest as it is in a good call."""
    reals, flags, rest = make_arguments(estimator, device=target.device)
    given = {**reals, **flags, **rest, **dict(zip(NAMES[estimator.name], numbers, strict=True)), **changes}
    return results_of(estimator.function(**given, backend=target.backend))


def make_numbers(estimator, step=0):
    """Those that every dtype holds exactly."""
    return [0.5 + 0.125 * step + 0.0625 * i for i in range(len(NAMES[estimator.name]))]


def assert_equal(got, want):
    torch.testing.assert_close([*got], [*want], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@ALL
def test_tensors_in_host_memory(target, estimator, dtype):
    """Bit for bit what numbers give, also after somebody has written into the tensors."""
    tensors = [torch.zeros((), dtype=dtype) for _ in make_numbers(estimator)]
    for step in range(4):
        numbers = [step % 2] * len(tensors) if dtype == torch.int64 else make_numbers(estimator, step)
        for tensor, number in zip(tensors, numbers, strict=True):
            tensor.fill_(number)
        assert_equal(call_estimator(estimator, tensors, target), call_estimator(estimator, numbers, target))


@ALL
def test_discounts_that_are_not_read(target, estimator):
    """On the device of the other tensors, or with a gradient: those of one discount for each step."""
    first, *others = make_numbers(estimator)
    reals, _, _ = make_arguments(estimator, device=target.device)
    steps = next(iter(reals.values()))
    found = []
    for spread in (False, True):
        gamma = torch.tensor(first, device=target.device, requires_grad=True)
        results = call_estimator(estimator, [gamma.expand(steps.shape) if spread else gamma, *others], target)
        results[0].square().sum().backward()
        found.append([gamma.grad, *results])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    on_device = torch.tensor(first, device=target.device)
    torch.testing.assert_close(call_estimator(estimator, [on_device, *others], target), tuple(found[0][1:]))


def test_a_discount_for_each_of_several_calls(target):
    gammas = torch.tensor([0.5, 0.75, 1.0], device=target.device)
    got = torch.func.vmap(lambda gamma: call_estimator(GAE, [gamma, 0.5], target)[0])(gammas)
    want = [call_estimator(GAE, [gamma.item(), 0.5], target)[0] for gamma in gammas]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.covering
@pytest.mark.parametrize("differentiated", [False, True])
@ALL
def test_one_compilation_serves_all_values(target, estimator, differentiated):
    """Without a break of the graph."""
    skip_repeated_tracing(target, estimator is GAE)
    reals, flags, rest = make_arguments(estimator, device=target.device)
    next(iter(reals.values())).requires_grad_(differentiated)

    def call(numbers):
        given = {**reals, **flags, **rest, **dict(zip(NAMES[estimator.name], numbers, strict=True))}
        return results_of(estimator.function(**given, backend=target.backend))

    numbers = [[torch.tensor(x, dtype=torch.float64) for x in make_numbers(estimator, step)] for step in range(3)]
    results = check_one_compilation(call, [{"numbers": x} for x in numbers], 1e-6 if differentiated else 0)
    assert results[0].requires_grad == differentiated


@pytest.mark.parametrize("value, message", [(-0.5, "finite and >= 0"), (torch.inf, "finite"), (torch.nan, "finite")])
def test_what_is_out_of_range_when_compiled(value, message):
    torch._dynamo.reset()
    rewards, values = torch.ones(2, 3, 5)
    compiled = torch.compile(
        lambda gamma: ours.compute_gae(rewards, values, gamma=gamma, bootstrap_values=0.0).returns, backend="aot_eager"
    )
    compiled(torch.tensor(0.5))
    with pytest.raises(RuntimeError, match=f"gamma: expected a number {message}"):
        compiled(torch.tensor(value))


BAD = {
    "a gradient": (torch.tensor(0.5, requires_grad=True), ValueError, "got a tensor that requires grad"),
    "another device": (torch.tensor(0.5, device="meta"), ValueError, "got a tensor on meta, expected a number or"),
    "a bool": (torch.tensor(True), TypeError, "got dtype torch.bool"),
    "a complex number": (torch.tensor(0.5j), TypeError, "got dtype torch.complex64"),
    "a dimension": (
        torch.tensor([0.5]),
        TypeError,
        r"got a Tensor of shape \(1,\), expected a float or a tensor of one",
    ),
    "out of range": (torch.tensor(-0.5), ValueError, r"got -0.5, expected a number"),
    "not a number": (torch.tensor(torch.nan), ValueError, r"got nan, expected a number"),
}


@pytest.mark.parametrize(("value", "error", "message"), BAD.values(), ids=BAD)
@ALL
def test_bad_tensors(estimator, value, error, message):
    """Of the numbers after the discount, which may be one for each step."""
    names = [x for x in NAMES[estimator.name] if x not in ("gamma", "decay")]
    reals, flags, rest = make_arguments(estimator)
    for name in names:
        with pytest.raises(error, match=f"^{name}: {message}"):
            estimator.function(**{**reals, **flags, **rest, name: value})
    with torch.no_grad():
        for name in names if value.requires_grad else ():
            estimator.function(**{**reals, **flags, **rest, name: value})


def test_infinite_clips():
    reals, flags, rest = make_arguments(next(x for x in ESTIMATORS if x.name == "vtrace"))
    given = {**reals, **flags, **rest, "rho_bar": torch.inf}
    got, want = (ours.compute_vtrace(**{**given, "rho_bar": x}) for x in (torch.tensor(torch.inf), torch.inf))
    assert_equal(got, want)
