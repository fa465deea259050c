"""Every function of Stable-Baselines3 and PyTorch that a stock update runs: replaced, the update is the stock one."""

import sys
from contextlib import ExitStack
from functools import reduce
from operator import attrgetter
from unittest import mock

import pytest
import torch

pytest.importorskip("sb3_contrib")
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import DQN

from rl_triton_adapters.sb3.captured import TritonA2C, TritonPPO
from rl_triton_adapters.sb3.contrib import TritonMaskablePPO
from rl_triton_adapters.sb3.contrib_off_policy import TritonTQC
from rl_triton_adapters.sb3.dqn import TritonDQN
from rl_triton_adapters.sb3.sac import TritonSAC
from rl_triton_adapters.sb3.td3 import TritonTD3
from rl_triton_core.capture import list_functions

OURS = [TritonPPO, TritonA2C, TritonMaskablePPO, TritonSAC, TritonTD3, TritonDQN, TritonTQC]
STOCK = {kind: next(x for x in kind.__mro__ if f"Triton{x.__name__}" == kind.__name__) for kind in OURS}
WATCHED = ("stable_baselines3.", "sb3_contrib.", "torch.distributions.", "torch.nn.", "torch.optim.")
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


def list_run(model):
    """The functions in Python that an update and acting run, where they are looked up."""
    ran = {}

    def note(frame, event, _):
        if event == "call" and f"{frame.f_globals.get('__name__')}.".startswith(WATCHED):
            ran[frame.f_code] = frame.f_globals["__name__"]

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model.train(*[1, 16] * hasattr(model, "replay_buffer"))
        model.policy._predict(torch.as_tensor(model._last_obs))
    finally:
        sys.setprofile(before)
    modules = [
        x for name, x in [*sys.modules.items()] if f"{name}.".startswith(("stable_baselines3.", "sb3_", "torch."))
    ]
    for code, module in ran.items():
        *path, name = code.co_qualname.split(".")
        owners = [reduce(lambda x, part: getattr(x, part, None), path, sys.modules[module])] if path else modules
        found = [
            x
            for x in owners
            if code in map(attrgetter("__code__"), list_functions(getattr(x, "__dict__", {}).get(name)))
        ]
        if found and name not in ALIASES:
            yield found, name


@pytest.mark.parametrize("kind", OURS)
def test_every_function_that_a_stock_update_runs(kind):
    ours, stock = make_model(kind), make_model(STOCK[kind])
    stock.learn(64)
    ours.learn(64)
    ran = [*list_run(stock)]
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
