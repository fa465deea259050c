"""Stable-Baselines3 with rollouts on a GPU: its minibatches and its agents, up to rounding."""

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import A2C, PPO
from test_sb3 import (
    BOX,
    DICT,
    assert_close_agent,
    cartpole,
    dict_cartpole,
    learn,
    new_agent,
    normalised_pendulum,
    pendulum,
    tensors_of,
)
from test_sb3_device import device_of, filled, minibatches, stock_of

from rl_triton_adapters.sb3_device import BatchedTerminalValues

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("space", [BOX, DICT], ids=["plain", "dict"])
def test_the_same_minibatches(space):
    ours, stock = (filled(cls(space), space, n_steps=64, n_envs=5, device=DEVICE) for cls in (device_of, stock_of))
    assert {ours.advantages.device.type, ours.rewards.device.type} == {DEVICE}
    for left, right in zip(minibatches(ours, 16), minibatches(stock, 16), strict=True):
        for name in right:
            assert left[name].device == right[name].device and left[name].dtype == right[name].dtype
            torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
@pytest.mark.parametrize("make_env", [cartpole, pendulum, dict_cartpole, normalised_pendulum])
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_same_agent(algorithm, make_env, batched):
    """After updates that moved it by far more than the tolerance, terminal values in one call or one by one."""
    env, stock = make_env(), new_agent(algorithm, make_env(), DEVICE)
    before = tensors_of(stock)["value_net.weight"]
    assert learn(stock).truncated > 0
    assert np.abs(tensors_of(stock)["value_net.weight"] - before).max() > 1e-3

    ours = new_agent(algorithm, env, DEVICE, rollout_buffer_class=device_of(env.observation_space))
    learn(ours, *[BatchedTerminalValues()] * batched)
    assert ours.rollout_buffer.advantages.device.type == DEVICE
    assert_close_agent(ours, stock, 1e-4)
