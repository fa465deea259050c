"""What the file of a framework holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from benchmarks.end_to_end.stopwatch import Stopwatch


class Setting(NamedTuple):
    """A training loop; `hidden` units in both layers. With `recompute`, advantages are computed in every epoch."""

    num_envs: int
    num_steps: int
    hidden: int = 64
    epochs: int = 4
    minibatches: int = 4
    recompute: bool = False
    env: str = ""
    device: str = "cuda"

    def __str__(self) -> str:
        text = f"{self.num_envs}x{self.num_steps}, hidden {self.hidden}, {self.epochs} epochs x {self.minibatches}"
        return f"{self.env} {text}".strip() + ", recomputed" * self.recompute

    @property
    def batch_size(self) -> int:
        """Samples of a minibatch."""
        return self.num_envs * self.num_steps // self.minibatches


class Arm(NamedTuple):
    """A training loop with its way to compute advantages, the part "advantages" of the stopwatch."""

    iteration: Callable[..., Any]
    results: Callable[[], Sequence[Tensor]]
    """Advantages, and returns if there are any, of experience that is the same for all arms."""
    fresh: Callable[[], Sequence[Any]] = tuple
    """What an iteration takes and uses up; made before its time begins."""


class Module(Protocol):
    """What a file holds: its title, what is timed, its arms with the framework's own first, ours, and settings.

    Where not all arms differ in all settings, `list_arms` chooses.
    MORE names those of our arms that replace more than the advantage step, the one that replaces all last.
    """

    TITLE: str
    ITERATION: str
    ARMS: dict[str, str]
    OURS: tuple[str, ...]
    MORE: tuple[str, ...]
    SETTINGS: dict[str, tuple[Setting, ...]]

    def make_arm(self, name: str, setting: Setting, watch: Stopwatch) -> Arm:
        """One arm in one setting, as it is before training."""


def list_arms(module: Module, setting: Setting) -> list[str]:
    """The arms of a setting."""
    choose: Callable[[Setting], list[str]] = getattr(module, "list_arms", lambda _: [*module.ARMS])
    return choose(setting)
