"""An update of a framework's algorithm: captured in CUDA graphs, eager, or the framework's own.

An adapter has one, and says in each update what it is of and what prevents it, as tests/adapters/toyrl_adapter does.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from math import nan
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_core.capture import CapturedStep, find_group_obstacle
from rl_triton_core.extending import warn

__all__ = ["CapturedUpdate", "release_graphs"]


class CapturedUpdate:
    """The step of an update, as it is for the modules, optimizers and settings of the moment.

    Arguments are those of `CapturedStep`. `stock` says why the framework's own update is to run, and is empty if ours
    is; `step` is the step as `find_step` has found it last.
    """

    whose = "those of the stock algorithm"
    """How updates are called that are not ours."""

    def __init__(self, make_step: Callable[..., Any], *, enabled: bool | None = None, max_graphs: int = 4) -> None:
        self.make_step, self.enabled, self.max_graphs = make_step, enabled, max_graphs
        self.stock = self.obstacle = ""
        self.step: CapturedStep = None  # type: ignore[assignment]  # until it is found
        self.settings: list[Any] = []

    def is_of(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> bool:
        """Whether the step is that of these modules and optimizers."""
        return self.step is not None and (self.step.modules, self.step.optimizers) == (modules, optimizers)

    def find_step(
        self,
        modules: list[nn.Module],
        optimizers: list[Optimizer],
        *,
        stock: str = "",
        obstacle: str = "",
        state: Iterable[Tensor] = (),
        is_averaged: bool = False,
    ) -> CapturedStep:
        """The step of these modules and optimizers, a new one if they or the reasons are others than before.

        Args are as of `CapturedStep`, and why the framework's own update is to run, why ours is not captured besides
        what `CapturedStep` says, and whether the step averages gradients over all processes.
        """
        if has_group():
            UPDATES.add(self)
            if is_averaged and next(modules[0].parameters()).is_cuda:
                obstacle = obstacle or find_group_obstacle()
        reasons = (find_off_switch() or stock, obstacle)
        if self.is_of(modules, optimizers) and reasons == (self.stock, self.obstacle):
            return self.step
        self.reset()  # optimizers are prepared once
        self.stock, self.obstacle = reasons
        self.step = CapturedStep(
            self.make_step,
            modules=modules,
            optimizers=optimizers,
            state=state,
            enabled=False if any(reasons) else self.enabled,
            max_graphs=self.max_graphs,
        )
        self.step.reason = self.stock or obstacle or self.step.reason
        return self.step

    @property
    def is_captured(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self.step is not None and not self.step.reason

    def keep_settings(self, settings: list[Any]) -> None:
        """Capture again if what a step reads besides its inputs is not what it was."""
        if settings != self.settings:
            self.settings = settings
            self.reset()

    def reset(self) -> None:
        """Forget the graphs."""
        if self.step is not None:
            self.step.reset()

    def recapture(self) -> None:
        """Forget the graphs, and why there are none: the next update finds its step again."""
        self.reset()
        self.step = None  # type: ignore[assignment]

    def run(self, minibatches: Iterable[Any], *inputs: Any) -> Tensor:
        """Make a step with each minibatch and these further inputs; return the statistics, a row of each step."""
        with self.step.held():
            return torch.stack([self.step(minibatch, *inputs).clone() for minibatch in minibatches])

    def warn_of_stock(self, name: str, package: str) -> None:
        """Warn that updates are the framework's own, and why, unless all adapters are switched off."""
        if self.stock and not find_off_switch():
            warn(f"{name} updates as {package} does: {self.stock}", RuntimeWarning, stacklevel=3)

    def describe(self, whose: str = "") -> str:
        """Say in which of three ways updates are made, and why."""
        return describe_update("" if self.step is None else self.step.reason, bool(self.stock), whose or self.whose)


def describe_update(reason: str, is_stock: bool, whose: str = "those of the stock algorithm") -> str:
    """Say in which of three ways updates are made; captured, unless there is a reason why not."""
    kind = "captured" if not reason else whose if is_stock else "eager"
    return f"updates are {kind}" + f": {reason}" * bool(reason)


def find_reason(reasons: Mapping[str, Any]) -> str:
    """The first reason that applies; empty if none does."""
    return next((reason for reason, applies in reasons.items() if applies), "")


class Described:
    """What users ask of an object with updates of ours.

    Behind a framework's class in the order of bases: where a user's class has such a name, it is the user's.
    """

    _rl_triton: Any
    """A `CapturedUpdate` that finds its step by `prepare`."""

    @property
    def obstacle(self) -> str:
        """Why the framework's own updates run; empty if ours do."""
        return str(self._rl_triton.stock)

    def describe(self) -> str:
        """Say in which of three ways updates are made, and why."""
        self._rl_triton.prepare()
        return str(self._rl_triton.describe())

    def recapture(self) -> None:
        """Capture again with the next update: for changes that nothing tells of, as of what a function closes over."""
        self._rl_triton.recapture()


def has_group() -> bool:
    """Whether this is one of several processes."""
    return distributed.is_available() and distributed.is_initialized()


class Updates(WeakSet[Any]):
    """Those that may hold operations of a process group, which waits for them where it ends."""

    def add(self, update: Any) -> None:
        """Let it be released before the group ends: its end is PyTorch's own again as soon as it begins."""
        super().add(update)
        stock = distributed.destroy_process_group
        if hasattr(stock, "releases_graphs"):
            return

        @wraps(stock)
        def destroy_process_group(group: Any = None) -> None:
            try:
                if group is None or group is distributed.group.WORLD:
                    if distributed.destroy_process_group is destroy_process_group:
                        distributed.destroy_process_group = stock
                    release_graphs()
            finally:
                stock(group)

        vars(destroy_process_group)["releases_graphs"] = True
        distributed.destroy_process_group = destroy_process_group


UPDATES = Updates()


@atexit.register
def release_graphs() -> None:
    """Forget the graphs of all updates of several processes: at their end, NCCL waits for what holds its operations.

    `destroy_process_group` calls it, and so does Python where it ends.
    """
    for update in list(UPDATES) if has_group() else ():
        update.reset()


def find_pointers(tree: Any) -> list[int]:
    """Where the tensors lie that a graph reads."""
    return [x.data_ptr() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def replace_nan(probabilities: Tensor) -> Tensor:
    """Replace what cannot be drawn from: on a GPU, drawing from NaN ends the use of the device by this process."""
    return torch.nan_to_num(probabilities, nan=1.0)


class DeferredChecks(TorchFunctionMode):
    """Inside, distributions of this thread do not wait for the device to check their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []
        """Of each check, whether it holds, on the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the result of a check, and go on as if it held."""
        if function in (torch.multinomial, torch.bernoulli):
            self.results.append(~args[0].isnan().any())
            args = (*map(replace_nan, args[:1]), *args[1:])
        result = function(*args, **(kwargs or {}))
        if function is not torch._is_all_true:
            return result
        self.results.append(result)
        return True

    def has_failed(self) -> Tensor:
        """Whether one of the checks, of which there are some, does not hold, on the device."""
        return ~torch.stack(self.results).all()

    def mark_refused(self, log_probs: Tensor) -> Tensor:
        """Replace log-probabilities by NaN if a check does not hold."""
        return log_probs.where(~self.has_failed(), nan) if self.results else log_probs


class Deferral(TorchFunctionMode):
    """Inside, `item` returns a tensor, and `torch.tensor` copies no number: metrics wait for the device once, later."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.item:
            return args[0].detach()
        if function is torch.tensor and isinstance(args[0], float):
            return torch.full((), *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def read_numbers(values: list[Any]) -> list[Any]:
    """The values with tensors of one element as numbers; the host waits once."""
    waiting = [x for x in values if isinstance(x, Tensor)]
    numbers = iter(torch.stack([x.float() for x in waiting]).tolist() if waiting else ())
    return [next(numbers) if isinstance(x, Tensor) else x for x in values]
