"""What an estimator of your own needs, in one module; `docs/adding-an-estimator.md` works an example out.

1. Write the equation as a `Recurrence`: two functions of a `Step`, made of ``+ - * /``, comparisons, literals,
   `select`, `minimum` and `exp`.
2. Write a public function. It checks what is its own with the ``check_*`` functions, gets a `RolloutLayout` from
   `check_layout`, and hands everything to `solve`, which checks the rest, applies `apply_boundary_rule` and computes
   the results on the backend chosen.
3. Decorate it with `with_fast_path`, so that repeated calls skip the checks.

The estimators of this package are written with these functions too.
"""

from rl_triton_core._internal.arguments.side_effects import say, warn
from rl_triton_core._internal.arguments.validation import (
    RolloutLayout,
    check_bool,
    check_choice,
    check_clip,
    check_count,
    check_flags,
    check_layout,
    check_log_ratios,
    check_number,
    check_per_step,
    check_shape,
    check_tensor,
)
from rl_triton_core._internal.equations.primitives import exp, minimum, select
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.scan.recurrence import Expectation, Recurrence, Step, read_state
from rl_triton_core._internal.scan.solve import solve, solve_features
from rl_triton_core.boundaries import FinalValues, apply_boundary_rule

__all__ = [
    "Expectation",
    "FinalValues",
    "Recurrence",
    "RolloutLayout",
    "Step",
    "apply_boundary_rule",
    "check_bool",
    "check_choice",
    "check_clip",
    "check_count",
    "check_flags",
    "check_layout",
    "check_log_ratios",
    "check_number",
    "check_per_step",
    "check_shape",
    "check_tensor",
    "exp",
    "minimum",
    "read_state",
    "say",
    "select",
    "solve",
    "solve_features",
    "warn",
    "with_fast_path",
]
