"""Gradients with respect to every float input, no graph where none is wanted, and torch.compile without a break."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Call, How, Sparse, assert_gradients, random_case, same_bits

from rl_triton_core import FinalValues, compute_gae
from rl_triton_core.testing import assert_close

SHAPE = (3, 5)
OPTIONS = {
    "plain": {},
    "time-major": {"time_dim": 0},
    "flags": {"term": 0.3, "trunc": 0.2},
    "masked": {"term": 0.2, "trunc": 0.2, "valid": 0.7},
    "masked, reset": {"term": 0.2, "trunc": 0.2, "valid": 0.7, "mask_mode": "reset"},
    "lambda 0": {"lambda_": 0.0, "trunc": 0.2},
}


def double_call(option, **changes):
    """A call in float64 with a gradient on every float tensor in it, and the names of those."""
    kwargs = {"term": 0, "trunc": 0, **OPTIONS[option], **changes}
    how = How(dtype=torch.float64, time_dim=kwargs.pop("time_dim", -1))
    call = Call(random_case(*SHAPE, seed=2, **kwargs), how=how)
    names = [name for name, x in call.kwargs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for name in names:
        call.kwargs[name].requires_grad_()
    return call, names


def gradcheck(call, names, backend):
    def function(*inputs):
        return call(backend, **dict(zip(names, inputs, strict=True)))

    assert_gradients(function, [call.kwargs[name] for name in names], backend)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("gamma", [0.9, "per step"])
@pytest.mark.parametrize("form", ["dense", "next_values"])
def test_gradients(float64_target, option, gamma, form):
    rng = np.random.default_rng(0)
    changes = {"gamma": rng.uniform(0.5, 1.0, SHAPE) if gamma == "per step" else gamma}
    if form == "next_values":
        changes |= {"bootstrap_values": None, "next_values": rng.standard_normal(SHAPE)}
    call, names = double_call(option, **changes)
    expected = {"rewards", "values", "next_values" if form == "next_values" else "bootstrap_values"}
    assert set(names) - {"gamma"} == expected and ("gamma" in names) == (gamma == "per step")
    gradcheck(call, names, float64_target.backend)


@pytest.mark.parametrize("valid", [1.0, 0.7])
def test_gradients_of_an_edge(float64_target, valid):
    call, names = double_call("plain", truncated=None, valid=valid, bootstrap_values=np.arange(1.0, 4.0))
    assert "bootstrap_values" in names
    gradcheck(call, names, float64_target.backend)


def test_gradients_of_a_scalar_tensor(float64_target):
    call, names = double_call("flags")
    call.kwargs["bootstrap_values"] = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    gradcheck(call, names, float64_target.backend)


def test_gradients_of_final_values(float64_target):
    """Through the entries and through the edge, which an entry replaces."""
    call, _ = double_call("flags")
    env, time = torch.nonzero(call.kwargs["truncated"], as_tuple=True)
    env, time = torch.cat([env, torch.tensor([1])]), torch.cat([time, torch.tensor([SHAPE[1] - 1])])
    value = torch.arange(1.0, len(env) + 1).double().requires_grad_()
    edge = torch.arange(3.0).double().requires_grad_()

    def function(value, edge):
        return call(float64_target.backend, bootstrap_values=FinalValues(env, time, value, edge))

    assert torch.autograd.gradcheck(function, [value, edge])


def test_float32_gradients_are_those_of_float64(target):
    """On every backend, Triton included."""
    case = random_case(4, 13, term=0.1, trunc=0.1, valid=0.8, gamma=np.random.default_rng(0).uniform(0.5, 1, (4, 13)))
    weights = torch.randn(2, 4, 13, generator=torch.Generator().manual_seed(0))
    names = ("rewards", "values", "gamma", "bootstrap_values")
    gradients = []
    for dtype, backend, device in ((torch.float32, target.backend, target.device), (torch.float64, "reference", "cpu")):
        call = Call(case.rounded(torch.float32), device, How(dtype=dtype))
        for name in names:
            call.kwargs[name].requires_grad_()
        result = call(backend)
        assert result.advantages.requires_grad and result.returns.requires_grad
        sum((w.to(x) * x).sum() for w, x in zip(weights, result, strict=True)).backward()
        gradients.append([call.kwargs[name].grad for name in names])
    for name, got, want in zip(names, *gradients, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, want, name=name)


def test_only_the_gradients_asked_for(target):
    call = Call(random_case(3, 5), target.device)
    call.kwargs["values"].requires_grad_()
    call(target.backend, compute_returns=False).advantages.sum().backward()
    assert call.kwargs["values"].grad is not None
    assert call.kwargs["rewards"].grad is None and not call.kwargs["rewards"].requires_grad


def test_half_precision_gradients_have_the_type_of_the_input(target):
    call = Call(random_case(3, 5), target.device, How(dtype=torch.bfloat16))
    call.kwargs["values"].requires_grad_()
    call(target.backend).advantages.sum().backward()
    assert call.kwargs["values"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_nan_in_masked_cells_reaches_no_gradient(target, mask_mode):
    case = random_case(4, 13, term=0.1, trunc=0.1, valid=0.7, mask_mode=mask_mode)
    names, gradients = ("rewards", "values", "bootstrap_values"), []
    for filler in (0.0, np.nan):
        filled = {name: np.where(case.mask, getattr(case, name), filler) for name in names}
        call = Call(replace(case, **filled), target.device)
        for name in names:
            call.kwargs[name].requires_grad_()
        result = call(target.backend)
        (result.advantages + 2 * result.returns).sum().backward()
        gradients.append([call.kwargs[name].grad for name in names])
    for one, other in zip(*gradients, strict=True):
        assert same_bits(one, other)
        assert not other[~torch.as_tensor(case.mask)].any()


def test_no_graph_unless_asked(target):
    call = Call(random_case(3, 5), target.device)
    assert not any(x.requires_grad for x in call(target.backend))
    call.kwargs["values"].requires_grad_()
    with torch.no_grad():
        assert not any(x.requires_grad for x in call(target.backend))
    with torch.inference_mode():
        call(target.backend)


# --- torch.compile ----------------------------------------------------------------------------------------------------

FORMS = {
    "dense": {"term": 0.2, "trunc": 0.2},
    "edge": {"term": 0.2, "truncated": None, "bootstrap_values": np.arange(3.0)},
    "scalar, masked": {"bootstrap_values": 0.5, "valid": 0.8},
    "next_values": {"bootstrap_values": None, "next_values": np.ones(SHAPE), "gamma": np.full(SHAPE, 0.9)},
    "final values": {"bootstrap_values": Sparse([0, 1], [1, 2], [1.0, 2.0], 3.0)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_without_a_graph_break(target, form, grad):
    if (target.interpreted or target.backend == "reference") and form != "dense":
        pytest.skip("tracing does not depend on the backend")
    torch._dynamo.reset()
    call = Call(random_case(*SHAPE, **FORMS[form]), target.device)
    kwargs = {**call.kwargs, "backend": target.backend}
    rewards, values = (kwargs.pop(name).requires_grad_(grad) for name in ("rewards", "values"))

    def function(rewards, values):
        advantages, returns = compute_gae(2 * rewards, values, **kwargs)
        return advantages + 1, returns

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for one in (function, compiled):
        advantages, returns = one(rewards, values)
        assert advantages.requires_grad == returns.requires_grad == grad
        leaves = torch.autograd.grad((advantages * returns).sum(), [rewards, values]) if grad else []
        results.append([advantages, returns, *leaves])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_compiles_with_out(target):
    torch._dynamo.reset()
    call = Call(random_case(*SHAPE), target.device)
    out = tuple(torch.full(SHAPE, torch.nan, device=target.device) for _ in range(2))

    def function(rewards, values, out):
        return call(target.backend, rewards=rewards, values=values, out=out).advantages * 2

    got = torch.compile(function, fullgraph=True, backend="aot_eager")(
        call.kwargs["rewards"], call.kwargs["values"], out
    )
    want = call(target.backend)
    assert same_bits(got, want.advantages * 2) and same_bits(out[1], want.returns)
