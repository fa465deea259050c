"""The rollout buffer of Stable-Baselines3, as it is: NumPy, GAE, time-major, flags that arrive with observations."""

from __future__ import annotations

import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The buffer's own pass over a rollout that it holds."""
    if workload.estimator != "gae" or workload.truncated or workload.layout != "time-major":
        return None
    spaces_ = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
    lambda_ = workload.spec.lambda_ or 1.0
    buffer = RolloutBuffer(workload.num_steps, *spaces_, gamma=GAMMA, gae_lambda=lambda_, n_envs=workload.num_envs)
    buffer.rewards[:], buffer.values[:] = inputs["rewards"].numpy(), inputs["values"].numpy()
    dones = inputs["terminated"].numpy()
    buffer.episode_starts[1:] = dones[:-1]

    def call() -> list[torch.Tensor]:
        buffer.compute_returns_and_advantage(inputs["bootstrap_values"], dones[-1])
        return [torch.from_numpy(buffer.advantages), torch.from_numpy(buffer.returns)]

    return call
