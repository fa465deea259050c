"""The plain recurrence, α and β as they are given: what every gradient is made of."""

from __future__ import annotations

from typing import Any

from rl_triton_core._internal.scan.recurrence import Recurrence, Step


def coefficients(step: Step) -> tuple[Any, Any]:
    """α and β."""
    alpha, beta = step.inputs
    return alpha, beta


def read_state(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
    """Return the state itself: a readout for one result."""
    return (state,)


LINEAR_BACKWARD = Recurrence("linear_backward", ("alpha", "beta"), 0, ("states",), coefficients, read_state)
LINEAR_FORWARD = Recurrence(
    "linear_forward", ("alpha", "beta"), 0, ("states",), coefficients, read_state, backward=False
)
