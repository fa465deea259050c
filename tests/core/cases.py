"""The harness of all estimators, which ships with the package for `rl-triton selftest`, and Hypothesis' part of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from rl_triton_core._internal.selftest.cases import *  # noqa: F403
from rl_triton_core._internal.selftest.cases import make_random_call

FEW = 5
"""So many combinations of the arguments that decide what is compiled, of each estimator."""
MANY = 1000
"""With so many examples, every one has a combination of its own."""


@st.composite
def draw_any_case(draw, estimator, target):
    """A random case of an estimator, and how to hand it over; shrinking a seed makes no smaller case."""
    seed = draw(st.integers(0, 2**32 - 1))
    is_compiled_each = target.backend == "cpu" and settings.default.max_examples < MANY
    return make_random_call(estimator, target, seed, draw(st.integers(1, FEW)) if is_compiled_each else None)


def skip_repeated_tracing(target, is_one_of_few):
    """Tracing does not depend on the backend: all estimators are traced on the one that compiles them in no time."""
    if target.interpreted or (target.backend == "reference" and not is_one_of_few):
        pytest.skip("tracing does not depend on the backend")
