"""MaskablePPO with our rollout buffers, the same bit for bit, RecurrentPPO with our updates, and what all save."""

import zipfile
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import test_sb3
import torch
from processes import run_python
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv
from test_sb3 import BOX, DICT, assert_close_agent, assert_same_agent, learn, make_cartpole, new_agent

pytest.importorskip("sb3_contrib")
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable import buffers as maskable
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

from rl_triton_adapters.common.optimizers import is_fused
from rl_triton_adapters.sb3 import TritonDictRolloutBuffer, TritonRolloutBuffer, rollout_buffer_class_for
from rl_triton_adapters.sb3 import contrib as ours
from rl_triton_adapters.sb3.contrib import TritonRecurrentPPO, process_sequences

pytestmark = pytest.mark.covering


class Masked(gym.Wrapper):
    """CartPole whose cart may not be pushed on to the side that it is on."""

    def action_masks(self) -> np.ndarray:
        position = self.unwrapped.state[0]
        return np.array([position > -0.02, position < 0.02])


class MaskedDict(test_sb3.DictCartPole):
    action_masks = Masked.action_masks


def masked_cartpole(wrapper_class: type = Masked) -> VecEnv:
    env_kwargs = {"max_episode_steps": 12}
    return make_vec_env("CartPole-v1", 3, seed=3, env_kwargs=env_kwargs, wrapper_class=wrapper_class)


def masked_dict_cartpole() -> VecEnv:
    return masked_cartpole(MaskedDict)


@pytest.mark.parametrize(
    ("algorithm", "make_env"),
    [(MaskablePPO, masked_cartpole), (MaskablePPO, masked_dict_cartpole), (TRPO, make_cartpole)],
)
def test_the_trained_agent_is_bitwise_the_same(algorithm, make_env):
    test_sb3.check_training(algorithm, make_env)


@pytest.mark.parametrize("starts", [[[0, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 0, 0]], [[1, 0, 0], [0, 1, 0]]])
def test_an_lstm_is_called_once_for_all_steps(starts, device):
    """Outputs, states and gradients in float64; where an episode starts within a sequence, by sb3-contrib's code."""
    found = []
    for process in (RecurrentActorCriticPolicy._process_sequence, process_sequences):
        torch.manual_seed(0)
        lstm = torch.nn.LSTM(3, 4, num_layers=2, dtype=torch.float64, device=device)
        calls = []
        lstm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        options = {"dtype": torch.float64, "device": device}
        features = torch.randn(6, 3, requires_grad=True, **options)
        states = tuple(torch.randn(2, 2, 4, requires_grad=True, **options) for _ in range(2))
        outputs, (hidden, cell) = process(features, states, torch.tensor(starts, **options).flatten(), lstm)
        (outputs.square().sum() + hidden.sum() + cell.square().sum()).backward()
        found.append([outputs, hidden, cell, *(x.grad for x in (features, *states, *lstm.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    assert len(calls) == (3 if sum(map(sum, starts)) > 1 else 1)


@pytest.mark.parametrize("make_env", [make_cartpole, test_sb3.make_dict_cartpole])
def test_accelerated_recurrent_ppo_trains_the_same_within_rounding(make_env):
    agent = learn(new_agent(TritonRecurrentPPO, make_env()))
    assert_close_agent(agent, learn(new_agent(RecurrentPPO, make_env())))
    assert not is_fused(agent.policy.optimizer) and "_process_sequence" not in vars(agent.policy)


class Fading(torch.nn.LSTM):
    """An LSTM that forgets a part of its state."""

    def forward(self, x, states=None):
        outputs, (hidden, cell) = super().forward(x, states)
        return outputs, (0.9 * hidden, cell)


@pytest.mark.parametrize("how", ["class", "hook", "patch"])
def test_an_lstm_may_be_one_of_the_users_own(how, monkeypatch):
    """Each changes what goes on from step to step, or comes out."""
    if how == "patch":
        stock = RecurrentActorCriticPolicy._process_sequence
        own = staticmethod(lambda *inputs: (2 * stock(*inputs)[0], stock(*inputs)[1]))
        monkeypatch.setattr(RecurrentActorCriticPolicy, "_process_sequence", own)
    agents = []
    for algorithm in (RecurrentPPO, TritonRecurrentPPO):
        agent = new_agent(algorithm, make_cartpole())
        if how == "class":
            agent.policy.lstm_actor.__class__ = Fading
        if how == "hook":
            agent.policy.lstm_actor.register_forward_hook(lambda _, x, out: (out[0], (0.9 * out[1][0], out[1][1])))
        agents.append(learn(agent))
    assert_same_agent(*agents)
    assert not agents[1].is_accelerated


def train_loaded(algorithm: type[BaseAlgorithm], path, make_env: Callable[[], VecEnv], **kwargs) -> BaseAlgorithm:
    return learn(algorithm.load(path, env=make_env(), device="cpu", **kwargs), reset_num_timesteps=False)


SAVED = {  # what is saved, and the buffer classes of stock and of ours
    "plain": (PPO, make_cartpole, RolloutBuffer, TritonRolloutBuffer),
    "dict": (PPO, test_sb3.make_dict_cartpole, DictRolloutBuffer, TritonDictRolloutBuffer),
    "maskable": (MaskablePPO, masked_cartpole, maskable.MaskableRolloutBuffer, ours.TritonMaskableRolloutBuffer),
}


@pytest.mark.parametrize(("algorithm", "make_env", "stock_class", "own_class"), SAVED.values(), ids=SAVED)
def test_buffers_are_saved_and_loaded_in_both_directions(algorithm, make_env, stock_class, own_class, tmp_path):
    theirs, mine = (
        {"rollout_buffer_class": x, "rollout_buffer_kwargs": y}
        for x, y in ((stock_class, {}), (own_class, {"backend": "cpu"}))
    )
    for name, kwargs in (("stock", {}), ("ours", mine)):
        learn(new_agent(algorithm, make_env(), **kwargs)).save(tmp_path / name)
    expected = train_loaded(algorithm, tmp_path / "stock", make_env)
    for name, custom_objects in (("ours", None), ("ours", theirs), ("stock", mine)):
        agent = train_loaded(algorithm, tmp_path / name, make_env, custom_objects=custom_objects)
        buffer = agent.rollout_buffer
        assert type(buffer) is (custom_objects or mine)["rollout_buffer_class"]
        assert getattr(buffer, "backend", None) == (None if custom_objects is theirs else "cpu")
        assert_same_agent(agent, expected)


def test_recurrent_ppo_is_saved_and_loaded_in_both_directions(tmp_path):
    for name, algorithm in (("stock", RecurrentPPO), ("ours", TritonRecurrentPPO)):
        learn(new_agent(algorithm, make_cartpole())).save(tmp_path / name)
    assert b"rl_triton" not in zipfile.ZipFile(tmp_path / "ours.zip").read("data")
    expected = train_loaded(RecurrentPPO, tmp_path / "stock", make_cartpole)
    for name, algorithm in (("ours", TritonRecurrentPPO), ("ours", RecurrentPPO), ("stock", TritonRecurrentPPO)):
        agent = train_loaded(algorithm, tmp_path / name, make_cartpole)
        assert type(agent) is RecurrentPPO or agent.is_accelerated
        assert_close_agent(agent, expected)


def test_loading_where_this_package_is_absent(tmp_path):
    """The error that docs/sb3.md quotes, and what it says to do about it."""
    options = {"rollout_buffer_class": ours.TritonMaskableRolloutBuffer, "rollout_buffer_kwargs": {"backend": "cpu"}}
    agents = {"masked": new_agent(MaskablePPO, masked_cartpole(), **options)}
    agents["recurrent"] = new_agent(TritonRecurrentPPO, make_cartpole())
    for name, agent in agents.items():
        agent.learn(1).save(tmp_path / name)
    program = """
        import sys
        import numpy as np
        from sb3_contrib import MaskablePPO, RecurrentPPO
        from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
        from stable_baselines3.common.env_util import make_vec_env

        envs = make_vec_env("CartPole-v1", 3)
        theirs = {"rollout_buffer_class": MaskableRolloutBuffer, "rollout_buffer_kwargs": {}}
        try:
            MaskablePPO.load(f"{sys.argv[1]}/masked", device="cpu")
        except ModuleNotFoundError as error:
            print(error)
        for name, algorithm, custom in ("masked", MaskablePPO, theirs), ("recurrent", RecurrentPPO, None):
            model = algorithm.load(f"{sys.argv[1]}/{name}", env=envs, device="cpu", custom_objects=custom)
            print(model.predict(np.eye(4, dtype=np.float32), deterministic=True)[0].tolist())
            model.learn(1, **({"use_masking": False} if custom else {}))
        assert not [name for name in sys.modules if name.startswith("rl_triton")]
    """
    printed = run_python(program, str(tmp_path), without=("rl_triton_adapters", "rl_triton_core")).splitlines()
    asked = [x.predict(np.eye(4, dtype=np.float32), deterministic=True)[0].tolist() for x in agents.values()]
    assert printed == ["No module named 'rl_triton_adapters'", *map(str, asked)]


CHOSEN = [(MaskablePPO, BOX, ours.TritonMaskableRolloutBuffer), (TRPO, BOX, TritonRolloutBuffer)]
CHOSEN += [(MaskablePPO, DICT, ours.TritonMaskableDictRolloutBuffer), (TRPO, DICT, TritonDictRolloutBuffer)]


@pytest.mark.parametrize(("algorithm", "space", "expected"), CHOSEN)
def test_the_chooser(algorithm, space, expected):
    assert rollout_buffer_class_for(space, algorithm) is expected
    assert rollout_buffer_class_for(space, type("Mine", (algorithm,), {})) is expected


def test_the_chooser_says_that_recurrent_ppo_takes_none():
    with pytest.raises(TypeError, match="^TritonRecurrentPPO takes no rollout_buffer_class$"):
        rollout_buffer_class_for(BOX, TritonRecurrentPPO)


def test_the_wrong_class_says_which_one_to_use():
    with pytest.raises(TypeError, match="use TritonMaskableDictRolloutBuffer"):
        new_agent(MaskablePPO, masked_dict_cartpole(), rollout_buffer_class=ours.TritonMaskableRolloutBuffer)
