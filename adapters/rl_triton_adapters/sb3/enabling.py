"""Stable-Baselines3: our algorithms in the place of its own, for libraries that make algorithms themselves.

    enable()  # before a library is imported that does `from stable_baselines3 import PPO`
    disable()

    with enable():
        stable_baselines3.PPO("MlpPolicy", env)

Arguments of models and their files do not change.
"""

import sys
from contextlib import ExitStack
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC
from rl_triton_adapters.sb3.td3 import TritonDDPG, TritonTD3

__all__ = ["disable", "enable"]


class Place(NamedTuple):
    """A package of Stable-Baselines3 or sb3-contrib that has an algorithm, and which are to be there."""

    package: ModuleType
    stock: type
    ours: type

    def put(self, new: type, old: type) -> bool:
        """Put one of them where the other is. Returns whether it was there."""
        is_there = vars(self.package).get(self.stock.__name__) is old
        if is_there:
            setattr(self.package, self.stock.__name__, new)
        return is_there


def enable() -> ExitStack:
    """Put ours in the place of all algorithms that have one of ours, in this process.

    That is in all packages that offer them, such as `stable_baselines3` and `stable_baselines3.ppo`; the modules where
    they are defined stay, and what has been imported from there by name before stays stock. A second call changes
    nothing, nor does any with RL_TRITON=0 in the environment.

    Returns:
        A context manager, whose end takes back what this call has changed. Without it, that lasts until `disable`.
    """
    undo = ExitStack()
    for place in [] if find_off_switch() else list_places():
        if place.put(place.ours, place.stock):
            undo.callback(place.put, place.stock, place.ours)
    return undo


def disable() -> None:
    """Put the algorithms of Stable-Baselines3 and sb3-contrib back where ours are."""
    for place in list_places():
        place.put(place.stock, place.ours)


def list_places() -> list[Place]:
    """All places; those of sb3-contrib where it is installed."""
    algorithms: list[type] = [TritonPPO, TritonA2C, TritonDDPG, TritonDQN, TritonSAC, TritonTD3]
    if find_spec("sb3_contrib"):
        from rl_triton_adapters.sb3.contrib import TritonMaskablePPO, TritonRecurrentPPO
        from rl_triton_adapters.sb3.contrib_off_policy import TritonCrossQ, TritonQRDQN, TritonTQC

        algorithms += [TritonMaskablePPO, TritonRecurrentPPO, TritonCrossQ, TritonQRDQN, TritonTQC]
    places = []
    for ours in algorithms:
        stock = next(base for base in ours.__mro__ if f"Triton{base.__name__}" == ours.__name__)
        names = stock.__module__.partition(".")[0], stock.__module__.rpartition(".")[0]
        places += [Place(sys.modules[name], stock, ours) for name in names]
    return places
