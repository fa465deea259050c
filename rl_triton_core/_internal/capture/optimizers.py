"""What an optimizer needs to be captured: settings and state on the device, and a way to skip a step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

FUSED = (Adam, AdamW, SGD)
"""With one kernel for all parameters, which takes learning rates and `found_inf` as tensors."""
OPTIMIZERS = (*FUSED, RMSprop)
"""Those that can be captured; they can step many parameters at once."""
STEPS = (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_)
PARTS, LEAST, MOST = 24, 2048, 65536  # about so many, of so many elements each: one launch takes 36 tensors
SCALING = ("found_inf", "grad_scale", "_step_supports_amp_scaling")
"""Attributes of an optimizer by which a `GradScaler` asks it to unscale gradients and to skip a step on the device."""


class SmallerParts(TorchFunctionMode):
    """Inside, fused steps take large tensors in parts, for a block of a GPU's threads takes 65,536 elements of one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call, with lists of smaller tensors if it is such a step."""
        if function in STEPS:
            lists = [x for x in args if isinstance(x, list) and len(x) == len(args[0])]
            parts = iter(split_tensors(lists))
            args = [next(parts) if any(x is y for y in lists) else x for x in args]
        return function(*args, **(kwargs or {}))


def split_tensors(lists: list[Any]) -> list[list[Tensor]]:
    """Lists of tensors that go together, as lists of views of them, in the same order; single numbers are repeated."""
    size = max(sum(x.numel() for x in lists[0]) // PARTS, LEAST)  # from MOST on, there are blocks enough
    found: list[list[Tensor]] = [[] for _ in lists]
    for group in zip(*lists, strict=True):
        is_split = size < MOST and all(x.is_contiguous() for x in group)
        count = max(1, -(-group[0].numel() // size)) if is_split else 1
        for x, parts in zip(group, found, strict=True):
            parts.extend(x.detach().view(-1).split(size) if x.numel() > 1 < count else [x] * count)
    return found


def name_unsupported(optimizer: Optimizer) -> str:
    """Why an optimizer cannot be captured; empty if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in OPTIMIZERS:
        return f"{name} cannot be captured, expected one of {', '.join(kind.__name__ for kind in OPTIMIZERS)}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name}(differentiable=True) cannot be captured"
        if group.get("momentum") and group.get("dampening"):
            return f"{name} with dampening cannot be captured: its first step differs from the others"
        rate, own = group["lr"], next(iter(group["params"]), None)
        if isinstance(rate, Tensor) and own is not None and (rate.device, rate.dtype) != (own.device, torch.float32):
            return f"{name} with a learning rate that is a tensor of another device or dtype cannot be captured"
    changing = (name_changing_setting(optimizer, group) for group in optimizer.param_groups)
    return next(filter(None, changing), name_repeated(optimizer))


def name_repeated(optimizer: Optimizer) -> str:
    """Why parameters are to be stepped one by one: an optimizer has one of them twice; empty if it has not.

    A kernel for all parameters steps it as it happens: PyTorch's default on a GPU gives another result in every run.
    """
    known = [id(x) for group in optimizer.param_groups for x in group["params"]]
    return f"{type(optimizer).__name__} has a parameter twice" if len({*known}) < len(known) else ""


def name_changing_setting(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Why a setting of a group, which graphs keep, is known to change; empty if none is."""
    name = type(optimizer).__name__
    if "max_momentum" in group and "step" in vars(optimizer):  # the marks of such a scheduler
        setting = "betas" if "betas" in group else "momentum"
        return f"OneCycleLR or CyclicLR sets {setting} of {name} at every step: pass it cycle_momentum=False"
    settings = [x for x in optimizer.defaults if x != "lr"]
    tensors = (x for x in settings if any(isinstance(y, Tensor) for y in pytree.tree_leaves(group.get(x))))
    return next((f"{name} with a tensor as {x} cannot be captured" for x in tensors), "")


def describe_settings(optimizer: Optimizer) -> Hashable:
    """The settings, besides learning rates, that a graph keeps as they are, and a step that is not the class's."""
    groups = optimizer.param_groups
    values = [group.get(name) for group in groups for name in optimizer.defaults if name != "lr"]
    owners = [tuple(map(id, group["params"])) for group in groups]
    return *[tuple(x) if isinstance(x, list) else x for x in values], *owners, vars(optimizer).get("step")


def list_step_hooks(optimizer: Optimizer) -> tuple[dict[int, Any], ...]:
    """The hooks of an optimizer's step, those of all optimizers among them."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def find_scaler() -> GradScaler | None:
    """The scaler that is calling an optimizer's step: it tells the optimizer what it found, but not who it is."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, GradScaler):
            return caller
    return None


def describe_scaler(scaler: GradScaler) -> Hashable:
    """The settings of a scaler that a graph keeps as they are."""
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


class PreparedOptimizer:
    """An optimizer that can be captured: learning rates are tensors, and steps can be switched off on the device.

    Between steps it is as it was: its settings are those of the user, its learning rates are numbers.
    """

    def __init__(self, optimizer: Optimizer, stop: Tensor, invalidate: Callable[[], None]) -> None:
        """Find settings of one that `name_unsupported` does not name; another step that had it captures again.

        `invalidate` is a method that is called where graphs hold no longer; it does not keep its object alive.
        """
        self.optimizer, self.stop, self.owner = optimizer, stop, WeakMethod(invalidate)
        self.scalers: dict[GradScaler, Hashable] = {}
        """Those that have called a step, and their settings."""
        self.saved_scalers: dict[GradScaler, dict[str, Any]] = {}
        """What they are to be put back to."""
        self.is_scaled = self.skips_hooks = False
        """Whether a scaler has called the current step; whether it calls none where gradients are infinite."""
        before: PreparedOptimizer | None = getattr(optimizer, "_rl_triton_prepared", None)
        if before is not None:
            before.release()
            before.invalidate()
        optimizer._rl_triton_prepared = self  # type: ignore[attr-defined]
        self.device = stop.device
        rates = [group["lr"] for group in optimizer.param_groups]
        self.given = {i for i, rate in enumerate(rates) if isinstance(rate, Tensor)}
        """Groups whose learning rate is the user's tensor, which stays in use."""
        self.numbers = [math.nan if i in self.given else rate for i, rate in enumerate(rates)]
        """What the others were set to; NaN for a tensor, which is copied before every step."""
        self.rates = [x if isinstance(x, Tensor) else torch.full_like(self.stop, float(x)) for x in rates]
        self.changed: set[int] = set()
        """Groups whose learning rate the step itself changes; there it stays a tensor between steps."""
        self.kept: list[tuple[Tensor, Tensor]] = []
        """Within a step of an optimizer without a switch, parameters and state with their values before it."""
        self.shown: list[dict[str, Any]] = []
        """Within a step, the settings that each group has between steps."""
        self.inside = ExitStack()
        self.handles = [
            optimizer.register_state_dict_post_hook(lambda _, state: self.show_settings(state["param_groups"])),
            optimizer.register_load_state_dict_post_hook(lambda _: self.invalidate()),
        ]
        self.prepare_state()

    def invalidate(self) -> None:
        """Say that graphs hold no longer."""
        tell = self.owner()
        if tell is not None:
            tell()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the optimizer steps as a graph can, or as it does beside one."""
        fused, on_gpu = isinstance(self.optimizer, FUSED), self.device.type == "cuda"
        wanted: dict[str, Any] = {"fused": True, "foreach": False} if fused else {"foreach": True}
        groups, names = self.optimizer.param_groups, ("lr", "fused", "foreach", "capturable")
        versions = [rate._version for rate in self.rates]
        kept = self.shown = [{name: group[name] for name in names if name in group} for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group.update(wanted, lr=rate, **({"capturable": True} if "capturable" in group and on_gpu else {}))
        try:
            yield
        finally:
            self.changed |= {i for i, rate in enumerate(self.rates) if rate._version != versions[i]}
            for i, (group, settings) in enumerate(zip(self.optimizer.param_groups, kept, strict=True)):
                group.update(settings, lr=self.rates[i] if i in self.changed else settings["lr"])
            self.shown = []

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Steps inside change nothing where `stop` is 1 or a scaler finds infinite gradients, both on the device."""
        optimizer = self.optimizer
        before = {name: x for name, x in vars(optimizer).items() if name in SCALING}
        begin, end = map(torch.compiler.disable, (self.begin_step, self.end_step))  # which would lose the mode
        handles = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
        optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self.skips_hooks = not before.get("_step_supports_amp_scaling")
        try:
            yield
        finally:
            self.inside.close()
            for handle in handles:
                handle.remove()
            for name in SCALING:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(before)

    def prepare_state(self) -> None:
        """Step counts onto the device; momentum of parameters that have none yet begins at zero."""
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(self.device, torch.float32)
        for group in self.optimizer.param_groups if isinstance(self.optimizer, SGD) else ():
            for parameter in group["params"] if group["momentum"] else ():
                state = self.optimizer.state[parameter]
                if state.get("momentum_buffer") is None:  # a fused step takes none, or one of every parameter
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    def is_outdated(self) -> bool:
        """Whether graphs read a tensor that is the learning rate no longer, or have other settings of a scaler."""
        groups = self.optimizer.param_groups
        if any(i >= len(groups) or groups[i]["lr"] is not self.rates[i] for i in self.given):
            return True
        return any(describe_scaler(scaler) != settings for scaler, settings in self.scalers.items())

    def update_learning_rates(self) -> None:
        """Take rates that were set since the last step over into the tensors that the graph reads."""
        for i, (group, rate) in enumerate(zip(self.optimizer.param_groups, self.rates, strict=True)):
            value = group["lr"]
            if value is rate:
                continue
            if isinstance(value, Tensor):
                rate.copy_(value)
                self.numbers[i] = math.nan
            elif i in self.changed or value != self.numbers[i]:
                rate.fill_(float(value))
                self.numbers[i] = value
            if i in self.changed:
                group["lr"] = rate

    def save_state(self) -> dict[Any, dict[str, Any]]:
        """A copy of what the optimizer remembers of every parameter; scalers are remembered, too."""
        self.saved_scalers = {scaler: scaler.state_dict() for scaler in self.scalers}
        return {
            parameter: {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}
            for parameter, state in self.optimizer.state.items()
        }

    def restore_state(self, saved: dict[Any, dict[str, Any]]) -> None:
        """Put a copy back in place; what was not there before begins at zero, as in a first step. So are scalers."""
        for scaler, scale in self.saved_scalers.items():
            scaler.load_state_dict(scale)
            scaler._per_optimizer_states.pop(id(self.optimizer), None)  # of a step that failed
        for parameter, state in self.optimizer.state.items():
            for name, x in state.items():
                if isinstance(x, Tensor):
                    known = saved.get(parameter, {}).get(name)
                    x.zero_() if known is None else x.copy_(known)

    def begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Tell the optimizer where it changes nothing; remember values, if it has no switch of its own."""
        self.inside.enter_context(SmallerParts())
        found_inf = vars(optimizer).get("found_inf")
        self.is_scaled = found_inf is not None
        if self.is_scaled:
            self.add_scaler(find_scaler())
        optimizer.found_inf = torch.maximum(self.stop, found_inf) if self.is_scaled else self.stop
        if not isinstance(optimizer, FUSED):
            if vars(optimizer).get("grad_scale") is not None:
                parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
                torch._foreach_div_([x.grad for x in parameters if x.grad is not None], optimizer.grad_scale)
            self.kept = [(x, x.detach().clone()) for x in self.list_tensors()]

    def end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Undo the step of an optimizer without a switch where it was to change nothing."""
        self.inside.close()
        with torch.no_grad():
            for tensor, before in self.kept:
                tensor.copy_(torch.where(optimizer.found_inf.bool(), before, tensor))
        self.kept = []
        if not self.is_scaled:
            del optimizer.found_inf

    def add_scaler(self, scaler: GradScaler | None) -> None:
        """Remember a scaler whose scale is that of before the step, and refuse to run hooks which it may skip."""
        if scaler is not None and scaler not in self.scalers:
            self.scalers[scaler], self.saved_scalers[scaler] = describe_scaler(scaler), scaler.state_dict()
        if self.skips_hooks and sum(map(len, list_step_hooks(self.optimizer))) > 2:  # besides those of `stopping`
            raise RuntimeError("a GradScaler may skip hooks of an optimizer's step, unless that is fused")

    def list_tensors(self) -> list[Tensor]:
        """Parameters, and what the optimizer remembers of them."""
        parameters = [x for group in self.optimizer.param_groups for x in group["params"]]
        state = [x for known in self.optimizer.state.values() for x in known.values() if isinstance(x, Tensor)]
        return [*parameters, *state]

    def show_settings(self, groups: list[dict[str, Any]]) -> None:
        """Give the parameter groups of a checkpoint, also of one within a step, the settings of between steps."""
        for group, settings in zip(groups, self.shown):  # noqa: B905 (there are none between steps)
            group.update(settings)
        self.show_numbers(groups)

    def show_numbers(self, groups: list[dict[str, Any]]) -> None:
        """Give parameter groups, the optimizer's or those of a checkpoint, numbers for rates that the step changes."""
        for i, group in enumerate(groups):
            if i in self.changed - self.given:
                rate, number = float(group["lr"]), self.numbers[i]
                group["lr"] = number if rate == torch.tensor(float(number), dtype=torch.float32).item() else rate

    def release(self) -> None:
        """Learning rates as numbers, step counts where a plain optimizer has them; once."""
        if getattr(self.optimizer, "_rl_triton_prepared", None) is not self:
            return
        del self.optimizer._rl_triton_prepared
        for handle in self.handles:
            handle.remove()
        self.show_numbers(self.optimizer.param_groups)
        for state in self.optimizer.state.values():
            capturable = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
            if isinstance(state.get("step"), Tensor) and not capturable:
                state["step"] = state["step"].cpu()
