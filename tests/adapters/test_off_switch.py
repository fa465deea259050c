"""RL_TRITON=0 in the environment: what an adapter computes is its framework's, bit for bit, by no function of ours."""

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("sb3_contrib")

import sb3_kinds
import test_cleanrl
import test_torchrl
import test_torchrl_losses
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from sb3_kinds import A2C, DQN, PPO, MaskablePPO, RecurrentPPO, TritonA2C, TritonDQN, TritonMaskablePPO, TritonPPO
from stable_baselines3.common.buffers import RolloutBuffer
from test_sb3 import assert_same_agent, make_cartpole
from torchrl.objectives import ClipPPOLoss

from rl_triton_adapters.cleanrl import gae
from rl_triton_adapters.sb3 import TritonRolloutBuffer
from rl_triton_adapters.torchrl.losses import TritonClipPPOLoss

REASON = "RL_TRITON=0 in the environment"
SMALL = {"n_steps": 16, "batch_size": 8, "n_epochs": 2}
ALGORITHMS = {
    "PPO": (PPO, TritonPPO, "MlpPolicy", SMALL),
    "A2C": (A2C, TritonA2C, "MlpPolicy", {}),
    "MaskablePPO": (MaskablePPO, TritonMaskablePPO, "MlpPolicy", SMALL),
    "DQN": (DQN, TritonDQN, "MlpPolicy", {"learning_starts": 16, "batch_size": 8}),
    "RecurrentPPO": (RecurrentPPO, sb3_kinds.TritonRecurrentPPO, "MlpLstmPolicy", SMALL),
}


def train(algorithm, policy, callback=None, **options):
    env = (
        InvalidActionEnvDiscrete(dim=8, n_invalid_actions=3) if issubclass(algorithm, MaskablePPO) else make_cartpole()
    )
    model = algorithm(policy, env, seed=0, device="cpu", **options)
    model.learn(64 * model.n_envs, callback=callback)
    return model


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_of_sb3(name, switched_off):
    stock, ours, policy, options = ALGORITHMS[name]
    model = train(ours, policy, enabled=True, **options)
    assert_same_agent(model, train(stock, policy, **options))
    assert model.describe() == f"updates are those of the stock algorithm: {REASON}" and not model.is_accelerated
    assert model.enabled is True  # which is saved
    assert type(train(TritonPPO, "MlpPolicy", **SMALL).rollout_buffer) is RolloutBuffer


def test_buffers_of_sb3(switched_off):
    model = train(PPO, "MlpPolicy", rollout_buffer_class=TritonRolloutBuffer, **SMALL)
    assert_same_agent(model, train(PPO, "MlpPolicy", **SMALL))


def test_functions_of_cleanrl(switched_off, monkeypatch):
    """Truncations, which CleanRL has no loop for, are those of the reference."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, old, new = torch.randn(4, 16, 3, generator=generator)
    dones, next_done = (torch.rand(n, 3, generator=generator) < 0.2 for n in (16, 1))
    arguments = (rewards, values, dones, torch.randn(1, 3, generator=generator), next_done, 0.97, 0.9)
    want = test_cleanrl.run_loop(*arguments, dtype=np.float32)
    for x, y in zip(gae(*arguments), want, strict=True):
        np.testing.assert_array_equal(x.numpy(), y)
    called = []
    monkeypatch.setattr(
        "rl_triton_adapters.cleanrl.compute_gae", lambda *args, backend, **_: called.append(backend) or (old, new)
    )
    gae(*arguments, truncations=dones & False, final_values=values)
    assert called == ["reference"]


@test_torchrl.EVERY
def test_functions_of_torchrl(function, stock, scalars, switched_off):
    steps = test_torchrl.random_steps((20, 3))
    results = (test_torchrl.call_with_steps(f, steps, **scalars) for f in (function, stock))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@test_torchrl.EVERY_MODULE
def test_classes_of_torchrl(module, stock, scalars, switched_off):
    rollout = test_torchrl.random_rollout(2, 20)
    got, want = (test_torchrl.make_module(x, scalars)(rollout.clone()) for x in (module, stock))
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=0)


def test_the_loss_of_torchrl(switched_off):
    stock, ours = (test_torchrl_losses.make_loss(x) for x in (ClipPPOLoss, TritonClipPPOLoss))
    batch = test_torchrl_losses.make_minibatch()
    torch.testing.assert_close(*(dict(loss(batch.clone()).items()) for loss in (ours, stock)), rtol=0, atol=0)
    assert ours.reason == REASON
