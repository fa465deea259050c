"""Episodes of our env runner against those of RLlib's, to the last bit."""

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("ray.rllib")

from functools import partial

import torch
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.connectors.module_to_env import GetActions, normalize_and_clip_actions
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.util.metrics import Counter
from small import OFF, small_impala, small_ppo, stopping
from updates import flatten_metrics

from rl_triton_adapters.rllib import enable_triton, env_runner
from rl_triton_adapters.rllib.env_runner import TritonSingleAgentEnvRunner as Ours

OURS = "connectors are those of rl_triton_adapters"


class Doubles(gym.wrappers.DtypeObservation):
    """Observations of float64, and actions whose bounds are neither -1 nor 1."""

    def __init__(self, config=None):
        super().__init__(gym.make("Pendulum-v1"), np.float64)


def make_config(env="CartPole-v1", num_envs=2, **options):
    config = PPOConfig().environment(env, **options.pop("environment", {})).debugging(seed=1)
    return config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs, **options)


def make_runners(make=make_config, **options):
    """RLlib's and ours, with the same weights."""
    runners = [kind(config=make(**options)) for kind in (SingleAgentEnvRunner, Ours)]
    runners[1].module.load_state_dict(runners[0].module.state_dict())
    return runners


def sample(runner, change=lambda runner: None, **options):
    """Episodes of two samples, and random numbers after them."""
    torch.manual_seed(3)
    episodes = runner.sample(**options)
    change(runner)
    return [*episodes, *runner.sample(**options)], torch.rand(2)


def assert_same(runners, change=lambda runner: None, **options):
    (expected, numbers), (got, drawn) = (sample(x, change, **options) for x in runners)
    modes = [[y.training for y in x.module.modules()] for x in runners]
    assert torch.equal(numbers, drawn) and len(got) == len(expected) > 1 and modes[0] == modes[1]
    for x, y in zip(got, expected, strict=True):
        assert x.is_terminated == y.is_terminated and x.get_return() == y.get_return()
        parts = [(z.get_observations(), z.get_actions(), *map(z.get_extra_model_outputs, NAMES)) for z in (x, y)]
        for a, b in zip(*parts, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)


NAMES = "action_dist_inputs", "action_logp", "weights_seq_no"
CASES = {
    "defaults": {},
    "one environment": {"num_envs": 1},
    "a Gaussian": {"env": "Pendulum-v1"},
    "clipped actions": {"env": "Pendulum-v1", "environment": {"normalize_actions": False, "clip_actions": True}},
    "actions as they are": {"env": Doubles, "environment": {"normalize_actions": False, "clip_actions": False}},
    "float64": {"env": Doubles, "num_envs": 3},
    "processes": {"gym_env_vectorize_mode": "async"},
}


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_episodes_are_those_of_rllib(name, explore):
    runners = make_runners(**CASES[name])
    assert_same(runners, num_timesteps=60, explore=explore)
    assert runners[1].describe() == OURS and not runners[1]._untried
    assert_same(runners, num_episodes=3, explore=explore)
    metrics = [flatten_metrics(x.get_metrics()) for x in runners]
    assert metrics[0].keys() == metrics[1].keys()
    lengths = [x for x in metrics[0] if "sum_episodes_length" in str(x)]
    assert len(lengths) == 2 and all(metrics[0][x] == metrics[1][x] for x in lengths)


Filtered = type("Filtered", (GetActions,), {})  # a user's connector


CHANGES = {
    "not RLlib's default connectors": lambda x: x.env_runners(env_to_module_connector=lambda *_: MeanStdFilter()),
    "modules, or one with states": lambda x: x.rl_module(model_config={"use_lstm": True, "max_seq_len": 5}),
    "switched off": lambda x: x.learners(learner_config_dict=OFF),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_ours_do_not_do_is_rllib_s(reason):
    runners = make_runners(lambda: CHANGES[reason](make_config()))
    assert_same(runners, num_timesteps=40)
    assert reason in runners[1].describe()


def double_actions(runner, monkeypatch):
    stock = normalize_and_clip_actions.unsquash_action
    monkeypatch.setattr(normalize_and_clip_actions, "unsquash_action", lambda *args: 2 * stock(*args))


def own_method(runner, monkeypatch):
    piece = runner._module_to_env.connectors[0]
    stock = piece._get_actions
    piece._get_actions = lambda batch, *rest: (batch["action_dist_inputs"].mul_(2), stock(batch, *rest))


def list_more(batch):
    return [x + 1 for x in env_runner.unbatch(batch)]


REPLACED = {
    "double_actions": double_actions,
    "own_method": own_method,
    "other_class": lambda x, _: setattr(x._module_to_env.connectors[0], "__class__", Filtered),
    "rows": lambda _, patches: patches.setattr(env_runner.single_agent_env_runner, "unbatch", list_more),
    "counter": lambda _, patches: patches.setattr(SingleAgentEnvRunner, "_log_env_steps", lambda *_, **__: None),
    "metrics": lambda x, _: setattr(x.metrics, "__class__", type("Logs", (env_runner.MetricsLogger,), {})),
    "averages": lambda _, patches: patches.setattr(env_runner.EmaStats, "push", lambda *_: None),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_between_samples_runs(name, monkeypatch):
    """And RLlib's connectors make all steps, with the reason."""
    runners, change = make_runners(env="Pendulum-v1"), REPLACED[name]
    results = []
    for runner in runners:
        with monkeypatch.context() as patches:
            results.append(sample(runner, lambda x, patches=patches: change(x, patches), num_timesteps=40))
    for x, y in zip(*(episodes for episodes, _ in results), strict=True):
        np.testing.assert_array_equal(x.get_rewards(), y.get_rewards())
    assert "RLlib's own: " in runners[1].describe() and runners[1].describe() != OURS


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("name", ["observe", "choose_actions"])
def test_ours_are_not_used_where_they_differ(name, fails, monkeypatch):
    """As the first step of each sample shows, from which RLlib's results are taken."""
    runners = make_runners()
    stock = getattr(runners[1], name)

    def changed(taken):
        assert not fails
        return {column: torch.as_tensor(np.asarray(x)) + 1 for column, x in stock(taken).items()}

    changed.__name__ = name
    monkeypatch.setattr(runners[1], name, changed)
    assert_same(runners, num_timesteps=40)
    assert f"something else than {name}" in runners[1].describe()


@pytest.mark.parametrize("checks", [True, False])
def test_nan_is_refused_as_by_rllib(checks, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", checks)

    def spoil(env_runner, **kwargs):
        for x in env_runner.module.parameters():
            torch.nn.init.constant_(x, torch.nan)

    errors = []
    for runner in make_runners(lambda: make_config().callbacks(on_episode_end=spoil)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            runner.sample(num_timesteps=200)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


class Extra(DefaultPPOTorchRLModule):
    """Values are kept, too."""

    def _forward_exploration(self, batch, **kwargs):
        return {**super()._forward_exploration(batch, **kwargs), "vf_preds": batch["obs"].sum(1)}


class Deciding(TorchRLModule):
    """It has no distribution."""

    def _forward(self, batch, **kwargs):
        return {"actions": (batch["obs"][:, 0] > 0).long()}


@pytest.mark.parametrize("kind", [Extra, Deciding])
def test_modules_of_users(kind):
    runners = make_runners(lambda: make_config().rl_module(rl_module_spec=RLModuleSpec(module_class=kind)))
    actions = []
    for runner in runners:
        episodes, numbers = sample(runner, num_timesteps=40)
        outputs = [x.get_extra_model_outputs("vf_preds").tolist() for x in episodes if kind is not Deciding]
        actions.append(([x.get_actions().tolist() for x in episodes], outputs, numbers.tolist()))
    assert actions[0] == actions[1]


CALLBACKS = {
    "add_connector": lambda pipeline, module: pipeline.prepend(Filtered()),
    "add_to_list": lambda pipeline, module: vars(pipeline).update(connectors=[Filtered(), *pipeline.connectors]),
    "add_hook": lambda pipeline, module: module.pi.register_forward_hook(lambda *args: args[-1] / 2),
    "replace_part": lambda pipeline, module: module.encoder.actor_encoder.net.mlp.insert(0, torch.nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_what_a_callback_changes_counts_at_the_next_step(name):
    def change(env_runner, **kwargs):
        CALLBACKS[name](env_runner._module_to_env, env_runner.module)

    runners, reasons = make_runners(lambda: make_config().callbacks(on_episode_end=change)), []
    assert_same(runners, lambda x: reasons.append(getattr(x, "reason", "")), num_timesteps=80)
    assert "changed while a sample was made" in reasons[1]


def note_step(episode, env_runner, metrics_logger, **kwargs):
    """A callback that resets metrics now and then."""
    vars(env_runner).setdefault("seen", []).append(len(episode))
    if len(episode) == 9:
        metrics_logger.reset()


OWN = type("Own", (RLlibCallback,), {"on_episode_step": lambda _, **given: note_step(**given)})
CALLED = {"function": {"on_episode_step": note_step}, "class": {"callbacks_class": OWN}}


@pytest.mark.parametrize("kind", CALLED)
def test_callbacks_and_ray_are_told_of_every_step(kind, monkeypatch):
    """Ray's counters at the end of a sample."""
    told, found = [], []
    monkeypatch.setattr(Counter, "inc", lambda self, value: told.append((self.info["name"], value)))
    for runner in make_runners(lambda: make_config().callbacks(**CALLED[kind])):
        told.clear()
        sample(runner, num_timesteps=60)
        counted = {name: sum(x for other, x in told if other == name) for name, _ in told}
        lengths = {x: y for x, y in flatten_metrics(runner.get_metrics()).items() if "length_" in str(x)}
        found.append((counted, lengths, runner.seen))
    assert found[0] == found[1] and len(told) == 4 and len(lengths) > 1


@pytest.mark.parametrize("num_envs", [5, 8])
def test_threads_of_rllib_change_no_bit(num_envs):
    """Products of five rows have other last bits with two threads than with one."""
    torch.set_num_threads(2)
    assert_same(make_runners(num_envs=num_envs), num_timesteps=200)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_one_thread_computes_small_layers(num_envs, monkeypatch):
    """In a process that keeps its own number, also where a layer fails; two rows are too many for 2**22 weights."""

    def spoil(env_runner, **kwargs):
        env_runner.module.pi.net.mlp[0].weight.data = torch.ones(1, 1)

    config, chosen = make_config(num_envs=num_envs).callbacks(on_episode_end=spoil), []
    runner = Ours(config=config.rl_module(model_config={"fcnet_hiddens": [2048, 2048]}))
    (set_number := torch.set_num_threads)(2)
    monkeypatch.setattr(torch, "set_num_threads", lambda x: (chosen.append(x), set_number(x)))
    with pytest.raises(RuntimeError, match="shapes"):
        runner.sample(num_timesteps=200)
    assert [*dict.fromkeys(chosen)] == ([1, 2] if num_envs == 1 else [2]) and torch.get_num_threads() == 2
    assert not runner.reason and not runner._untried


def test_an_interrupted_sample_leaves_the_pipelines_as_they_were():
    def interrupt(**kwargs):
        raise KeyboardInterrupt

    runner = make_runners(lambda: make_config().callbacks(on_episode_end=interrupt))[1]
    kinds = type(runner._env_to_module), type(runner._module_to_env)
    with pytest.raises(KeyboardInterrupt):
        runner.sample(num_timesteps=200)
    assert (type(runner._env_to_module), type(runner._module_to_env)) == kinds
    left = {**vars(runner._env_to_module), **vars(runner._module_to_env), **vars(runner.module)}
    assert {"own_call", "forward_exploration"}.isdisjoint(left)


@pytest.mark.parametrize("make", [small_ppo, partial(small_impala, IMPALAConfig)])
def test_the_call_turns_it_on(make):
    """For one agent, unless there is another env runner."""
    config = enable_triton(make())
    assert config.to_dict()["env_runner_cls"] is config.get_state()["env_runner_cls"] is Ours
    config.multi_agent(policies={"a"}, policy_mapping_fn=lambda *_, **__: "a").environment(MultiAgentCartPole)
    assert config.to_dict()["env_runner_cls"] is None


def test_evaluation_and_training_begin_with_rllib_s_episodes(small_ray):
    results, kinds = [], []
    for config in (small_ppo(), enable_triton(small_ppo())):
        config.evaluation(evaluation_duration=3, evaluation_config={"explore": False})
        with stopping(config.build_algo()) as algorithm:
            kinds.append(type(algorithm.env_runner))
            results.append([algorithm.evaluate()["env_runners"], algorithm.train()["env_runners"]])
    assert kinds == [SingleAgentEnvRunner, Ours]
    for stock, ours in zip(*results, strict=True):
        assert stock.keys() == ours.keys() and stock["episode_return_mean"] == ours["episode_return_mean"]


def test_env_runners_in_processes_of_their_own(small_ray):
    config = enable_triton(small_impala(IMPALAConfig)).env_runners(num_env_runners=2)
    with stopping(config.build_algo()) as algorithm:
        algorithm.train()
        told = algorithm.env_runner_group.foreach_env_runner(lambda x: x.describe(), local_env_runner=False)
    assert told == [OURS, OURS]
