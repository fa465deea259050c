"""The connector on random batches: the columns of RLlib's own, for its own modules and episodes."""

import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray.rllib")

from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_prelearner import OfflinePreLearner
from ray.rllib.utils.postprocessing.zero_padding import create_mask_and_seq_lens, split_and_zero_pad_n_episodes

from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, gae
from rl_triton_core import normalize_advantages

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NEW_COLUMNS = ("advantages", "value_targets")


class Critic(ValueFunctionAPI):
    """A module whose values are in the batch, and have a graph."""

    def __init__(self, max_seq_len):
        self.max_seq_len = max_seq_len
        self.model_config = {"max_seq_len": max_seq_len}

    def compute_values(self, batch, embeddings=None):
        return batch["values"] * torch.ones((), requires_grad=True)

    def is_stateful(self):
        return self.max_seq_len is not None


class Modules(dict):
    framework = "torch"

    def foreach_module(self, func, return_dict=False):
        return {name: func(name, module) for name, module in self.items()}


def episode_of(length, module_id):
    episode = SingleAgentEpisode(
        observations=[0] * (length + 1), actions=[0] * length, rewards=[0.0] * length, len_lookback_buffer=0
    )
    episode.module_id = module_id
    return episode


def random_columns(lengths, max_seq_len, rng, scale=1.0):
    """A module's batch out of episodes of these lengths, extra slots included."""
    ends = np.cumsum(lengths) - 2  # the last real steps
    slots = sum(lengths)
    columns = {name: (scale * rng.standard_normal(slots)).astype(np.float32) for name in ("values", "rewards")}
    how = rng.integers(0, 2, len(lengths)).astype(bool)
    for name, which in {"terminateds": how, "truncateds": ~how}.items():
        columns[name] = np.zeros(slots, bool)
        columns[name][ends[which]] = True
    columns["loss_mask"] = np.ones(slots, bool)
    columns["loss_mask"][ends + 1] = False
    if max_seq_len is not None:
        for name, column in columns.items():
            columns[name] = np.stack(split_and_zero_pad_n_episodes(column, lengths, max_seq_len))
        columns["seq_lens"] = np.concatenate([create_mask_and_seq_lens(n, max_seq_len)[1] for n in lengths])
    return {name: torch.from_numpy(column) for name, column in columns.items()}


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=5), min_size=1, max_size=3),
    max_seq_lens=st.lists(st.sampled_from([None, 1, 3, 4, 8, 50]), min_size=3, max_size=3),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
    scale=st.sampled_from([1e-6, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_columns_are_those_of_rllib(lengths, max_seq_lens, gamma, lambda_, scale, seed):
    rng = np.random.default_rng(seed)
    modules = Modules({str(i): Critic(max_seq_len) for i, max_seq_len in enumerate(max_seq_lens[: len(lengths)])})
    batch = {i: random_columns(lengths[int(i)], m.max_seq_len, rng, scale) for i, m in modules.items()}
    episodes = [episode_of(n, str(i)) for i, ns in enumerate(lengths) for n in ns]
    stock = GeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_)
    ours = TritonGeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_)
    assert_same_columns(stock, ours, modules, episodes, batch)


def assert_same_columns(stock, ours, modules, episodes, batch):
    """Both connectors add the same columns to the same batch."""
    given_columns = {name: set(columns) for name, columns in batch.items()}
    want, got = (
        piece(rl_module=modules, episodes=episodes, batch={name: dict(columns) for name, columns in batch.items()})
        for piece in (stock, ours)
    )
    assert set(got) == set(want) == set(batch)
    for name in batch:
        assert set(got[name]) == set(want[name]) == given_columns[name] | set(NEW_COLUMNS)
        for column in NEW_COLUMNS:
            assert not got[name][column].requires_grad
            torch.testing.assert_close(got[name][column], want[name][column], **TOLERANCE)


def test_a_module_without_values_or_without_data_is_left_alone():
    columns = random_columns([3, 4], None, np.random.default_rng(0))
    modules = Modules(critic=Critic(None), actor=SimpleNamespace(), idle=Critic(None))
    batch = {"critic": dict(columns), "actor": dict(columns)}
    TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.9)(rl_module=modules, episodes=[], batch=batch)
    assert set(batch["critic"]) - set(columns) == set(NEW_COLUMNS)
    assert set(batch["actor"]) == set(columns)


@pytest.mark.parametrize("max_seq_len", [None, 4], ids=["flat", "padded"])
def test_masked_statistics_are_those_of_real_steps(max_seq_len):
    columns = random_columns([3, 9, 5], max_seq_len, np.random.default_rng(0))
    modules = Modules(critic=Critic(max_seq_len))
    all_slots, real_steps = (
        TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.9, masked_statistics=masked)(
            rl_module=modules, episodes=[], batch={"critic": dict(columns)}
        )["critic"]
        for masked in (False, True)
    )
    mask = columns["loss_mask"]
    raw = all_slots["value_targets"] - columns["values"]
    want = normalize_advantages(raw, mask, correction=0, epsilon=1e-4, epsilon_mode="floor")
    assert real_steps["value_targets"].equal(all_slots["value_targets"])
    torch.testing.assert_close(real_steps["advantages"], want, **TOLERANCE)
    real = real_steps["advantages"][mask]
    torch.testing.assert_close((real.mean(), real.std(correction=0)), torch.tensor([0.0, 1.0]).unbind(), **TOLERANCE)
    assert not real_steps["advantages"][~mask].any()
    assert not torch.allclose(all_slots["advantages"][mask], real)


def test_tensors_stay_on_their_device_and_each_module_is_one_call(monkeypatch):
    """Tensors of the device "meta" have no data: to copy one to the host or to read a number out of it is an error."""
    shapes = []

    def estimated(rewards, values, *flags, **kwargs):
        shapes.append(tuple(values.shape))
        assert {x.device.type for x in (rewards, values, *flags, kwargs["next_values"])} == {"meta"}
        return torch.empty_like(values), torch.empty_like(values)

    monkeypatch.setattr(gae, "compute_gae", estimated)
    monkeypatch.setattr(gae, "normalize_advantages", lambda advantages, *args, **kwargs: advantages.clone())
    rng, lengths = np.random.default_rng(0), [3, 9, 5, 2]
    modules = Modules(flat=Critic(None), stateful=Critic(4))
    batch = {
        name: {column: x.to("meta") for column, x in random_columns(lengths, critic.max_seq_len, rng).items()}
        for name, critic in modules.items()
    }
    TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.9)(rl_module=modules, episodes=[], batch=batch)
    assert shapes == [(1, sum(lengths)), (1, batch["stateful"]["rewards"].numel())]
    assert all(columns[name].device.type == "meta" for columns in batch.values() for name in NEW_COLUMNS)


def test_values_with_a_dimension_more_are_refused():
    class Wide(Critic):
        def compute_values(self, batch, embeddings=None):
            return super().compute_values(batch)[..., None]

    for max_seq_len in (None, 4):
        batch = {"wide": random_columns([3, 4], max_seq_len, np.random.default_rng(0))}
        shape = tuple(batch["wide"]["rewards"].shape)
        message = re.escape(f"compute_values of module 'wide': got shape {(*shape, 1)}, expected {shape}")
        with pytest.raises(ValueError, match=message):
            TritonGeneralAdvantageEstimation(gamma=0.9, lambda_=0.9)(
                rl_module=Modules(wide=Wide(max_seq_len)), episodes=[], batch=batch
            )


@pytest.mark.parametrize("doubled", [["values"], ["rewards"], ["values", "rewards"]])
def test_columns_are_float32_as_those_of_rllib(doubled):
    modules, lengths = Modules(critic=Critic(None)), [3, 4]
    columns = random_columns(lengths, None, np.random.default_rng(0))
    columns |= {name: columns[name].double() for name in doubled}
    pieces = (kind(gamma=0.9, lambda_=0.9) for kind in (GeneralAdvantageEstimation, TritonGeneralAdvantageEstimation))
    assert_same_columns(*pieces, modules, [episode_of(n, "critic") for n in lengths], {"critic": columns})


class TritonOfflinePreLearner(OfflinePreLearner):
    """As docs/rllib.md has it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        pieces = self._learner_connector.connectors
        pieces[-1] = TritonGeneralAdvantageEstimation(gamma=pieces[-1].gamma, lambda_=pieces[-1].lambda_)


def test_a_prelearner_of_marwil_may_have_the_connector():
    env = gym.make("CartPole-v1")
    spaces = (env.observation_space, env.action_space)
    config = MARWILConfig().environment(observation_space=spaces[0], action_space=spaces[1])
    config.rl_module(rl_module_spec=config.get_multi_rl_module_spec(spaces={"default_policy": spaces}))
    rng, rows = np.random.default_rng(0), 20
    data = {
        "obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "new_obs": rng.standard_normal((rows, 4)).astype(np.float32),
        "actions": rng.integers(0, 2, rows),
        "rewards": rng.standard_normal(rows),
        "terminateds": rng.random(rows) < 0.3,
        "truncateds": np.zeros(rows, bool),
    }
    batches = []
    for prelearner_class in (OfflinePreLearner, TritonOfflinePreLearner):
        config.offline_data(prelearner_class=prelearner_class)
        torch.manual_seed(0)
        batches.append(config.prelearner_class(config=config, spaces=spaces)(data))
    torch.testing.assert_close(*batches, **TOLERANCE)
    assert len(batches[0]["default_policy/value_targets"]) == 2 * rows  # each row is an episode, with its extra slot
