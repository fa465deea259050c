"""Calls inside torch.compile with symbols, forward-mode differentiation and torch.func."""

from functools import partial

import pytest
import torch
from cases import BACKWARD, ESTIMATORS, FORWARD, GAE, LINEAR, TRACES, Call, get_name, random_case, skip_repeated_tracing
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import rl_triton_core as ours
from rl_triton_core._internal.scan.autograd import differentiable_scan

ALL = pytest.mark.parametrize("estimator", ESTIMATORS, ids=get_name)
NUMBERS = {
    "gae": ("gamma", "lambda_", "bootstrap_values"),
    "vtrace": ("gamma", "lambda_", "bootstrap_values", "rho_bar", "c_bar"),
    "retrace": ("gamma", "lambda_", "rho_bar", "c_bar"),
    "lambda": ("gamma", "lambda_", "bootstrap_values"),
    "discounted": ("gamma", "bootstrap_values"),
    "traces": ("gamma", "lambda_"),
}


def make_arguments(estimator, shape=(3, 5), seed=0, dtype=torch.float32, device="cpu"):
    """A call's real-valued tensors, its flags, and the rest."""
    masked = {} if estimator is LINEAR else {"valid": 0.8}
    given = Call(random_case(estimator, *shape, seed=seed, **masked)).kwargs
    given = {name: x for name, x in given.items() if not name.startswith("compute_")}
    tensors = {name: x.to(device) for name, x in given.items() if isinstance(x, torch.Tensor)}
    reals = {name: x.to(dtype) for name, x in tensors.items() if x.is_floating_point()}
    flags = {name: x for name, x in tensors.items() if not x.is_floating_point()}
    return reals, flags, {name: x for name, x in given.items() if name not in tensors}


def results_of(answer):
    return (answer,) if isinstance(answer, torch.Tensor) else tuple(x for x in answer if x is not None)


def check_one_compilation(function, calls, tolerance=0.0, **options):
    """The first call's compilation serves all, without a break of the graph. Returns the last call's results."""
    torch._dynamo.reset()
    first, counter = 0, CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, **options)
    for arguments in calls:
        got = compiled(**arguments)
        torch.testing.assert_close(got, function(**arguments), rtol=tolerance, atol=tolerance, equal_nan=True)
        first = first or counter.frame_count  # the first call may be traced more than once
    assert counter.frame_count == first
    return got


@pytest.mark.covering
@ALL
@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
def test_symbolic_shapes_and_numbers_compile_once(target, estimator, differentiated):
    """Three shapes, and other numbers each time."""
    skip_repeated_tracing(target, estimator in (GAE, TRACES))
    names, calls = NUMBERS.get(estimator.name, ()), []
    for i, shape in enumerate(((3, 5), (4, 7), (6, 9))):
        reals, flags, rest = make_arguments(estimator, shape, seed=i, device=target.device)
        next(iter(reals.values())).requires_grad_(differentiated)
        numbers = [0.5 + 0.1 * i + 0.01 * j for j in range(len(names))]
        calls.append({"reals": reals, "flags": flags, "numbers": numbers})

    def call_estimator(reals, flags, numbers):
        given = {**reals, **flags, **rest, **dict(zip(names, numbers, strict=True)), "backend": target.backend}
        return results_of(estimator.function(**given))

    results = check_one_compilation(call_estimator, calls, 1e-6 if differentiated else 0, dynamic=True)
    assert all(x.requires_grad == differentiated for x in results)


@pytest.mark.parametrize("packed", [False, True])
def test_checks_of_values_compile_once(packed):
    """Those of offsets, and of the cells of sparse bootstrap values."""
    calls, sparse = [], ours.FinalValues(torch.arange(2), torch.arange(2), torch.ones(2), last_value=0.5)
    for rows, steps in ((3, 5), (4, 7), (6, 9)):
        shape, form = [rows, steps], {"bootstrap_values": sparse}
        if packed:
            shape, form = [rows * steps], {"bootstrap_values": 0.5, "cu_seqlens": torch.arange(rows + 1) * steps}
        calls.append({"rewards": torch.randn(shape), "values": torch.randn(shape), **form})
    check_one_compilation(partial(ours.compute_gae, gamma=0.9), calls, dynamic=True)


def test_annealed_numbers_compile_at_most_twice(target):
    """Once with the first number as a constant, once with a symbol: that is what torch.compile does by itself."""
    skip_repeated_tracing(target, False)
    torch._dynamo.reset()
    reals, flags, _ = make_arguments(GAE, device=target.device)

    def call_estimator(gamma, lambda_):
        return ours.compute_gae(**{**reals, **flags}, gamma=gamma, lambda_=lambda_, backend=target.backend).returns

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call_estimator, backend=counter, fullgraph=True)
    for gamma, lambda_ in ((0.9, 0.5), (0.91, 0.6), (0.92, 0.7), (0.99, 1.0)):
        assert torch.equal(compiled(gamma, lambda_), call_estimator(gamma, lambda_))
    assert counter.frame_count == 2


def test_a_number_out_of_its_range_is_an_error_when_compiled():
    torch._dynamo.reset()
    reals, flags, _ = make_arguments(GAE)
    compiled = torch.compile(
        lambda x: ours.compute_gae(**{**reals, **flags}, lambda_=x), dynamic=True, backend="aot_eager"
    )
    compiled(0.5)
    with pytest.raises(Exception, match="lambda_: got"):
        compiled(1.5)


def make_function(estimator, backend, seed=0):
    """A function of a call's real-valued tensors, and these, in float64."""
    reals, flags, rest = make_arguments(estimator, (2, 4), seed, torch.float64)
    names = list(reals)

    def call_estimator(*tensors):
        given = {**dict(zip(names, tensors, strict=True)), **flags, **rest, "backend": backend}
        return results_of(estimator.function(**given))[-1]

    return call_estimator, tuple(reals.values())


def make_normalization(backend):
    """The same of `normalize_advantages`."""
    mask = torch.tensor([[True, True, False, True]] * 2)
    return lambda x: ours.normalize_advantages(x, mask, backend=backend), (torch.randn(2, 4, dtype=torch.float64),)


def difference_quotient(call_estimator, primals, tangents, step=1e-6):
    above, below = (
        call_estimator(*(x + sign * step * t for x, t in zip(primals, tangents, strict=True))) for sign in (1, -1)
    )
    return (above - below) / (2 * step)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, None], ids=lambda e: e.name if e else "normalize")
class TestTransforms:
    @pytest.fixture
    def call(self, estimator, float64_target):
        backend = float64_target.backend
        return make_function(estimator, backend) if estimator else make_normalization(backend)

    def test_forward_mode(self, call):
        call_estimator, primals = call
        torch.manual_seed(0)
        tangents = tuple(map(torch.randn_like, primals))
        want = difference_quotient(call_estimator, primals, tangents)
        torch.testing.assert_close(jvp(call_estimator, primals, tangents)[1], want, rtol=1e-6, atol=1e-8)
        with forward_ad.dual_level():
            dual = call_estimator(*map(forward_ad.make_dual, primals, tangents))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, want, rtol=1e-6, atol=1e-8)

    def test_reverse_mode(self, call):
        call_estimator, primals = call
        leaves = [x.clone().requires_grad_() for x in primals]
        want = torch.autograd.grad(call_estimator(*leaves).sin().sum(), leaves, materialize_grads=True)
        argnums = tuple(range(len(primals)))
        torch.testing.assert_close(grad(lambda *x: call_estimator(*x).sin().sum(), argnums)(*primals), want)
        results, pull = vjp(call_estimator, *primals)
        torch.testing.assert_close(pull(results.cos()), want)
        batch = torch.stack([2 * results.cos(), results.cos()])
        got = torch.autograd.grad(call_estimator(*leaves), leaves, batch, is_grads_batched=True, materialize_grads=True)
        torch.testing.assert_close(tuple(x[1] for x in got), want)

    def test_second_derivatives(self, call):
        """Of all inputs in two directions: forward over reverse, and over forward, equals reverse over reverse."""
        call_estimator, primals = call

        def compute_loss(x):
            return call_estimator(*(y + x[0] * y.cos() + x[1] * y.sin() for y in primals)).sin().sum()

        want = jacrev(grad(compute_loss))(zero := primals[0].new_zeros(2))
        for inner in (grad, jacfwd):
            torch.testing.assert_close(jacfwd(inner(compute_loss))(zero), want, rtol=1e-8, atol=1e-10)

    def test_vmap(self, call):
        """Over a leading dimension, over another one, and of gradients for each sample."""
        call_estimator, (first, *others) = call
        torch.manual_seed(0)
        batch = torch.randn(3, *first.shape, dtype=torch.float64)
        want = torch.stack([call_estimator(x, *others) for x in batch])
        torch.testing.assert_close(vmap(lambda x: call_estimator(x, *others))(batch), want)
        torch.testing.assert_close(vmap(lambda x: call_estimator(x, *others), in_dims=2)(batch.movedim(0, 2)), want)

        def compute_slope(x):
            return grad(lambda y: call_estimator(y, *others).sin().sum())(x)

        torch.testing.assert_close(vmap(compute_slope)(batch), torch.stack([compute_slope(x) for x in batch]))


@pytest.mark.parametrize("estimator", [*BACKWARD, FORWARD[1]], ids=get_name)
def test_vmap_of_packed_rows(float64_target, estimator):
    reals, flags, rest = make_arguments(estimator, (1, 6), dtype=torch.float64)
    rest = {**rest, "backend": float64_target.backend}
    del rest["time_dim"]
    name = next(iter(reals))
    fixed = {key: value[0] for key, value in {**reals, **flags}.items() if key != name}
    batch = torch.randn(3, 6, dtype=torch.float64)

    def call_estimator(x):
        return results_of(estimator.function(**{name: x}, **fixed, **rest, cu_seqlens=torch.tensor([0, 2, 2, 6])))[0]

    torch.testing.assert_close(vmap(call_estimator)(batch), torch.stack([call_estimator(x) for x in batch]))
    assert grad(lambda x: call_estimator(x).sum())(batch[0]).isfinite().all()  # no memory of these offsets can be read


@ALL
def test_vmap_on_every_backend(target, estimator):
    reals, flags, rest = make_arguments(estimator, device=target.device)
    name, x = next(iter(reals.items()))
    batch = torch.stack([x, 2 * x, -x])

    def call_estimator(x):
        return results_of(estimator.function(**{**reals, name: x}, **flags, **rest, backend=target.backend))[0]

    torch.testing.assert_close(vmap(call_estimator)(batch), torch.stack([call_estimator(x) for x in batch]))


def test_out_is_refused_inside_a_transformation():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="^out .*transformation"):
        jvp(lambda y: ours.linear_recurrence(y, y, reverse=True, out=torch.empty(2, 3)), (x,), (x,))
    with pytest.raises(ValueError, match="^out.*transformation"):
        jvp(lambda y: ours.normalize_advantages(y, out=torch.empty(2, 3)), (x,), (x,))


@pytest.mark.parametrize("dims", [(0, 0), (3, 1), (2, None), (None, 1)])
def test_vmap_over_any_dimension_of_the_scan(dims, float64_target):
    """Whichever each of its arguments has; one of them may have none."""
    generator = torch.Generator().manual_seed(0)
    alphas, betas = torch.rand((2, 5, 2, 4, 3), generator=generator, dtype=torch.float64)

    def scan(alpha, beta):
        return differentiable_scan(alpha, beta, float64_target.backend)

    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip((alphas, betas), dims, strict=True)]
    chosen = [x[:1].expand_as(x) if dim is None else x for x, dim in zip((alphas, betas), dims, strict=True)]
    want = torch.stack([scan(alpha, beta) for alpha, beta in zip(*chosen, strict=True)])
    torch.testing.assert_close(vmap(scan, in_dims=dims)(*given), want)
