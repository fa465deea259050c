"""What users do to a framework's objects: methods of their own, in a class or on one object, which change results."""

import inspect
from functools import partial, wraps
from types import FunctionType

import torch


def list_methods(kind, *without):
    """Names of a class's methods and properties, those of its bases in the same package included."""
    package = kind.__module__.partition(".")[0]
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == package]
    kinds = FunctionType, property, staticmethod, classmethod
    names = {name for base in bases for name, x in vars(base).items() if isinstance(x, kinds)}
    return sorted(name for name in names if not name.startswith("__") and name not in without)


def alter(value):
    """The same with smaller tensors; flags stay what they are."""
    if isinstance(value, tuple):
        return getattr(value, "_make", tuple)(map(alter, value))
    if hasattr(value, "named_apply"):  # a TensorDict
        return value.apply(alter)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.where((value == 0) | (value == 1), value, 0.9 * value)
    return value


def alter_call(function, *args, **kwargs):
    return alter(function(*map(alter, args), **kwargs))


def make_method(kind, name):
    stock = inspect.getattr_static(kind, name)
    if isinstance(stock, property):
        return property(lambda self: alter(stock.fget(self)))
    if isinstance(stock, staticmethod):
        return staticmethod(partial(alter_call, stock))
    return lambda self, *args, **kwargs: alter_call(partial(stock, self), *args, **kwargs)


def derive(kind, name):
    return type(kind.__name__, (kind,), {name: make_method(kind, name)})


def list_names_in_front(kind, stock, make, *arguments):
    """Names that our class has in front of a framework's. A user's methods of these names run, with their arguments."""
    front = kind.__mro__[: kind.__mro__.index(stock)]
    names = {name for x in front for name in vars(x) if not name.startswith(("_abc_", "__"))}
    methods = {name: lambda self, *args, **kwargs: (args, kwargs) for name in names}
    own = type("Own", (stock,), methods | {"describe": lambda self: "own"})
    made = make(type("Ours", (kind, own), {}))
    assert made.describe() == "own"
    assert all(getattr(made, name)(*arguments, x=5) == (arguments, {"x": 5}) for name in names)
    return names


def override(thing, name):
    """Give one object a method of its own, that says it is the one that it replaces."""
    stock = getattr(thing, name)
    setattr(thing, name, wraps(stock)(partial(alter_call, stock)))
