"""Training loops, end to end: what the advantage step takes of an iteration, and what replacing it gives.

A framework is a file of its name here, with settings in the table; docs/end-to-end.md says what is timed, and what the
arms are. The file holds `make_arm`, which makes an arm in a setting
as it is before training. Where not all arms differ in all settings, `list_arms` chooses.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks import settings

LAMBDA = 0.95
ARMS = ("stock", "ours", "captured")
"""The framework's own, ours for the advantage step, and ours for all that is replaced."""


class Setting(settings.Setting):
    """A training loop, as cleanrl has them in the table, and its device when it is measured."""

    def __str__(self) -> str:
        """Environments x steps, units of both layers, epochs x minibatches."""
        text = f"{self.num_envs}x{self.num_steps}, hidden {self.hidden}, {self.epochs} epochs x {self.minibatches}"
        return f"{self.env} {text}".strip() + ", recomputed" * self.recompute

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps // self.minibatches


class Arm(NamedTuple):
    """A training loop with its way to compute advantages, the part "advantages" of the stopwatch."""

    iteration: Callable[..., Any]
    results: Callable[[], Sequence[Tensor]]
    """Advantages, and returns if there are any, of experience that is the same for all arms."""
    fresh: Callable[[], Sequence[Any]] = tuple  # what an iteration takes and uses up; made before its time begins
