"""Gradients with respect to every real-valued tensor, no graph where none is wanted, torch.compile without a break."""

import cases
import numpy as np
import pytest
import torch
from cases import Call, How, Sparse, Vector, get_name, random_case, same_bits, skip_repeated_tracing, with_form

from rl_triton_core import FinalValues, ScanState, compute_gae, linear_recurrence
from rl_triton_core.testing import assert_close

ALL = pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
ROWS = 2
SHAPE = (ROWS, 5)
DEPARTED = np.array([False, True])
OPTIONS = {
    "plain": {"term": 0, "trunc": 0},
    "time-major": {"time_dim": 0},
    "flags": {"term": 0.3, "trunc": 0.3},
    "masked": {"term": 0.2, "trunc": 0.2, "valid": 0.7},
    "masked, reset": {"term": 0.2, "trunc": 0.2, "valid": 0.7, "mask_mode": "reset"},
}


def avoid_clips(case):
    """Ratios that a finite difference does not push over a clip, where the function has a kink."""
    rng = np.random.default_rng(0)
    ratios = rng.choice([-0.5, 0.3, 1.2], case.shape) + 0.1 * rng.random(case.shape)
    if "log_ratios" in case.args:
        return case.replace(log_ratios=ratios, rho_bar=2.0, c_bar=1.0)
    if "target_log_probs" in case.args:
        behaviour = -rng.random(case.shape)
        return case.replace(target_log_probs=behaviour + ratios, behaviour_log_probs=behaviour, rho_bar=2.0, c_bar=1.0)
    return case


def tell_variants(estimator, **options):
    """Every form of every argument that can carry a gradient."""
    features = (2,) if estimator in cases.FORWARD or estimator is cases.LINEAR else ()
    rng = np.random.default_rng(0)
    case = random_case(estimator, *SHAPE, features=features, **options)
    if estimator is cases.LINEAR:
        zeros = case.replace(beta=put_zeros(case["beta"]))
        yield zeros.replace(reverse=True, initial=rng.standard_normal((ROWS, 2)))
        yield zeros.replace(reverse=False, initial=rng.standard_normal((ROWS, 2)))
        yield case
    elif estimator is cases.TRACES:
        state = (rng.standard_normal((ROWS, 2)), DEPARTED)
        yield case
        for decay in (put_zeros(rng.random(SHAPE)), put_zeros(rng.random((*SHAPE, 2))), Vector(rng.random(2))):
            yield case.replace(decay=decay, state=state)
    elif estimator is cases.PREFIX:
        state = (rng.standard_normal((ROWS, 2)), DEPARTED)
        yield case.replace(state=state)
        yield case.replace(boundary="starts_at")
    else:
        for form in cases.FORMS[estimator.name]:
            if form not in ("sparse", "edge"):
                yield avoid_clips(with_form(case, form))
        yield avoid_clips(case).replace(gamma=rng.uniform(0.5, 1.0, SHAPE))
        if estimator in (cases.GAE, cases.LAMBDA):
            yield case.replace(lambda_=0.0)
        if estimator in cases.OFF_POLICY:
            yield avoid_clips(cases.with_log_probs(case)).replace(lambda_=0.0)
        if estimator in cases.BOOTSTRAPPED:
            yield avoid_clips(case).replace(truncated=None, bootstrap_values=rng.standard_normal(ROWS))
            yield avoid_clips(case).replace(bootstrap_values=np.array(1.5))


def put_zeros(factors):
    """Factors some of which are exactly 0, at both ends of a row too. What they let through is smooth there."""
    factors[0, 0] = factors[0, 2] = factors[1, -1] = 0.0
    return factors


def find_leaves(call, case):
    """Every float tensor of a call, under its name."""
    found = {name: x for name, x in call.kwargs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if "state" in case.args:
        found["state"] = call.kwargs["state"].value
    return found


def replace_leaves(call, names, tensors):
    """The arguments with these tensors in their places."""
    kwargs = dict(zip(names, tensors, strict=True))
    if "state" in kwargs:
        kwargs["state"] = ScanState(kwargs["state"], call.kwargs["state"].done)
    return kwargs


@pytest.mark.covering
@pytest.mark.parametrize("option", OPTIONS)
@ALL
def test_gradients(float64_target, estimator, option):
    if estimator is cases.LINEAR and option not in ("plain", "time-major"):
        pytest.skip("it has no flags")
    options = dict(OPTIONS[option])
    how = How(dtype=torch.float64, time_dim=options.pop("time_dim", -1))
    for case in tell_variants(estimator, **options):
        call = Call(case, how=how)
        inputs = find_leaves(call, case)
        assert set(inputs) >= {name for name in estimator.inputs if name in case.args}

        def call_estimator(*tensors, call=call, names=tuple(inputs)):
            return call(float64_target.backend, **replace_leaves(call, names, tensors))

        cases.assert_gradients(call_estimator, [x.requires_grad_() for x in inputs.values()], float64_target.backend)


@pytest.mark.parametrize("estimator", cases.BOOTSTRAPPED, ids=get_name)
def test_gradients_of_final_values(float64_target, estimator):
    """Through the entries and through the edge, which an entry replaces."""
    case = avoid_clips(random_case(estimator, *SHAPE, trunc=0.3))
    call = Call(case, how=How(dtype=torch.float64))
    env, time = torch.nonzero(call.kwargs["truncated"], as_tuple=True)
    env, time = torch.cat([env, torch.tensor([1])]), torch.cat([time, torch.tensor([SHAPE[1] - 1])])
    value = torch.arange(1.0, len(env) + 1).double().requires_grad_()
    edge = torch.arange(float(ROWS)).double().requires_grad_()

    def call_estimator(value, edge):
        return call(float64_target.backend, bootstrap_values=FinalValues(env, time, value, edge))

    assert torch.autograd.gradcheck(call_estimator, [value, edge])


@ALL
def test_float32_gradients_are_those_of_float64(target, estimator):
    """On every backend, Triton included, for every form; the results with a graph are those without."""
    for case in tell_variants(
        estimator, term=0.15, trunc=0.15, **({} if estimator is cases.LINEAR else {"valid": 0.8})
    ):
        gradients = []
        for dtype, backend, device in (
            (torch.float32, target.backend, target.device),
            (torch.float64, "reference", "cpu"),
        ):
            call = Call(case.rounded(torch.float32), device, How(dtype=dtype))
            inputs, plain = find_leaves(call, case), call(backend)
            for x in inputs.values():
                x.requires_grad_()
            results = call(backend)
            for got, expected in zip(results, plain, strict=True):
                assert got.dtype == expected.dtype and got.requires_grad and not expected.requires_grad
                assert_close(got.detach(), expected)
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(x.shape, generator=generator) for x in results]
            sum((w.to(x) * x).sum() for w, x in zip(weights, results, strict=True)).backward()
            gradients.append([x.grad for x in inputs.values()])
        for name, got, want in zip(inputs, *gradients, strict=True):
            assert got.dtype == torch.float32, name
            assert_close(got, want, name=name, rtol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ALL
def test_only_the_gradients_asked_for(target, estimator, dtype):
    """Of the type of the input."""
    case = random_case(estimator, *SHAPE)
    for name in estimator.inputs:
        call = Call(case, target.device, How(dtype=dtype))
        inputs = find_leaves(call, case)
        inputs[name].requires_grad_()
        results = call(target.backend)
        graph = [x for x in results if x.requires_grad]
        assert graph, name
        sum(x.sum() for x in graph).backward()
        grad = inputs[name].grad
        assert grad is not None and grad.shape == inputs[name].shape and grad.dtype == dtype
        assert all(x.grad is None for other, x in inputs.items() if other != name)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("estimator", (*cases.BACKWARD, *cases.FORWARD), ids=get_name)
def test_nan_in_cells_that_are_not_read_reaches_no_gradient(target, estimator, mask_mode):
    """Masked cells, values behind boundaries, and what is known of actions behind them."""
    case = random_case(estimator, 4, 13, term=0.2, trunc=0.2, valid=0.7, mask_mode=mask_mode)
    check_unread_gradients(case, target)
    if estimator is cases.RETRACE:
        check_unread_gradients(with_form(case, "actions"), target)


def check_unread_gradients(case, target):
    """NaN in the cells that are not read changes no gradient, and gets none."""
    gradients = []
    names = [name for name, x in case.args.items() if cases.is_per_step(x) and x.dtype.kind == "f"]
    cells = {
        name: x.reshape(x.shape + (1,) * (case[name].ndim - 2))
        for name, x in cases.find_readable(case).items()
        if name in names
    }
    for filler in (0.0, np.nan):
        filled = {name: np.where(cells[name], case[name], filler) for name in names}
        call = Call(case.replace(**filled), target.device)
        for name in names:
            call.kwargs[name].requires_grad_()
        sum((i + 1) * x.sum() for i, x in enumerate(call(target.backend))).backward()
        gradients.append([call.kwargs[name].grad for name in names])
    for name, one, other in zip(names, *gradients, strict=True):
        assert torch.equal(one, other), name
        assert not other.cpu()[~torch.as_tensor(cells[name]).expand(other.shape)].any(), name


def test_the_gradient_of_a_probability_of_zero_is_the_value(float64_target):
    case = with_form(random_case(cases.RETRACE, *SHAPE, term=0.2, valid=0.8), "actions")
    case["next_action_probs"][:, :, 0] = 0.0
    call = Call(case, how=How(dtype=torch.float64))

    def call_estimator(probs):
        return call(float64_target.backend, next_action_probs=probs)

    assert torch.autograd.gradcheck(call_estimator, [call.kwargs["next_action_probs"].requires_grad_()])
    values = call.kwargs["next_q_values"]
    values[:, :, 0] = torch.inf  # is not read, and neither is its gradient
    (grad,) = torch.autograd.grad(sum(x.sum() for x in call(float64_target.backend)), call.kwargs["next_action_probs"])
    assert grad.isfinite().all() and not grad[:, :, 0].any() and grad[:, :, 1].any()


@pytest.mark.parametrize("estimator", cases.OFF_POLICY, ids=get_name)
def test_a_ratio_that_overflows_and_is_clipped_has_no_gradient(target, estimator):
    case = random_case(estimator, 2, 6, term=0, trunc=0)
    gradients = []
    for log_ratio in (1000.0, 50.0):  # both are clipped; the exponential of the first is infinite
        case["log_ratios"][:, 2] = log_ratio
        call = Call(case.rounded(torch.float32), target.device)
        log_ratios = call.kwargs["log_ratios"].requires_grad_()
        sum(x.sum() for x in call(target.backend)).backward()
        gradients.append(log_ratios.grad)
    assert not gradients[0][:, 2].any() and gradients[0].any()
    assert_close(*gradients)


def test_the_gradient_of_a_scan_is_contained_too(target):
    """A NaN behind a beta of 0 reaches no gradient in front of it, and no gradient reaches across."""
    for reverse in (True, False):
        alpha, beta = torch.ones(2, 6, device=target.device), torch.full((2, 6), 0.5, device=target.device)
        beta[:, 3] = 0.0
        poisoned = 4 if reverse else 1
        alpha[0, poisoned] = torch.nan
        alpha.requires_grad_()
        states = linear_recurrence(alpha, beta, reverse=reverse, backend=target.backend)
        clean = states[:, :4] if reverse else states[:, 3:]
        clean.sum().backward()
        assert clean.isfinite().all() and alpha.grad.isfinite().all()
        assert same_bits(alpha.grad[0], alpha.grad[1])
        assert not (alpha.grad[:, 4:] if reverse else alpha.grad[:, :3]).any()


@ALL
def test_no_graph_unless_asked(target, estimator):
    call = Call(random_case(estimator, *SHAPE), target.device)
    assert not any(x.requires_grad for x in call(target.backend))
    call.kwargs[estimator.inputs[0]].requires_grad_()
    with torch.no_grad():
        assert not any(x.requires_grad for x in call(target.backend))
    with torch.inference_mode():
        call(target.backend)


def draw_compiled_cases(estimator):
    """A case with every kind of optional argument present, and one with few."""
    features = (2,) if estimator in cases.FORWARD or estimator is cases.LINEAR else ()
    case = random_case(estimator, *SHAPE, term=None, trunc=None, features=features)
    if estimator is cases.LINEAR:
        yield case.replace(reverse=False, initial=np.ones((ROWS, 2)))
        return
    full = random_case(estimator, *SHAPE, term=0.2, trunc=0.2, valid=0.8, features=features)
    if estimator in cases.FORWARD:
        full = full.replace(state=(np.ones((ROWS, 2)), DEPARTED))
        yield full.replace(decay=Vector(np.array([0.5, 0.9]))) if estimator is cases.TRACES else full
        yield case
    else:
        yield full
        yield with_form(case, cases.FORMS[estimator.name][-2 if estimator is not cases.RETRACE else 1]).replace(
            gamma=np.full(SHAPE, 0.9)
        )
        if estimator in cases.BOOTSTRAPPED:
            yield full.replace(bootstrap_values=Sparse([0, 1], [1, 2], [1.0, 2.0], 3.0))


@pytest.mark.covering
@pytest.mark.parametrize("grad", [False, True])
@ALL
def test_compiles_without_a_graph_break(target, estimator, grad):
    skip_repeated_tracing(target, grad and estimator in (cases.GAE, cases.TRACES))
    for case in draw_compiled_cases(estimator):
        call = Call(case, target.device)
        kwargs = {**call.kwargs, "backend": target.backend}
        first = kwargs.pop(estimator.inputs[0]).requires_grad_(grad)

        def call_estimator(x, kwargs=kwargs):
            answer = estimator.function(**{**kwargs, estimator.inputs[0]: 2 * x})
            return [y + 1 for y in ((answer,) if isinstance(answer, torch.Tensor) else answer)]

        assert all(x.requires_grad == grad for x in cases.check_full_graph(call_estimator, first))


@pytest.mark.parametrize("estimator", cases.FORWARD, ids=get_name)
def test_compiles_with_a_state(target, estimator):
    skip_repeated_tracing(target, estimator is cases.TRACES)
    torch._dynamo.reset()
    call = Call(random_case(estimator, *SHAPE, valid=0.8), target.device)
    state = ScanState(torch.ones(ROWS, device=target.device), torch.zeros(ROWS, dtype=torch.bool, device=target.device))

    def call_estimator(x, state):
        return estimator.function(**{**call.kwargs, "x": x}, state=state, return_state=True, backend=target.backend)

    want, before = call_estimator(call.kwargs["x"], state)
    got, after = torch.compile(call_estimator, fullgraph=True, backend="aot_eager")(call.kwargs["x"], state)
    assert same_bits(got, want) and same_bits(after.value, before.value) and torch.equal(after.done, before.done)


@ALL
def test_compiles_with_out(target, estimator):
    skip_repeated_tracing(target, estimator is cases.GAE)
    torch._dynamo.reset()
    call = Call(random_case(estimator, *SHAPE), target.device)
    outs = tuple(torch.full(SHAPE, torch.nan, device=target.device) for _ in estimator.outputs)
    want = call(target.backend)

    def call_estimator(x, outs):
        out = outs if len(outs) > 1 else outs[0]
        return call(target.backend, **{estimator.inputs[0]: x}, out=out)[0] * 2

    got = torch.compile(call_estimator, fullgraph=True, backend="aot_eager")(call.kwargs[estimator.inputs[0]], outs)
    assert same_bits(got, want[0] * 2) and all(same_bits(x, y) for x, y in zip(outs, want, strict=True))


RATIOS = {"vtrace": cases.VTRACE, "retrace": cases.RETRACE, "gae": cases.GAE}


@pytest.mark.covering
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RATIOS)
def test_a_nan_gives_no_gradient_to_an_episode_that_is_not_read(float64_target, name, compiled):
    """Two episodes; the loss reads the first, and each input of the second is NaN in one cell in turn."""
    estimator, ends = RATIOS[name], torch.tensor([[False, False, True, False, False, False]])
    rest = {} if estimator is cases.RETRACE else {"bootstrap_values": 0.5}
    torch._dynamo.reset()

    def function(*tensors):
        given = dict(zip(estimator.inputs, tensors, strict=True))
        targets, advantages = estimator.function(
            **given, terminated=ends, gamma=0.9, **rest, backend=float64_target.backend
        )
        return targets[:, :3].sum() + advantages[:, :3].square().sum()

    call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    for poisoned in range(len(estimator.inputs)):
        torch.manual_seed(poisoned)
        inputs = [torch.randn(1, 6, dtype=torch.float64) for _ in estimator.inputs]
        clean = [x.clone().requires_grad_() for x in inputs]
        function(*clean).backward()
        inputs[poisoned][0, 4] = torch.nan
        dirty = [x.requires_grad_() for x in inputs]
        call(*dirty).backward()
        for i, (x, y) in enumerate(zip(dirty, clean, strict=True)):
            kept = [t for t in range(6) if i != poisoned or t != 4]
            torch.testing.assert_close(x.grad[0, kept], y.grad[0, kept], rtol=1e-12, atol=1e-14)


def test_a_nan_of_an_action_gives_no_gradient_to_an_episode_that_is_not_read(float64_target):
    """The values of one action are NaN at a step that ends its episode by a discount of 0, and in the next episode."""
    torch.manual_seed(0)
    probs, values, gamma = torch.rand(1, 6, 3).softmax(-1), torch.randn(1, 6, 3), torch.full((1, 6), 0.9)
    gamma[0, 2], values[0, [2, 4], 1] = 0.0, torch.nan
    zero, actions = torch.zeros(1, 6), (probs.double().requires_grad_(), values.double().requires_grad_())
    arguments = {"next_action_probs": actions[0], "next_q_values": actions[1], "log_ratios": zero, "gamma": gamma}
    targets, advantages = cases.RETRACE.function(zero, zero, **arguments, backend=float64_target.backend)
    (targets[:, :3].sum() + advantages[:, :3].square().sum()).backward()
    for x in actions:
        assert x.grad[0, :2].all() and not x.grad[0, 2:].any()


def test_a_nan_that_is_read_gives_nan(float64_target):
    log_ratios = torch.tensor([[0.1, torch.nan, 0.2]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 3, dtype=torch.float64)
    arguments = {"log_ratios": log_ratios, "bootstrap_values": 0.0, "backend": float64_target.backend}
    cases.VTRACE.function(one, one, **arguments).targets[0, 0].backward()
    assert log_ratios.grad[0, 1].isnan()


def test_final_values_in_a_list_have_gradients():
    value, rewards = torch.tensor(2.0, requires_grad=True), torch.ones(1, 3)
    cut = torch.tensor([[False, True, False]])
    found = compute_gae(rewards, rewards, None, cut, bootstrap_values=FinalValues([0], [1], [value], 0.0), gamma=0.9)
    found.advantages[0, 1].backward()
    assert value.grad.item() == pytest.approx(0.9)


@pytest.mark.parametrize(("dtype", "graph"), [(torch.float64, False), (torch.float64, True), (torch.float32, False)])
def test_sums_over_actions_are_in_float64(float64_target, dtype, graph):
    """Thirds of float32 probabilities: their sums differ from those in float32 in the eighth digit."""
    if dtype == torch.float32 and float64_target.backend != "reference":
        pytest.skip("it sums in float32 then")
    torch.manual_seed(0)
    probs, q_values = torch.rand(2, 4, 7).softmax(-1), 100 * torch.randn(2, 4, 7)
    rewards = torch.zeros(2, 4, dtype=dtype, requires_grad=graph)
    arguments = {"next_action_probs": probs, "next_q_values": q_values, "log_ratios": torch.zeros(2, 4), "gamma": 1.0}
    arguments |= {"lambda_": 0.0, "backend": float64_target.backend}
    targets = cases.RETRACE.function(rewards, torch.zeros(2, 4), **arguments).targets
    torch.testing.assert_close(targets, (probs.double() * q_values.double()).sum(-1).to(dtype), rtol=1e-13, atol=1e-13)
