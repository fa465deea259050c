"""Stable-Baselines3: our algorithms in the place of its own, for libraries that make algorithms themselves.

    enable()  # before a library is imported that does `from stable_baselines3 import PPO`
    disable()

    with enable():
        stable_baselines3.PPO("MlpPolicy", env)

Arguments of models and their files do not change.
"""

from contextlib import ExitStack
from importlib.util import find_spec

from rl_triton_adapters.common.switch import Place, find_off_switch, find_places, replace_stock
from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC
from rl_triton_adapters.sb3.td3 import TritonDDPG, TritonTD3

__all__ = ["disable", "enable"]


def enable() -> ExitStack:
    """Put ours in the place of all algorithms that have one of ours, in this process.

    That is in all packages that offer them, such as `stable_baselines3` and `stable_baselines3.ppo`; the modules where
    they are defined stay, and what has been imported from there by name before stays stock. A second call changes
    nothing, nor does any with RL_TRITON=0 in the environment.

    Returns:
        A context manager, whose end takes back what this call has changed. Without it, that lasts until `disable`.
    """
    return replace_stock([] if find_off_switch() else list_places())


def disable() -> None:
    """Put the algorithms of Stable-Baselines3 and sb3-contrib back where ours are."""
    replace_stock(list_places(), back=True)


def list_places() -> list[Place]:
    """All places; those of sb3-contrib where it is installed."""
    own = find_places("stable_baselines3", [TritonPPO, TritonA2C, TritonDDPG, TritonDQN, TritonSAC, TritonTD3])
    return own + (list_contrib_places() if find_spec("sb3_contrib") else [])


def list_contrib_places() -> list[Place]:
    """The places in sb3-contrib."""
    from rl_triton_adapters.sb3 import contrib, contrib_off_policy

    return find_places("sb3_contrib", [*vars(contrib).values(), *vars(contrib_off_policy).values()])
