"""RL Zoo: its commands make, train, tune and continue our algorithms under Stable-Baselines3's names.

One flag turns them on, and leaving it out turns them off:

    python -m rl_zoo3.train --algo ppo --env CartPole-v1 --gym-packages rl_triton_adapters.sb3_zoo

All algorithms that have one of ours are ours then, under their names; the others (``ars``, ``trpo``) stay, and what is
saved is as without the flag. So ``rl_zoo3.enjoy`` needs none. Hyperparameters keep their names; ``enabled: False``
among them is the switch.
"""

from rl_triton_adapters.common.versions import explained_import
from rl_triton_adapters.sb3.enabling import list_places

with explained_import(__name__, "rl-zoo3", "2.9", "sb3-zoo"):
    from rl_zoo3 import ALGOS

__all__: list[str] = []

OURS = {stock: ours for _, _, stock, ours in list_places()}
ALGOS.update({name: OURS[algorithm] for name, algorithm in ALGOS.items() if algorithm in OURS})
