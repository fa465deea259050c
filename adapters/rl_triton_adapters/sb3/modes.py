"""Stable-Baselines3: training and evaluation mode of a policy, set without a walk through its modules' attributes."""

from itertools import chain, repeat
from operator import methodcaller
from typing import Any

from torch import nn

from rl_triton_adapters.common.overrides import find_own, list_modules, list_stock
from rl_triton_adapters.sb3.base import PACKAGES


class TrainingModes:
    """The modules whose mode a policy's `set_training_mode` sets, so that it can be set without calling it.

    It is called where a class of the user sets modes in its own way, and again when the policy has other modules.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.flags = policy, dict[bool, list[tuple[dict[str, Any], bool]]]()
        self.modules, self.places, self.attributes = list[nn.Module](), list[Any](), list[dict[str, Any]]()
        self.parts: list[Any] = [None]  # of no module: nothing is known

    def __reduce__(self) -> Any:
        """A copy knows nothing of its policy's modules yet."""
        return TrainingModes, (self.policy,)

    def set_mode(self, mode: bool) -> None:
        """Do what the policy's `set_training_mode` does, or what the user put in its place."""
        own = vars(self.policy).get("set_training_mode")
        if own is not None and getattr(own, "__self__", None) is not self:
            own(mode)
            return
        if self.list_parts() != self.parts:
            self.modules, self.flags = list_modules(self.policy), {}
            self.places, self.attributes = [x._modules for x in self.modules], [vars(x) for x in self.modules]
            self.parts = self.list_parts()
        if any(map(dict.__contains__, self.attributes, repeat("train"))):
            type(self.policy).set_training_mode(self.policy, mode)
            return
        if mode not in self.flags:
            self.call_method(mode)
        for attributes, flag in self.flags.get(mode, ()):
            attributes["training"] = flag  # `nn.Module.__setattr__` takes ten times as long

    def list_parts(self) -> list[Any]:
        """All parts of all modules, as they are known."""
        return [*chain.from_iterable(map(methodcaller("values"), filter(None, self.places)))]

    def call_method(self, mode: bool) -> None:
        """Call the policy's method; remember what it sets, if nothing but PyTorch's and the framework's is called."""
        method = type(self.policy).set_training_mode
        stock = [*list_stock(type(self.policy), "set_training_mode", PACKAGES), nn.Module.train]
        if find_own(self.modules, stock, PACKAGES):
            method(self.policy, mode)
            return
        flags = [(x.__dict__, x.training) for x in self.modules]
        try:
            for attributes, _ in flags:
                attributes["training"] = None
            method(self.policy, mode)
            self.flags[mode] = [(x, x["training"]) for x, _ in flags if x["training"] is not None]
        finally:
            for attributes, flag in flags:
                if attributes["training"] is None:
                    attributes["training"] = flag
