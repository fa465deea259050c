"""Training and evaluation mode of a module, set without a walk through its modules' attributes."""

from itertools import chain, repeat
from operator import methodcaller
from typing import Any

from torch import nn

from rl_triton_adapters.common.overrides import find_own, list_modules, list_stock


class TrainingModes:
    """The modules whose mode a policy's `set_training_mode` sets, so that it need not be called.

    It is called where a class of the user sets modes in its own way, and again when the policy has other modules.
    """

    def __init__(self, policy: Any, packages: tuple[str, ...]) -> None:
        self.policy, self.packages = policy, packages
        self.modules, self.places, self.attributes = list[nn.Module](), list[Any](), list[dict[str, Any]]()
        self.flags, self.parts = dict[bool, list[Any]](), list[Any]([None])  # of no module: nothing is known
        self.found = dict[bool, Any]()  # by mode, what others have found out of the modules

    def __reduce__(self) -> Any:
        """A copy knows nothing of its policy's modules yet."""
        return TrainingModes, (self.policy, self.packages)

    def set_mode(self, mode: bool) -> Any:
        """Do what the policy's method does, or what the user put in its place."""
        own = vars(self.policy).get("set_training_mode")
        if own is not None and getattr(own, "__self__", None) is not self:
            return own(mode)
        if self.list_parts() != self.parts:
            self.modules, self.flags = list_modules(self.policy), {}
            self.places, self.attributes = [x._modules for x in self.modules], [vars(x) for x in self.modules]
            self.parts = self.list_parts()
        if any(map(dict.__contains__, self.attributes, repeat("train"))):
            return type(self.policy).set_training_mode(self.policy, mode)
        if mode not in self.flags:
            self.call_method(mode)
        for attributes, flag in self.flags.get(mode, ()):
            attributes["training"] = flag  # `nn.Module.__setattr__` takes ten times as long

    def list_parts(self) -> list[Any]:
        """All parts of all modules, as they are known."""
        return [*chain.from_iterable(map(methodcaller("values"), filter(None, self.places)))]

    def call_method(self, mode: bool) -> Any:
        """Call the policy's method; remember what it sets, if nothing but PyTorch's and the framework's is called."""
        kind: Any = type(self.policy)
        stock = *list_stock(kind, "set_training_mode", self.packages), nn.Module.train
        if find_own(self.modules, stock, self.packages):
            return kind.set_training_mode(self.policy, mode)
        flags = [(x.__dict__, x.training) for x in self.modules]
        try:
            for attributes, _ in flags:
                attributes["training"] = None
            kind.set_training_mode(self.policy, mode)
            self.flags[mode] = [(x, x["training"]) for x, _ in flags if x["training"] is not None]
        finally:
            for attributes, flag in flags:
                if attributes["training"] is None:
                    attributes["training"] = flag
