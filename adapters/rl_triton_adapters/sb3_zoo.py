"""RL Zoo: its commands make, train, tune and continue our algorithms under Stable-Baselines3's names.

One flag turns them on, and leaving it out turns them off:

    python -m rl_zoo3.train --algo ppo --env CartPole-v1 --gym-packages rl_triton_adapters.sb3_zoo

``ppo``, ``a2c`` and ``ppo_lstm`` are ours then; all other algorithms, and what is saved, are as without the flag. So
``rl_zoo3.enjoy`` needs none. Hyperparameters keep their names; ``acceleration: False`` among them is the switch.
"""

from rl_triton_adapters._versions import explain_import
from rl_triton_adapters.sb3 import TritonA2C, TritonPPO
from rl_triton_adapters.sb3_contrib import TritonRecurrentPPO

try:
    from rl_zoo3 import ALGOS
except ImportError as error:
    raise explain_import(__name__, error, "rl-zoo3", "2.9", "sb3-zoo") from error

__all__: list[str] = []

ALGOS.update(ppo=TritonPPO, a2c=TritonA2C, ppo_lstm=TritonRecurrentPPO)
