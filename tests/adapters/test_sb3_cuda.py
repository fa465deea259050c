"""Stable-Baselines3 with rollouts on a GPU: its minibatches and its agents, up to rounding."""

from statistics import median
from time import perf_counter

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from test_sb3 import (
    BOX,
    DICT,
    assert_close_agent,
    learn,
    make_cartpole,
    make_dict_cartpole,
    make_normalised_pendulum,
    make_pendulum,
    new_agent,
    tensors_of,
)
from test_sb3_device import device_of, draw_minibatches, fill_buffer, stock_of

from rl_triton_adapters.sb3.device import BatchedTerminalValues, DeviceRolloutBuffer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("space", [BOX, DICT], ids=["plain", "dict"])
def test_the_same_minibatches(space):
    ours, stock = (fill_buffer(cls(space), space, n_steps=64, n_envs=5, device=DEVICE) for cls in (device_of, stock_of))
    for left, right in zip(draw_minibatches(ours, 16), draw_minibatches(stock, 16), strict=True):
        for name in right:
            assert left[name].device == right[name].device and left[name].dtype == right[name].dtype
            assert torch.equal(left[name], right[name]), name
    assert {tensor.device.type for tensor in left.values()} == {DEVICE}


class TimedPPO(PPO):
    def collect_rollouts(self, *arguments, **kwargs):
        torch.cuda.synchronize()
        start = perf_counter()
        completed = super().collect_rollouts(*arguments, **kwargs)
        torch.cuda.synchronize()
        self.seconds = perf_counter() - start
        return completed


def test_collecting_takes_no_longer_than_with_the_buffer_of_stable_baselines3():
    """Rollouts of 8 environments and 256 steps, one with each buffer in turn."""
    settings = {"n_steps": 256, "batch_size": 2048, "n_epochs": 1, "device": DEVICE}
    agents = [
        TimedPPO("MlpPolicy", make_cartpole(8), rollout_buffer_class=buffer_class, **settings)
        for buffer_class in (RolloutBuffer, DeviceRolloutBuffer)
    ]
    seconds = [[agent.learn(1).seconds for agent in agents] for _ in range(16)][1:]
    stock, ours = (1e3 * median(column) for column in zip(*seconds, strict=True))
    print(f"collecting takes {stock:.1f} ms with RolloutBuffer, {ours:.1f} ms with DeviceRolloutBuffer")
    assert ours < 1.1 * stock


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
@pytest.mark.parametrize("make_env", [make_cartpole, make_pendulum, make_dict_cartpole, make_normalised_pendulum])
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_same_agent(algorithm, make_env, batched):
    """After updates that moved it by far more than the tolerance, terminal values in one call or one by one."""
    env, stock = make_env(), new_agent(algorithm, make_env(), DEVICE)
    before = tensors_of(stock)["value_net.weight"]
    assert learn(stock).truncated > 0
    assert np.abs(tensors_of(stock)["value_net.weight"] - before).max() > 1e-3

    ours = new_agent(algorithm, env, DEVICE, rollout_buffer_class=device_of(env.observation_space))
    learn(ours, *[BatchedTerminalValues()] * batched)
    assert type(ours.rollout_buffer) is device_of(env.observation_space)
    assert_close_agent(ours, stock, 1e-4)
