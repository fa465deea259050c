"""RLlib with our learners: the columns, losses and weights of its own, on its own episodes.

Everything that is not random numbers comes from RLlib: environments, episodes, pipelines, modules, learners, actors.
"""

import os
import re
import subprocess
import sys
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray.rllib")

import ray
from compilations import count_compilations
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch import impala_torch_learner
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import make_time_major, vtrace_torch
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.rllib.offline.offline_prelearner import OfflinePreLearner
from ray.rllib.utils.postprocessing.zero_padding import create_mask_and_seq_lens, split_and_zero_pad_n_episodes
from small import (
    LOSSES,
    assert_same_training,
    name_of_piece,
    of_learners,
    small,
    small_ppo,
    stopping,
    the_piece,
    train_algorithm,
)

from rl_triton_adapters import rllib as adapter
from rl_triton_adapters.rllib import (
    TritonAPPOTorchLearner,
    TritonGeneralAdvantageEstimation,
    TritonIMPALATorchLearner,
    TritonPPOTorchLearner,
    check_learners,
    check_ray,
    enable_triton,
    vtrace,
)
from rl_triton_core import BackendUnavailableError, normalize_advantages

ROOT = Path(__file__).parents[3]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NEW_COLUMNS = ("advantages", "value_targets")
OFF = {"rl_triton": False}
DEFAULTS = {
    "rl_triton": True,
    "rl_triton_masked_statistics": False,
    "rl_triton_backend": None,
    "rl_triton_fused_loss": True,
    "rl_triton_deferred_metrics": True,
    "rl_triton_sliced_minibatches": True,
    "rl_triton_fused_optimizer": True,
    "rl_triton_captured_update": True,
}


LSTM = DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True, lstm_cell_size=8, max_seq_len=8)
MODULES = {"flat": DefaultModelConfig(fcnet_hiddens=[8]), "stateful": LSTM}


def two_policies(config):
    """One policy without a state, one with."""
    specs = {name: RLModuleSpec(model_config=model) for name, model in MODULES.items()}
    return config.multi_agent(
        policies=set(MODULES), policy_mapping_fn=lambda agent, episode, **kwargs: ["flat", "stateful"][agent % 2]
    ).rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))


# --- The connector on random batches ----------------------------------------------------------------------------------


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
    torch.testing.assert_close(
        (real.mean(), real.std(correction=0)), (torch.tensor(0.0), torch.tensor(1.0)), **TOLERANCE
    )
    assert not real_steps["advantages"][~mask].any()
    assert not torch.allclose(all_slots["advantages"][mask], real)


def test_tensors_stay_on_their_device_and_each_module_is_one_call(monkeypatch):
    """Tensors of the device "meta" have no data: to copy one to the host or to read a number out of it is an error."""
    shapes = []

    def estimated(rewards, values, *flags, **kwargs):
        shapes.append(tuple(values.shape))
        assert {x.device.type for x in (rewards, values, *flags, kwargs["next_values"])} == {"meta"}
        return torch.empty_like(values), torch.empty_like(values)

    monkeypatch.setattr(adapter, "compute_gae", estimated)
    monkeypatch.setattr(adapter, "normalize_advantages", lambda advantages, *args, **kwargs: advantages.clone())
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


# --- PPO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "num_learners"),
    [
        (lambda **kwargs: small_ppo(env_config={"max_episode_steps": 15}, **kwargs), 0),
        (lambda **kwargs: small_ppo(env="Pendulum-v1", env_config={"max_episode_steps": 37}, **kwargs), 0),
        (lambda **kwargs: small_ppo(env_config={"max_episode_steps": 15}, model=LSTM, **kwargs), 0),
        (lambda **kwargs: two_policies(small_ppo(env=MultiAgentCartPole, env_config={"num_agents": 2}, **kwargs)), 0),
        (small_ppo, 1),
        (lambda **kwargs: small_ppo(model=LSTM, **kwargs), 1),
        (small_ppo, 2),
    ],
    ids=["time-limit", "pendulum", "lstm", "two-policies", "one-remote", "one-remote-lstm", "two-remote"],
)
def test_training_is_that_of_rllib(make, num_learners, small_ray):
    stock = train_algorithm(make(num_learners=num_learners), name_of_piece)
    ours = train_algorithm(enable_triton(make(num_learners=num_learners)), name_of_piece)
    count = max(1, num_learners)
    assert stock[2] == ["GeneralAdvantageEstimation"] * count
    assert ours[2] == ["TritonGeneralAdvantageEstimation"] * count
    assert_same_training(stock, ours)
    assert read_metric(ours[0]) == {1.0}


def read_metric(results):
    """What each iteration says it was computed with."""
    return {float(result["__all_modules__"]["rl_triton"]) for result in results}


@pytest.mark.parametrize("config_class", [PPOConfig, IMPALAConfig, APPOConfig])
def test_a_metric_says_that_it_is_off(config_class, small_ray):
    small_config = small_ppo if config_class is PPOConfig else partial(small_impala, config_class)
    results, _ = train_algorithm(enable_triton(small_config()).learners(learner_config_dict=OFF))
    assert read_metric(results) == {0.0}


# Learners alone need no Ray processes.


LEARNERS = []


@pytest.fixture(autouse=True)
def learners_end():
    """The threads of those that a test builds."""
    yield
    while LEARNERS:
        LEARNERS.pop().shutdown()


def build_learner(config):
    """A learner of a config, with weights that depend on nothing else."""
    torch.manual_seed(0)
    LEARNERS.append(config.build_learner(env=gym.make("CartPole-v1")))
    return LEARNERS[-1]


def test_the_flag_restores_the_stock_connector():
    names = [type(piece) for piece in build_learner(small_ppo())._learner_connector.connectors]
    off = build_learner(enable_triton(small_ppo()).learners(learner_config_dict=OFF))
    assert [type(piece) for piece in off._learner_connector.connectors] == names
    assert type(off.find_estimator()) is GeneralAdvantageEstimation
    on = build_learner(enable_triton(small_ppo()))
    assert [type(piece) for piece in on._learner_connector.connectors] == names
    assert type(on.find_estimator()) is TritonGeneralAdvantageEstimation


def test_the_connector_takes_what_the_config_says():
    config = small_ppo().training(gamma=0.5, lambda_=0.25)
    piece = the_piece(build_learner(enable_triton(config, masked_statistics=True, backend="reference")))
    assert (piece.gamma, piece.lambda_, piece.masked_statistics, piece.backend) == (0.5, 0.25, True, "reference")


@pytest.mark.parametrize("config_class", [PPOConfig, IMPALAConfig, APPOConfig])
def test_a_backend_that_cannot_run_is_refused_when_the_learner_is_built(config_class, monkeypatch):
    """And not in the loss: an error there would end IMPALA's learner thread, and the algorithm would wait for it."""
    small_config = small_ppo if config_class is PPOConfig else partial(small_impala, config_class)
    with pytest.raises(ValueError, match="backend: got 'nope', expected one of triton, cpu, reference"):
        enable_triton(small_config(), backend="nope")
    monkeypatch.setattr(
        "rl_triton_core._internal.backend.why_unavailable",
        lambda name, device: f"no {name} for {device}" if name == "triton" else None,
    )
    build_learner(enable_triton(small_config(), backend="triton").learners(learner_config_dict=OFF))
    with pytest.raises(BackendUnavailableError, match="no triton for cpu"):
        build_learner(enable_triton(small_config(), backend="triton"))


FLAGS = {"rl_triton_masked_statistics": True, "rl_triton_backend": "reference", "rl_triton_fused_loss": False}


def test_the_config_is_changed_in_place_and_flags_that_were_set_before_stay():
    config = small_ppo().learners(learner_config_dict={"mine": 1, **FLAGS})
    assert enable_triton(config) is config and config.learner_class is TritonPPOTorchLearner
    assert config.learner_config_dict == {"mine": 1, **DEFAULTS, **FLAGS}
    enable_triton(config, masked_statistics=False, backend="cpu")
    assert flags_of_piece(build_learner(config)) == {"masked_statistics": False, "backend": "cpu"}
    off = enable_triton(small_ppo().learners(learner_config_dict=OFF), backend="cpu")
    assert off.learner_config_dict == {**DEFAULTS, **OFF, "rl_triton_backend": "cpu"}


@pytest.mark.parametrize("config_class", [PPOConfig, IMPALAConfig, APPOConfig])
@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        ({"rl_tritn": False}, ValueError, "got 'rl_tritn', expected one of rl_triton, rl_triton_masked_statistics"),
        ({"rl_triton_backends": "cpu"}, ValueError, "got 'rl_triton_backends', expected one of"),
        ({"rl_triton": "False"}, TypeError, "got rl_triton='False', expected True or False"),
        ({"rl_triton": None}, TypeError, "got rl_triton=None, expected True or False"),
        ({"rl_triton_masked_statistics": 1}, TypeError, "got rl_triton_masked_statistics=1, expected True or False"),
        ({"rl_triton_fused_optimizer": 1}, TypeError, "got rl_triton_fused_optimizer=1, expected True or False"),
        ({"rl_triton_backend": "nope"}, ValueError, "backend: got 'nope', expected one of triton, cpu, reference"),
    ],
)
def test_a_flag_that_is_none_is_refused_whenever_it_is_set(config_class, flag, error, message):
    small_config = small_ppo if config_class is PPOConfig else partial(small_impala, config_class)
    config = small_config().learners(learner_config_dict=flag)
    with pytest.raises(error, match=message):
        enable_triton(config)
    assert config.learner_config_dict == flag and config.learner_class is small_config().learner_class
    with pytest.raises(error, match=message):
        build_learner(enable_triton(small_config()).learners(learner_config_dict=flag))


@pytest.mark.parametrize(("flag", "who"), [(True, "rl_triton_core, backend reference"), (False, "RLlib")])
def test_a_learner_says_in_one_line_what_it_computes_with(flag, who, caplog):
    """Before its first update, since a class of the user's may change it after ours has built it."""
    for config, what in ((small_ppo(), "PPOTorchLearner computes advantages"), (small_impala(IMPALAConfig), "V-Trace")):
        enable_triton(config, backend="reference").learners(learner_config_dict={"rl_triton": flag})
        learner = build_learner(config)
        with caplog.at_level("INFO", logger=adapter.logger.name):
            for _ in range(2):
                learner.before_gradient_based_update(timesteps={})
        assert caplog.messages == [learner.describe()]
        assert learner.describe().startswith("Triton") and f"{what} with {who}, on cpu" in learner.describe()
        caplog.clear()


# Learners that were meant to be ours.


class Theirs(PPOTorchLearner):
    """A learner of somebody's own."""


class Forgetful(TritonPPOTorchLearner):
    """A learner that builds itself without ours."""

    def build(self):
        PPOTorchLearner.build(self)


@pytest.mark.parametrize("num_learners", [0, 1])
@pytest.mark.parametrize(
    ("learner_class", "advice"), [(Theirs, r".*class Mine\("), (Forgetful, r"expected its build\(\) to call super")]
)
def test_a_learner_set_after_the_call_that_is_not_ours_is_an_error(learner_class, advice, num_learners, small_ray):
    config = enable_triton(small_ppo(num_learners=num_learners)).learners(learner_class=learner_class)
    message = rf"1 of 1 learners compute with RLlib's own: got {learner_class.__name__}, {advice}"
    with pytest.raises(RuntimeError, match=message):
        config.build_algo()
    config = enable_triton(small_ppo(num_learners=num_learners)).learners(
        learner_class=learner_class, learner_config_dict=OFF
    )
    config.build_algo().stop()


def test_the_check_is_one_of_the_callbacks_and_may_be_called(small_ray):
    called = []
    config = small_ppo().callbacks(on_algorithm_init=lambda **kwargs: called.append(kwargs["algorithm"]))
    with stopping(enable_triton(enable_triton(config)).build_algo()) as algorithm:
        assert called == [algorithm]
        assert len(config.callbacks_on_algorithm_init) == 2
        check_learners(algorithm)
    with (
        stopping(small_ppo().build_algo()) as stock,
        pytest.raises(RuntimeError, match="got PPOTorchLearner, .*class Mine.PPOTorchLearner, TritonPPO"),
    ):
        check_learners(stock)


def test_the_line_that_the_error_suggests_works():
    with pytest.raises(TypeError) as error:
        enable_triton(small_ppo().learners(learner_class=Theirs))
    line = str(error.value)[str(error.value).index("class ") :]
    exec(line, scope := dict(globals()))
    learner = build_learner(enable_triton(small_ppo().learners(learner_class=scope["Mine"])))
    assert type(the_piece(learner)) is TritonGeneralAdvantageEstimation


def test_learners_of_ones_own_derive_from_ours():
    class Mine(TritonPPOTorchLearner):
        pass

    assert enable_triton(small_ppo().learners(learner_class=Mine)).learner_class is Mine


# --- IMPALA, APPO -----------------------------------------------------------------------------------------------------

VTRACED = [(IMPALAConfig, TritonIMPALATorchLearner), (APPOConfig, TritonAPPOTorchLearner)]


def small_impala(config_class, **kwargs):
    """Five updates per iteration."""
    return (
        small(config_class(), train_batch_size_per_learner=40, lr=3e-3, **kwargs)
        .env_runners(rollout_fragment_length=10)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=200)
    )


def random_vtrace(steps, rows, rng):
    """Arguments as the learners pass them: transposed views, some of which have a graph."""

    def column(scale=1.0):
        return torch.from_numpy((scale * rng.standard_normal((rows * steps,))).astype(np.float32))

    arguments = {
        "target_action_log_probs": column(0.5).requires_grad_(),
        "behaviour_action_log_probs": column(0.5),
        "discounts": torch.from_numpy((rng.random(rows * steps) < 0.8).astype(np.float32)) * 0.9,
        "rewards": column(),
        "values": column().requires_grad_(),
    }
    arguments = {name: make_time_major(tensor, trajectory_len=steps) for name, tensor in arguments.items()}
    first = arguments["values"][0]
    return {**arguments, "bootstrap_values": torch.cat([first[1:], first[:1]])}


@settings(max_examples=60)
@given(
    steps=st.integers(1, 30),
    rows=st.integers(1, 9),
    rho=st.sampled_from([None, 0.5, 1.0, 2.0]),
    pg_rho=st.sampled_from([None, 0.5, 1.0, torch.tensor(2.0)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vtrace_is_that_of_rllib(steps, rows, rho, pg_rho, seed):
    arguments = random_vtrace(steps, rows, np.random.default_rng(seed))
    clips = {"clip_rho_threshold": rho, "clip_pg_rho_threshold": pg_rho}
    want, got = vtrace_torch(**arguments, **clips), vtrace(**arguments, **clips)
    assert_same_vtrace(got, want)
    assert not any(tensor.requires_grad for tensor in got)


def assert_same_vtrace(got, want):
    """Within 1e-5 of their own scale: both sum in float32, in different orders."""
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * y.abs().max().clamp(min=1).item())


def random_batch(slots, rng):
    """A batch of a CartPole learner."""
    return {
        "obs": torch.from_numpy(rng.standard_normal((slots, 4)).astype(np.float32)),
        "actions": torch.from_numpy(rng.integers(0, 2, slots)),
        "action_logp": torch.from_numpy(np.log(rng.uniform(0.2, 0.9, slots)).astype(np.float32)),
        "rewards": torch.from_numpy(rng.standard_normal(slots).astype(np.float32)),
        "terminateds": torch.from_numpy(rng.random(slots) < 0.1),
        "loss_mask": torch.from_numpy(rng.random(slots) < 0.9),
    }


def loss_and_gradients(learner, batch):
    module = learner.module["default_policy"]
    module.zero_grad()
    fwd_out = module.forward_train(batch)
    config = learner.config.get_config_for_module("default_policy")
    loss = learner.compute_loss_for_module(module_id="default_policy", config=config, batch=batch, fwd_out=fwd_out)
    loss.backward()
    return loss, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("config_class", "learner_class"), VTRACED)
@pytest.mark.parametrize("slots", [50, 55], ids=["whole", "padded"])
def test_losses_are_those_of_rllib(config_class, learner_class, slots, monkeypatch):
    calls = []
    monkeypatch.setattr(adapter, "vtrace", lambda **kwargs: calls.append(kwargs) or vtrace(**kwargs))
    stock = build_learner(small_impala(config_class))
    off = build_learner(enable_triton(small_impala(config_class)).learners(learner_config_dict=OFF))
    ours = build_learner(enable_triton(small_impala(config_class), backend="reference"))
    assert type(ours) is type(off) is learner_class
    batch = random_batch(slots, np.random.default_rng(0))
    calls.clear()
    want = loss_and_gradients(stock, batch)
    unchanged = loss_and_gradients(off, batch)
    assert not calls
    got = loss_and_gradients(ours, batch)
    assert [call["backend"] for call in calls] == ["reference"]
    assert len(want[1]) > 4
    torch.testing.assert_close(unchanged, want, rtol=0, atol=0)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("name", ["values", "discounts", "target_action_log_probs", "behaviour_action_log_probs"])
def test_vtrace_refuses_another_shape(name):
    arguments = random_vtrace(5, 3, np.random.default_rng(0))
    arguments[name] = arguments[name][..., None]
    with pytest.raises(ValueError, match=rf"{name}: got shape \(5, 3, 1\), expected \(5, 3\), that of rewards"):
        vtrace(**arguments)


def test_vtrace_stays_on_its_device_in_one_call(monkeypatch):
    """As for the connector: tensors of the device "meta" have no data."""
    calls = []

    def estimated(rewards, values, **kwargs):
        calls.append(kwargs["time_dim"])
        assert {x.device.type for x in (rewards, values, *kwargs.values()) if torch.is_tensor(x)} == {"meta"}
        return torch.empty_like(values), torch.empty_like(values)

    monkeypatch.setattr(adapter, "compute_vtrace", estimated)
    arguments = {name: x.to("meta") for name, x in random_vtrace(5, 3, np.random.default_rng(0)).items()}
    assert [tuple(x.shape) for x in vtrace(**arguments)] == [(5, 3)] * 2
    assert calls == [0]


def test_nobody_elses_vtrace_changes():
    build_learner(enable_triton(small_impala(IMPALAConfig)))
    assert impala_torch_learner.vtrace_torch is vtrace_torch


def test_a_loss_of_ones_own_may_call_ours():
    class Mine(TritonIMPALATorchLearner):
        def compute_loss_for_module(self, **kwargs):
            return 2 * super().compute_loss_for_module(**kwargs)

    stock = build_learner(small_impala(IMPALAConfig))
    mine = build_learner(enable_triton(small_impala(IMPALAConfig).learners(learner_class=Mine)))
    batch = random_batch(50, np.random.default_rng(0))
    (want, _), (got, _) = loss_and_gradients(stock, batch), loss_and_gradients(mine, batch)
    torch.testing.assert_close(got, 2 * want, **TOLERANCE)


def test_a_loss_of_ones_own_that_does_not_call_ours_is_an_error():
    class Mine(TritonIMPALATorchLearner):
        def compute_loss_for_module(self, **kwargs):
            return vtrace_torch(**kwargs)[0].sum()

    class Further(Mine):
        pass

    for learner_class in (Mine, Further):
        config = enable_triton(small_impala(IMPALAConfig).learners(learner_class=learner_class))
        with pytest.raises(RuntimeError, match=r"Mine.compute_loss_for_module: .*super\(\).*self.compute_vtrace"):
            build_learner(config)
        build_learner(config.learners(learner_config_dict=OFF))


def test_a_loss_that_is_wrapped_is_known_by_what_it_wraps():
    """As Ray wraps the methods of remote learners."""

    class Mine(TritonIMPALATorchLearner):
        @wraps(TritonIMPALATorchLearner.compute_loss_for_module)
        def compute_loss_for_module(self, **kwargs):
            return self._triton_loss(**kwargs)

    build_learner(enable_triton(small_impala(IMPALAConfig).learners(learner_class=Mine)))


def test_a_loss_of_ones_own_may_call_our_vtrace(monkeypatch):
    class Mine(TritonIMPALATorchLearner):
        def compute_loss_for_module(self, **kwargs):
            return self.compute_vtrace(**random_vtrace(5, 3, np.random.default_rng(0)))

    backends = []
    monkeypatch.setattr(adapter, "vtrace", lambda **kwargs: backends.append(kwargs["backend"]) or vtrace(**kwargs))
    want = vtrace_torch(**random_vtrace(5, 3, np.random.default_rng(0)))
    for flags, calls in ((OFF, []), ({"rl_triton": True}, ["reference"])):
        config = small_impala(IMPALAConfig).learners(learner_class=Mine, learner_config_dict=flags)
        learner = build_learner(enable_triton(config, backend="reference"))
        backends.clear()
        assert_same_vtrace(learner.compute_loss_for_module(), want)
        assert backends == calls


def flags_of_vtrace(learner):
    """What our V-Trace is told, if the learner's loss calls it."""
    assert learner._triton_loss.__func__.__globals__["vtrace_torch"] == learner.compute_vtrace
    return {"backend": learner._flags.backend}


ONCE = {"circular_buffer_num_batches": 1, "circular_buffer_iterations_per_batch": 1}
"""Otherwise APPO draws from its last batches, and its draws have no seed."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_impala(IMPALAConfig),
        lambda: small_impala(IMPALAConfig, model=LSTM),
        lambda: two_policies(small_impala(IMPALAConfig, env=MultiAgentCartPole, env_config={"num_agents": 2})),
        lambda: small_impala(APPOConfig, **ONCE),
        lambda: small_impala(APPOConfig, model=LSTM, **ONCE),
    ],
    ids=["IMPALA", "IMPALA-lstm", "IMPALA-two-policies", "APPO", "APPO-lstm"],
)
def test_vtrace_training_is_that_of_rllib(make, small_ray):
    stock, ours = train_algorithm(make()), train_algorithm(enable_triton(make()), flags_of_vtrace)
    assert ours[2] == [{"backend": None}] and read_metric(ours[0]) == {1.0}
    impala = ("total_loss", "mean_pi_loss", "mean_vf_loss", "entropy")
    assert_same_training(stock, ours, names=LOSSES if isinstance(make(), APPOConfig) else impala)


@pytest.mark.parametrize(("config_class", "num_learners"), [(IMPALAConfig, 1), (IMPALAConfig, 2), (APPOConfig, 1)])
def test_vtrace_training_runs(config_class, num_learners, small_ray):
    """Where RLlib's own runs differ from each other."""
    config = enable_triton(small_impala(config_class, num_learners=num_learners), backend="cpu")
    with stopping(config.build_algo()) as algorithm:
        assert of_learners(algorithm, flags_of_vtrace) == [{"backend": "cpu"}] * max(1, num_learners)
        before = algorithm.learner_group.get_weights()["default_policy"]
        for _ in range(2):
            algorithm.train()
        after = algorithm.learner_group.get_weights()["default_policy"]
        assert all(np.isfinite(weight).all() for weight in after.values())
        assert any((weight != before[name]).any() for name, weight in after.items())


# --- Compilation ------------------------------------------------------------------------------------------------------

BUILD = """
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from rl_triton_adapters.rllib import enable_triton
from small import small

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
config = small({config}(), train_batch_size_per_learner=240).env_runners(rollout_fragment_length=20)
algorithm = enable_triton(config).build_algo()
"""
TRAIN = """
for _ in range(2):
    algorithm.train()
algorithm.stop()
"""


@pytest.mark.parametrize("config", ["PPOConfig", "IMPALAConfig", "APPOConfig"])
def test_everything_is_compiled_when_the_learner_is_built(config, private, tmp_path):
    built, trained = count_compilations(BUILD.format(config=config), TRAIN, tmp_path, **private)
    assert built > 0
    assert trained == 0


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def flags_of_piece(learner):
    piece = the_piece(learner)
    return {"masked_statistics": piece.masked_statistics, "backend": piece.backend}


CHECKPOINTED = {
    "PPO": (small_ppo, flags_of_piece, {"masked_statistics": True, "backend": "reference"}),
    "IMPALA": (partial(small_impala, IMPALAConfig), flags_of_vtrace, {"backend": "reference"}),
    "APPO": (partial(small_impala, APPOConfig), flags_of_vtrace, {"backend": "reference"}),
}


@pytest.mark.parametrize(("name", "num_learners"), [("PPO", 0), ("PPO", 1), ("IMPALA", 0), ("IMPALA", 1), ("APPO", 0)])
def test_a_restored_checkpoint_keeps_what_was_replaced(name, num_learners, small_ray, tmp_path):
    """Remote learners die first: others start in their place."""
    make, ask, flags = CHECKPOINTED[name]
    with stopping(enable_triton(make(num_learners=num_learners), **flags).build_algo()) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        weights = algorithm.learner_group.get_weights()["default_policy"]
        for learner in algorithm.learner_group._workers or ():
            ray.kill(learner)
    with stopping(Algorithm.from_checkpoint(path)) as restored:
        assert of_learners(restored, ask) == [flags]
        if name == "PPO":  # the others may have learned on after saving
            got = restored.learner_group.get_weights()["default_policy"]
            assert all((weight == got[key]).all() for key, weight in weights.items())
        restored.train()


@pytest.mark.parametrize("ours_first", [False, True], ids=["into-ours", "into-stock"])
def test_a_checkpoint_goes_from_one_to_the_other(ours_first, small_ray, tmp_path):
    """By both ways that RLlib has of loading one into another config."""

    def state(algorithm):
        return [algorithm.learner_group._learner.get_state()[name] for name in ("rl_module", "optimizer")]

    def configs():
        pair = (enable_triton(small_ppo()), small_ppo())
        return pair if ours_first else pair[::-1]

    with stopping(configs()[0].build_algo()) as first:
        first.train()
        path = first.save_to_path(str(tmp_path / "checkpoint"))
        with (
            stopping(PPO.from_checkpoint(path, config=configs()[1])) as loaded,
            stopping(configs()[1].build_algo()) as other,
        ):
            other.restore_from_path(path)
            for algorithm in (loaded, other):
                piece = GeneralAdvantageEstimation if ours_first else TritonGeneralAdvantageEstimation
                assert type(the_piece(algorithm.learner_group._learner)) is piece
                np.testing.assert_equal(state(algorithm), state(first))
                assert algorithm.train()["training_iteration"] == 2


WITHOUT_THE_PACKAGE = """
import sys

sys.modules["rl_triton_adapters"] = sys.modules["rl_triton_core"] = None
sys.path.insert(0, sys.argv[2])

import numpy as np
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core.rl_module.rl_module import RLModule
from small import small_ppo

path = sys.argv[1]
module = RLModule.from_checkpoint(path + "/learner_group/learner/rl_module/default_policy")
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
algorithm = PPO.from_checkpoint(path, config=small_ppo())
learner = algorithm.learner_group._learner
np.testing.assert_equal(learner.module["default_policy"].get_state(), module.get_state())
assert algorithm.train()["training_iteration"] == 2
try:
    Algorithm.from_checkpoint(path)
except AttributeError as error:
    print(error)
"""


def test_a_checkpoint_of_ours_without_the_package(private, small_ray, tmp_path):
    """As docs/rllib.md says: RLlib's own error, and none with a config."""
    with stopping(enable_triton(small_ppo()).build_algo()) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, path, str(Path(__file__).parent)],
        env={**os.environ, **private},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "'NoneType' object has no attribute 'to_dict'" in result.stdout
    assert "Could not restore original class from checkpoint" in result.stdout + result.stderr


# --- MARWIL, by hand --------------------------------------------------------------------------------------------------


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


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.55.1", "2.9.0", "1.13.0"])
def test_an_old_ray_is_an_error(version, monkeypatch):
    monkeypatch.setattr(ray, "__version__", version)
    with pytest.raises(RuntimeError, match=f"needs Ray 2.56 or newer, got {version}: pip install"):
        enable_triton(small_ppo())


@pytest.mark.parametrize("version", ["2.56.0", "2.60.0", "3.0.0.dev0"])
def test_a_new_ray_is_judged_by_what_it_does(version, monkeypatch):
    monkeypatch.setattr(ray, "__version__", version)
    check_ray()


@pytest.mark.parametrize(("name", "what"), [("compute_value_targets", "value targets"), ("vtrace_torch", "V-Trace")])
def test_other_numbers_are_an_error(name, what, monkeypatch):
    stock = getattr(adapter, name)

    def changed(*args, **kwargs):
        result = stock(*args, **kwargs)
        return result + 1 if name == "compute_value_targets" else tuple(x + 1 for x in result)

    monkeypatch.setattr(adapter, name, changed)
    for call in (check_ray, lambda: enable_triton(small_ppo())):
        with pytest.raises(RuntimeError, match=f"Ray {ray.__version__} has other {what} than"):
            call()


def test_other_flags_are_an_error(monkeypatch):
    class Later(adapter.AddOneTsToEpisodesAndTruncate):
        def __call__(self, **kwargs):
            batch = super().__call__(**kwargs)
            for name in ("terminateds", "truncateds"):
                for flags in batch[name].values():
                    flags.insert(0, flags.pop())
            return batch

    monkeypatch.setattr(adapter, "AddOneTsToEpisodesAndTruncate", Later)
    with pytest.raises(RuntimeError, match="has other flags than"):
        check_ray()


def test_a_loss_without_vtrace_is_an_error(monkeypatch):
    monkeypatch.setattr(IMPALATorchLearner, "compute_loss_for_module", lambda self, **kwargs: 0.0)
    with pytest.raises(RuntimeError, match="got none in Ray .*, expected a call of vtrace_torch"):
        build_learner(enable_triton(small_impala(IMPALAConfig)))


def with_learner(config, stock):
    """With a learner that does not derive from ours."""
    return config.learners(learner_class=type("Mine", (stock,), {}))


OLD_STACK = {"enable_rl_module_and_learner": False, "enable_env_runner_and_connector_v2": False}
NO_CONFIG = "expected a PPOConfig, IMPALAConfig or APPOConfig"
NOT_OURS = "learner_class: got Mine, expected it to derive from"
REFUSED = [
    *((config, TypeError, NO_CONFIG) for config in (None, {}, PPOConfig)),
    *((config, TypeError, f"which has nothing to replace, {NO_CONFIG}") for config in (DQNConfig(), BCConfig())),
    (MARWILConfig(), TypeError, "got MARWILConfig, .* leave the call out, or .* in a prelearner_class"),
    (with_learner(PPOConfig(), PPOTorchLearner), TypeError, f"{NOT_OURS} TritonPPOTorchLearner"),
    (with_learner(IMPALAConfig(), IMPALATorchLearner), TypeError, f"{NOT_OURS} TritonIMPALATorchLearner"),
    (with_learner(APPOConfig(), APPOTorchLearner), TypeError, f"{NOT_OURS} TritonAPPOTorchLearner"),
    (PPOConfig().api_stack(**OLD_STACK), ValueError, "expected the new API stack"),
]


@pytest.mark.parametrize(("config", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_is_no_config_to_enable_is_an_error(config, error, message):
    with pytest.raises(error, match=message):
        enable_triton(config)


def test_masked_statistics_are_of_ppo():
    with pytest.raises(ValueError, match="masked_statistics: got True for IMPALAConfig, expected it for PPO alone"):
        enable_triton(IMPALAConfig(), masked_statistics=True)


def test_without_rllib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rl_triton_adapters.rllib")
    with pytest.raises(ImportError, match=r"pip install rl-triton-core\[rllib\]"):
        __import__("rl_triton_adapters.rllib")
