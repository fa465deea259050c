"""The compiler of equations: literals, functions of an equation's own, and what the package does not do."""

import numba
import numpy as np
import pytest
import torch

from rl_triton_core._internal.equations.compile import PYTHON, compile_equation
from rl_triton_core._internal.equations.numba import compile_inner, compile_kernel
from rl_triton_core.extending import Recurrence, check_layout, exp, minimum, select, solve


def shrink(x):
    return 0.1 * x / 3


def coefficients(step):
    """With literals of both kinds, in arithmetic and in primitives."""
    (x,) = step.inputs
    return 1 - shrink(x) * exp(minimum(x, 0.3)), select(step.continues & (x != 2), 0.7, 0)


def readout(step, state, after):
    """With an index, which is no number of the arithmetic."""
    return state * 2 + after, select(step.inputs[0] > 1, 1, 0.1)


LITERALS = Recurrence("literals_of_the_test", ("x",), 0, ("states", "marks"), coefficients, readout)


def solve_literals(x, backend):
    """Both results, without values behind the rollout."""
    return solve(
        LITERALS, {"x": x}, check_layout("x", x, -1), wanted=(True, True), bootstrap_values=0.0, backend=backend
    )


def iterate_literals(x):
    """The same with NumPy, every operation and every literal in the dtype of x."""
    number = x.dtype.type
    results = np.zeros((2, *x.shape), x.dtype)
    after = np.zeros(len(x), x.dtype)
    for t in reversed(range(x.shape[1])):
        step = x[:, t]
        alpha = number(1) - number(0.1) * step / number(3) * np.exp(np.where(step > number(0.3), number(0.3), step))
        beta = np.where((step != 2) & (t < x.shape[1] - 1), number(0.7), number(0))
        state = alpha + beta * after
        results[0, :, t] = state * number(2) + (after if t < x.shape[1] - 1 else number(0))
        results[1, :, t] = np.where(step > 1, number(1), number(0.1))
        after = state
    return results


SCALE = 2.0


def read_a_constant(step):
    """With a number that may be another when the compiled code is used again."""
    return SCALE * step.inputs[0], 0.0


def make_closure(scale):
    return lambda step: (scale * step.inputs[0], 0.0)


@pytest.mark.parametrize(
    ("equation", "found"),
    [(read_a_constant, "SCALE"), (make_closure(2.0), "scale"), (lambda step, scale=2.0: (scale, 0.0), "2.0")],
    ids=["constant", "closure", "default"],
)
def test_what_compiled_code_would_keep_is_refused(equation, found):
    x, message = torch.ones(1, 2), f"got {found} in an equation, expected literals, or params"
    with pytest.raises(TypeError, match=message):
        compile_equation(equation, PYTHON)
    recurrence = Recurrence("refused_of_the_test", ("x",), 0, ("states",), equation, lambda step, x, after: (x,))
    with pytest.raises(TypeError, match=message):
        solve(recurrence, {"x": x}, check_layout("x", x, -1), bootstrap_values=0.0, backend="reference")


def test_literals_have_the_type_of_the_arithmetic(target):
    """They widen nothing: on the cpu, results are those of a loop in float32, bit for bit where it has no exp."""
    x = torch.randn(33, 9, generator=torch.Generator().manual_seed(0)).to(target.device)
    x[:, 4] = 2.0
    states, marks = solve_literals(x, target.backend)
    want = iterate_literals(x.cpu().numpy())
    np.testing.assert_allclose(states.cpu(), want[0], rtol=2e-6)
    np.testing.assert_array_equal(marks.cpu(), want[1])


def test_literals_in_float64(float64_target):
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for got, want in zip(solve_literals(x, float64_target.backend), iterate_literals(x.numpy()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-14)


def round_often(step):
    """Many roundings, and no exp; an index stays one."""
    x = step.inputs[0]
    return 0.1 * x + 0.7 * (1.1 - x) * 3, select(step.continues, 0.9, 0)


def test_one_rounding_for_each_operation():
    """On the cpu backend: a product with a literal in float64 would round differently."""
    recurrence = Recurrence("roundings_of_the_test", ("x",), 0, ("states",), round_often, lambda step, x, after: (x,))
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    layout = check_layout("x", x, -1)
    (got,) = solve(recurrence, {"x": x}, layout, bootstrap_values=0.0, backend="cpu")
    number, steps = np.float32, x.numpy()
    state, want = np.zeros(40, np.float32), np.zeros((40, 300), np.float32)
    for t in reversed(range(300)):
        alpha = number(0.1) * steps[:, t] + number(0.7) * (number(1.1) - steps[:, t]) * number(3)
        state = want[:, t] = alpha + (number(0.9) if t < 299 else number(0)) * state
    np.testing.assert_array_equal(got, want)


def test_gradients_through_literals():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda x: solve_literals(x, None)[0], (x,))


def test_numbers():
    """Python's own, with the functions that an equation calls."""

    def choose(x):
        return select(x > 1, shrink(x), 0.5)

    choose = type(choose)(choose.__code__, globals())
    assert compile_equation(choose, PYTHON)(3.0) == pytest.approx(0.1) and compile_equation(choose, PYTHON)(1.0) == 0.5


def add_numbers(x, y):
    return x + y


def add_three(x):
    return add_numbers(add_numbers(x, 1), 2)


def test_what_compiled_code_calls_is_compiled_once_and_becomes_machine_code_there_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    inner = compile_inner(add_numbers, np.float32, {}, parts=True)
    outer = compile_kernel(add_three, numba.int64(numba.int64), np.float32, {"add_numbers": inner})
    (compiled,) = inner.overloads.values()  # not one for each literal
    assert outer(4) == 7
    assert not compiled.library._codegen._engine.is_symbol_defined(compiled.fndesc.mangled_name)
