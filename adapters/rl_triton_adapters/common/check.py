"""With RL_TRITON_CHECK=N in the environment, the framework's own update is made before each of the first N of ours.

What it has changed is put back, ours follows from the same parameters and random numbers, and training goes on with
that. A line says by how much they differ. With RL_TRITON_REPORT=1, lines at the end say how updates were made.
"""

import atexit
import copy
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core.extending import say

COUNTS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many updates of each algorithm were compared
MADE: Counter[str] = Counter()  # how many updates were made, by what made them


@atexit.register
def report_updates() -> None:
    """Say at the end what was counted."""
    for what, number in MADE.items():
        say(f"rl-triton: {number} updates of {what}", sys.stderr)


def with_check(update: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a method of ours that makes an update: behind it is the framework's, under the same name."""

    @wraps(update)
    def compare(self: Any, *args: Any, **kwargs: Any) -> Any:
        count_update(self)
        if not is_asked_for(self):
            return update(self, *args, **kwargs)
        owner = next(x for x in type(self).__mro__ if vars(x).get(update.__name__) is compare)
        state = State(self)
        wanted = state.read(getattr(super(owner, self), update.__name__)(*args, **kwargs))
        state.put_back()
        results = update(self, *args, **kwargs)
        state.compare(update.__name__, results, wanted)
        return results

    return compare


def count_update(algorithm: Any) -> None:
    """Count an update that begins, if a report is asked for."""
    if os.environ.get("RL_TRITON_REPORT") == "1":
        MADE[f"{type(algorithm).__module__}.{type(algorithm).__name__}: {algorithm.describe()}"] += 1


def is_asked_for(algorithm: Any) -> bool:
    """Whether its next update is to be compared."""
    count = os.environ.get("RL_TRITON_CHECK") or "0"
    if not count.isdecimal():
        raise ValueError(f"RL_TRITON_CHECK: got {count!r}, expected a number of updates")
    return COUNTS.get(algorithm, 0) < int(count)


class State:
    """What an update may change: tensors, optimizers, attributes of the algorithm and of what it holds, random numbers.

    Further parts are modules and optimizers that it holds elsewhere than in its attributes and dictionaries of these.
    """

    def __init__(self, algorithm: Any, *parts: Any) -> None:
        nested = (y for x in vars(algorithm).values() if type(x) is dict for y in x.values())
        of_agents = (x for x in nested if isinstance(x, nn.Module | Optimizer))
        self.algorithm, held = algorithm, [algorithm, *vars(algorithm).values(), *of_agents, *parts]
        modules = [y for x in held if isinstance(x, nn.Module) for y in x.modules()]
        tensors = [y for x in modules for y in (*x._parameters.values(), *x._buffers.values())]
        self.tensors = [*{id(x): x for x in (*tensors, *held) if isinstance(x, Tensor)}.values()]
        self.kept = [(x.detach().clone(), x.grad if x.grad is None else x.grad.clone()) for x in self.tensors]
        optimizers = [x for y in held for x in (y, getattr(y, "optimizer", None)) if isinstance(x, Optimizer)]
        self.optimizers = [(x, copy.deepcopy(x.state_dict())) for x in optimizers]
        plain = [x for x in held if not isinstance(x, type | Tensor | Optimizer) and hasattr(x, "__dict__")]
        self.attributes = [vars(x) for x in (*plain, *modules)]
        inside = [x for own in self.attributes for x in own.values() if type(x) in (dict, list, defaultdict)]
        self.containers = [(x, x.copy()) for x in (*self.attributes, *inside)]
        self.numbers = self.read(None)[1]
        self.random = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        self.of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @torch.no_grad()
    def put_back(self) -> None:
        """Let everything be as it was."""
        for x, (kept, grad) in zip(self.tensors, self.kept, strict=True):
            if not x.is_inference():  # which no update can change
                x.copy_(kept)
            x.grad = grad
        for optimizer, state in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))
        for container, before in self.containers:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)
        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])  # noqa: NPY002
        random.setstate(self.random[2])
        torch.cuda.set_rng_state_all(self.of_devices)

    def read(self, returned: Any) -> tuple[list[Tensor], dict[str, Any]]:
        """Tensors; and numbers by name, of attributes, of dictionaries among them and of what an update returns."""
        found = [y for own in self.attributes for y in (own, *own.values()) if isinstance(y, dict)]
        named = [*(pair for x in (*found, returned or {}) for pair in x.items())]
        return [x.detach().clone() for x in self.tensors], {k: x for k, x in named if isinstance(x, int | float)}

    def compare(self, name: str, returned: Any, wanted: tuple[list[Tensor], dict[str, Any]]) -> None:
        """Say by how much tensors, and numbers that the framework's update has changed, are others after ours."""
        number = COUNTS[self.algorithm] = COUNTS.get(self.algorithm, 0) + 1
        tensors, numbers = self.read(returned)
        far, off = (
            max(float((x.double() - y.double()).abs().max()) for x, y in zip(pair, wanted[0], strict=True))
            for pair in ([x for x, _ in self.kept], tensors)
        )
        logged = {k: abs(numbers.get(k, np.nan) - x) for k, x in wanted[1].items() if x != self.numbers.get(k)}
        logs = ", ".join(f"{k} {x:.2g}" for k, x in logged.items() if x)
        moved = f"parameters moved by {far:.2g} and differ by {off:.2g} from the framework's"
        say(f"RL_TRITON_CHECK: {type(self.algorithm).__name__}.{name} {number}: {moved}; of numbers, {logs or 'none'}")
