"""What a framework's own update runs, and agents in which a part of it is another one: a function, a number."""

import inspect
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import islice
from operator import attrgetter
from unittest import mock

import torch
from overrides import alter_call, derive, override
from torch.distributions.utils import lazy_property

from rl_triton_core.reach import list_functions

ALL = os.environ.get("RL_TRITON_TEST_COMBINATIONS") == "all"
PYTORCH = ("torch.distributions.", "torch.nn.", "torch.optim.")


def list_run(packages, run, *args, **kwargs):
    """The functions in Python of these packages and PyTorch that a call runs: where they are looked up, and names."""
    ran, watched = {}, (*(f"{x}." for x in packages), *PYTORCH)

    def note(frame, event, _):
        if event == "call" and f"{frame.f_globals.get('__name__')}.".startswith(watched):
            ran[frame.f_code] = frame.f_globals["__name__"]

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run(*args, **kwargs)
    finally:
        sys.setprofile(before)
    found = {}
    modules = [x for name, x in [*sys.modules.items()] if f"{name}.".startswith((*watched, "torch."))]
    for code, module in ran.items():
        *path, name = code.co_qualname.split(".")
        owners = [reduce(lambda x, part: getattr(x, part, None), path, sys.modules[module])] if path else modules
        functions = [(x, list_functions(getattr(x, "__dict__", {}).get(name))) for x in owners]
        known = [x for x, found_there in functions if code in map(attrgetter("__code__"), found_there)]
        found |= {(known[0], name): known} if known else {}
    return found


def alter_function(stock):
    """One with smaller tensors among its arguments and results."""
    if isinstance(stock, property):
        return property(alter_function(stock.fget))
    if isinstance(stock, lazy_property):
        return lazy_property(alter_function(stock.wrapped))
    if isinstance(stock, staticmethod | classmethod):
        return type(stock)(alter_function(stock.__func__))
    return lambda *args, **kwargs: alter_call(partial(stock, *args), **kwargs)


def list_changes(ran, agents, list_things):
    """Ways in which a part of agents may be another one, by name: contexts, after which it is what it was.

    `ran` is as of `list_run`; `list_things` lists the objects of an agent whose methods and numbers are changed.
    """
    things = [x for agent in agents for x in list_things(agent)]
    for (owner, name), owners in ran.items():
        yield f"{owner.__name__}.{name}", partial(replace_function, owners, name)
        mine = [x for x in things if isinstance(owner, type) and isinstance(x, owner) and not name.startswith("_")]
        if mine:
            yield f"a class with {owner.__name__}.{name}", partial(change_all, mine, derived, name)
        if mine and inspect.isfunction(vars(owner)[name]) and not owner.__module__.startswith("torch."):
            yield f"own {owner.__name__}.{name}", partial(change_all, mine, overridden, name)
    yield "numbers", partial(change_all, things, numbered)


def update_with_changes(packages, agents, update, list_things, list_tensors, compare, without=(), part=(0, 1)):
    """With each change, updates from the same state come to the same: by change, how ours then says that it updates.

    Of `agents`, the framework's own and ours, an update changes the tensors that `list_tensors` lists. Functions in
    `without` stay. `part`: unless all combinations are asked for, which one of how many parts of the changes is made.
    """
    stock, ours = agents
    start, hows = [x.clone() for x in list_tensors(stock)], {}
    ran = {place: owners for place, owners in list_run(packages, update, stock).items() if place[1] not in without}
    assert len(ran) > 15
    first, step = (0, 1) if ALL else part
    for name, change in islice(list_changes(ran, agents, list_things), first, None, step):
        for agent in agents:
            copy_state(start, list_tensors(agent))
        with change():
            hows[name] = ours.describe()
            update(stock), update(ours)
            compare(ours, stock)
    return hows


@contextmanager
def replace_function(owners, name):
    """Wherever it is looked up."""
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, name, alter_function(vars(owner)[name])))
        yield


@contextmanager
def change_all(things, change, *args):
    with ExitStack() as stack:
        for x in things:
            stack.enter_context(change(x, *args))
        yield


@contextmanager
def derived(thing, name):
    """An object of a class of the user's with a method of its own."""
    kind = type(thing)
    thing.__class__ = derive(kind, name)
    yield
    thing.__class__ = kind


@contextmanager
def overridden(thing, name):
    """An object with a method of its own."""
    override(thing, name)
    yield
    vars(thing).pop(name)


@contextmanager
def numbered(thing):
    """An object with other numbers."""
    with mock.patch.dict(vars(thing), {name: halve(x) for name, x in vars(thing).items()}):
        yield


def halve(x):
    return 0.5 * x if isinstance(x, float) else [*map(halve, x)] if isinstance(x, list) else x


def list_state(modules, optimizers):
    """The tensors that an update changes, in an order that does not depend on the agent."""
    tensors = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    states = [x.state[parameter] for x in optimizers for group in x.param_groups for parameter in group["params"]]
    return tensors + [state[name] for state in states for name in sorted(state)]


@torch.no_grad()
def copy_state(sources, targets):
    """In place, as graphs know them."""
    for x, y in zip(targets, sources, strict=True):
        x.copy_(y)
