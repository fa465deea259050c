"""Every function of Stable-Baselines3 and PyTorch that a stock update runs: replaced, the update is the stock one."""

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

pytest.importorskip("sb3_contrib")
from replaced import list_run
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import DQN

from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.contrib import TritonMaskablePPO
from rl_triton_adapters.sb3.contrib_off_policy import TritonTQC
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC
from rl_triton_adapters.sb3.td3 import TritonTD3

OURS = [TritonPPO, TritonA2C, TritonMaskablePPO, TritonSAC, TritonTD3, TritonDQN, TritonTQC]
STOCK = {kind: next(x for x in kind.__mro__ if f"Triton{x.__name__}" == kind.__name__) for kind in OURS}
ALIASES = ("_wrapped_call_impl", "_predict", "get_distribution")
"""What nothing looks up by this name while it learns."""
UNSEEN = ["_Real.check"]
"""Of a constraint in a constraint."""
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")


def make_model(kind):
    if issubclass(kind, MaskablePPO):
        return kind("MlpPolicy", InvalidActionEnvDiscrete(), seed=0, device="cpu", n_steps=8)
    discrete = issubclass(kind, DQN)
    sizes = {"learning_starts": 20, "buffer_size": 100} if hasattr(kind, "_store_transition") else {"n_steps": 8}
    return kind("MlpPolicy", "CartPole-v1" if discrete else "Pendulum-v1", seed=0, device="cpu", **sizes)


def update_and_act(model):
    model.train(*[1, 16] * hasattr(model, "replay_buffer"))
    model.policy._predict(torch.as_tensor(model._last_obs))


@pytest.mark.parametrize("kind", OURS)
def test_every_function_that_a_stock_update_runs(kind):
    ours, stock = make_model(kind), make_model(STOCK[kind])
    stock.learn(64)
    ours.learn(64)
    found = list_run(("stable_baselines3", "sb3_contrib"), update_and_act, stock)
    ran = [(owners, name) for (_, name), owners in found.items() if name not in ALIASES]
    assert len(ran) > 30 and not ours.find_obstacle()
    missed = []
    for owners, name in ran:
        with ExitStack() as stack:
            for owner in owners:
                stack.enter_context(mock.patch.object(owner, name, lambda *args, **kwargs: None))
            ours._asked = (), ""
            missed += [f"{owners[0].__name__}.{name}"] * (not ours.find_obstacle())
    assert missed in ([], UNSEEN)
    ours._asked = (), ""
    assert not ours.find_obstacle()
