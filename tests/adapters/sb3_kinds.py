"""Algorithms of Stable-Baselines3 and sb3-contrib, and ours."""

from sb3_contrib import QRDQN, TQC, CrossQ, MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3

from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.contrib import TritonMaskablePPO, TritonRecurrentPPO
from rl_triton_adapters.sb3.contrib_off_policy import TritonCrossQ, TritonQRDQN, TritonTQC
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC
from rl_triton_adapters.sb3.td3 import TritonDDPG, TritonTD3

ON_POLICY = {TritonPPO: PPO, TritonA2C: A2C, TritonMaskablePPO: MaskablePPO}
OFF_POLICY = {TritonSAC: SAC, TritonTD3: TD3, TritonDDPG: DDPG, TritonDQN: DQN, TritonTQC: TQC, TritonQRDQN: QRDQN}
OFF_POLICY[TritonCrossQ] = CrossQ
STOCK = ON_POLICY | OFF_POLICY | {TritonRecurrentPPO: RecurrentPPO}
