"""Stable-Baselines3 with our rollout buffers: the same numbers, the same agents, the same files, bit for bit.

Environments and algorithms are the real ones. "Bitwise" compares bytes.
"""

import copy
import pickle
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from rl_triton_adapters.sb3 import TritonDictRolloutBuffer, TritonRolloutBuffer, rollout_buffer_class_for
from rl_triton_core import BackendUnavailableError

pytestmark = pytest.mark.covering

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = spaces.Discrete(2)
DICT = spaces.Dict({"cart": BOX, "pole": DISCRETE})


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def random_rollout(n_steps: int, n_envs: int, done_probability: float = 0.1, scale: float = 1.0, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (scale * rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    return {
        "rewards": normal(n_steps, n_envs),
        "values": normal(n_steps, n_envs),
        "episode_starts": (rng.random((n_steps, n_envs)) < done_probability).astype(np.float32),
        "last_values": torch.from_numpy(normal(n_envs, 1)),
        "dones": rng.random(n_envs) < done_probability,
    }


def compute_buffer(buffer_class: Callable[..., RolloutBuffer], rollout: dict, **kwargs) -> RolloutBuffer:
    n_steps, n_envs = rollout["rewards"].shape
    buffer = buffer_class(n_steps, BOX, DISCRETE, device="cpu", n_envs=n_envs, **kwargs)
    for name in ("rewards", "values", "episode_starts"):
        getattr(buffer, name)[:] = rollout[name]
    buffer.compute_returns_and_advantage(last_values=rollout["last_values"], dones=rollout["dones"])
    return buffer


NUMBERS = st.sampled_from([0.0, 1.0, 1]) | st.floats(0.0, 1.0)


@settings(max_examples=60)
@given(
    n_steps=st.integers(1, 70),
    n_envs=st.integers(1, 20),
    gamma=NUMBERS,
    gae_lambda=NUMBERS,
    done_probability=st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bitwise_parity_of_any_rollout(n_steps, n_envs, gamma, gae_lambda, done_probability, scale, seed):
    rollout, numbers = random_rollout(n_steps, n_envs, done_probability, scale, seed), {"gamma": gamma}
    numbers["gae_lambda"] = gae_lambda
    expected, actual = (compute_buffer(x, rollout, **numbers) for x in (RolloutBuffer, TritonRolloutBuffer))
    for name in ("advantages", "returns", "rewards", "values", "episode_starts"):
        assert same_bits(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("gamma", [0.99, np.float64(0.99)])  # of which the second makes SB3 compute in float64
@pytest.mark.parametrize("backend", [None, "reference"])
def test_other_numbers_and_the_reference_backend_agree_up_to_rounding(backend, gamma):
    rollout = random_rollout(40, 7)
    expected = compute_buffer(RolloutBuffer, rollout, gamma=gamma)
    actual = compute_buffer(TritonRolloutBuffer, rollout, gamma=gamma, backend=backend)
    np.testing.assert_allclose(actual.advantages, expected.advantages, rtol=1e-5, atol=1e-5)


def give_starts(buffer):
    buffer.episode_starts = buffer.episode_starts.copy()
    return buffer


@pytest.mark.parametrize("replace", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer)), give_starts])
def test_a_copied_buffer_has_flags_of_its_own(replace):
    rollout = random_rollout(12, 5, done_probability=0.3)
    want = compute_buffer(RolloutBuffer, rollout)
    rollout["last_values"].requires_grad_()  # they may
    buffer = compute_buffer(lambda *args, **kwargs: replace(TritonRolloutBuffer(*args, **kwargs)), rollout)
    assert same_bits(buffer.advantages, want.advantages) and same_bits(buffer.episode_starts, want.episode_starts)


def test_a_backend_that_cannot_run_is_refused_before_a_rollout(monkeypatch):
    options = {"rollout_buffer_class": TritonRolloutBuffer, "rollout_buffer_kwargs": {"backend": "nope"}}
    with pytest.raises(ValueError, match="backend: got 'nope', expected one of triton, cpu, reference"):
        PPO("MlpPolicy", "CartPole-v1", **options)
    backend = "rl_triton_core._internal.backend"
    monkeypatch.setattr(f"{backend}.why_unavailable", lambda name, device: f"no {name} for {device}")
    with pytest.raises(BackendUnavailableError, match="no triton for cpu"):
        TritonRolloutBuffer(4, BOX, DISCRETE, backend="triton")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"last_values": np.zeros(3)}, TypeError, "last_values: got ndarray, expected a torch.Tensor"),
        ({"last_values": torch.zeros(2)}, ValueError, r"last_values: got shape \(2,\), expected one value .*\(3\)"),
        ({"dones": np.zeros((3, 1), bool)}, ValueError, r"dones: got shape \(3, 1\), expected \(3,\)"),
        ({"dones": np.zeros(2, bool)}, ValueError, r"dones: got shape \(2,\), expected \(3,\)"),
        ({"values": np.zeros((96, 1))}, ValueError, r"values: got shape \(96, 1\), expected \(32, 3\): .*get"),
        ({"episode_starts": [0.0]}, TypeError, "TritonRolloutBuffer.episode_starts: got list, expected the array"),
        ({"gae_lambda": 1.5}, ValueError, r"gae_lambda: got 1.5, expected a number in \[0, 1\]"),
        ({"gae_lambda": "1"}, TypeError, "gae_lambda: got str"),
        ({"gamma": float("nan")}, ValueError, "gamma: got nan"),
    ],
)
def test_the_buffer_names_what_is_wrong_and_writes_nothing(change, error, message):
    buffer = compute_buffer(TritonRolloutBuffer, random_rollout(32, 3))
    buffer.advantages[:] = buffer.returns[:] = 7.0
    arguments = {"last_values": torch.zeros(3, 1), "dones": np.zeros(3, bool)}
    arguments |= {name: x for name, x in change.items() if name in arguments}
    vars(buffer).update({name: x for name, x in change.items() if name not in arguments})
    with pytest.raises(error, match=message):
        buffer.compute_returns_and_advantage(**arguments)
    assert (buffer.advantages == 7.0).all() and (buffer.returns == 7.0).all()


class DictCartPole(gym.ObservationWrapper):
    """CartPole with its observation taken apart."""

    def __init__(self, env: gym.Env | None = None):
        super().__init__(env or gym.make("CartPole-v1"))
        half = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({"cart": half, "pole": half})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"cart": observation[:2], "pole": observation[2:]}


def make_cartpole(n_envs: int = 4, **options) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs, seed=3, env_kwargs={"max_episode_steps": 12}, **options)


def make_pendulum(n_envs: int = 3) -> VecEnv:
    return make_vec_env("Pendulum-v1", n_envs, seed=3, env_kwargs={"max_episode_steps": 25})


def make_dict_cartpole() -> VecEnv:
    return make_cartpole(wrapper_class=DictCartPole)


ENVIRONMENTS = {
    "cartpole": make_cartpole,
    "pendulum": make_pendulum,
    "dict cartpole": make_dict_cartpole,
    "normalised pendulum": lambda: VecNormalize(make_pendulum()),
    "normalised dict cartpole": lambda: VecNormalize(make_dict_cartpole()),
}
OF_PPO, OF_TRPO = {"n_steps": 24, "batch_size": 24, "n_epochs": 2}, {"n_steps": 24, "sub_sampling_factor": 2}
SETTINGS = {"A2C": {"n_steps": 7}, "TRPO": OF_TRPO}


class EpisodeEnds(BaseCallback):
    """Count terminations and truncations, so that a test can say which of them it saw."""

    terminated = truncated = 0

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            self.truncated += bool(done and info["TimeLimit.truncated"])
            self.terminated += bool(done and not info["TimeLimit.truncated"])
        return True


def new_agent(algorithm: type[BaseAlgorithm], env: VecEnv, **kwargs) -> BaseAlgorithm:
    policy, networks = "MultiInput" if isinstance(env.observation_space, spaces.Dict) else "Mlp", {"net_arch": [16]}
    if "Recurrent" in algorithm.__name__:
        policy, networks = f"{policy}Lstm", networks | {"lstm_hidden_size": 4}
    kwargs |= SETTINGS.get(algorithm.__name__, OF_PPO)
    return algorithm(f"{policy}Policy", env, seed=5, device="cpu", policy_kwargs=networks, **kwargs)


def learn(agent: BaseAlgorithm, terminates: bool = True, **kwargs) -> BaseAlgorithm:
    """Train for some rollouts, in which episodes end in both ways, or by truncations alone.

    From seed 5: the random state of torch and NumPy is global, so two agents made first would share it.
    """
    ends, before = EpisodeEnds(), tensors_of(agent)["value_net.weight"]
    agent.set_random_seed(5)
    agent.learn(96 * agent.n_envs, callback=ends, **kwargs)
    assert ends.truncated > 0 and (ends.terminated > 0) == terminates
    assert not same_bits(tensors_of(agent)["value_net.weight"], before)
    return agent


def tensors_of(agent: BaseAlgorithm) -> dict[str, np.ndarray]:
    """Copies of all that training changes: parameters, optimiser state, and the running statistics of VecNormalize."""
    tensors = dict(agent.policy.state_dict())
    for index, state in agent.policy.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    tensors = {name: tensor.numpy(force=True).copy() for name, tensor in tensors.items()}
    normalise = agent.get_vec_normalize_env()
    if normalise is not None:
        observations = normalise.obs_rms if isinstance(normalise.obs_rms, dict) else {"obs": normalise.obs_rms}
        tensors |= {f"rms.{name}.mean": rms.mean for name, rms in observations.items()}
        tensors["rms.returns.var"] = np.asarray(normalise.ret_rms.var)
    return tensors


def assert_close_agent(actual: BaseAlgorithm, expected: BaseAlgorithm) -> None:
    torch.testing.assert_close(tensors_of(actual), tensors_of(expected), rtol=1e-5, atol=1e-5)


def assert_same_agent(actual: BaseAlgorithm, expected: BaseAlgorithm) -> None:
    left, right = tensors_of(actual), tensors_of(expected)
    assert left.keys() == right.keys()
    assert [name for name in left if not same_bits(left[name], right[name])] == []


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_trained_agent_is_bitwise_the_same(algorithm, name):
    check_training(algorithm, ENVIRONMENTS[name], "cartpole" in name)


def check_training(algorithm: type[BaseAlgorithm], make_env: Callable[[], VecEnv], terminates: bool = True) -> None:
    env = make_env()
    buffer_class = rollout_buffer_class_for(env.observation_space, algorithm)
    ours = learn(new_agent(algorithm, env, rollout_buffer_class=buffer_class), terminates)
    assert type(ours.rollout_buffer) is buffer_class
    assert_same_agent(ours, learn(new_agent(algorithm, make_env()), terminates))


Doubling = type("Doubling", (RolloutBuffer,), {"add": lambda self, x, *rest: RolloutBuffer.add(self, 2 * x, *rest)})


@pytest.mark.parametrize("space", [BOX, spaces.Discrete(5)])
def test_steps_are_added_as_by_stock_or_by_a_users_method_behind(space):
    found = []
    for bases in ([RolloutBuffer], [TritonRolloutBuffer], [Doubling], [TritonRolloutBuffer, Doubling]):
        buffer = type("Buffer", tuple(bases), {})(1, space, DISCRETE, n_envs=2)
        step = np.full((2, *space.shape), 2), np.ones((2, 1)), *np.ones((2, 2))
        buffer.add(*step, torch.full((2, 1), 3.0), torch.zeros(()))
        names = "observations", "actions", "rewards", "episode_starts", "values", "log_probs", "pos", "full"
        found.append([np.asarray(getattr(buffer, name)).tolist() for name in names])
    assert found[0] == found[1] != found[2] == found[3]


CHOSEN = [(BOX, TritonRolloutBuffer), (DICT, TritonDictRolloutBuffer), (spaces.MultiBinary(4), TritonRolloutBuffer)]


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize(("space", "chosen"), CHOSEN)
def test_the_chooser_says_what_it_chose(algorithm, space, chosen, capsys):
    assert rollout_buffer_class_for(space, algorithm) is chosen
    assert capsys.readouterr().out == f"Using {chosen.__name__} for {algorithm.__name__} on {space}\n"
    assert rollout_buffer_class_for(space, algorithm, verbose=0) is chosen
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("algorithm", [DQN, SAC, "PPO"])
def test_the_chooser_says_which_algorithms_it_serves(algorithm):
    with pytest.raises(TypeError, match=r"(DQN|SAC|PPO) keeps no rollouts, .*use an algorithm class such as PPO, A2C"):
        rollout_buffer_class_for(BOX, algorithm)


@pytest.mark.parametrize(
    "space", [spaces.Tuple([BOX, DISCRETE]), spaces.Dict({"a": DICT}), spaces.Dict({"a": spaces.Text(3)})]
)
def test_the_chooser_names_a_space_that_has_no_buffer(space):
    with pytest.raises(TypeError) as error:
        rollout_buffer_class_for(space)
    assert str(space) in str(error.value)


def test_the_wrong_class_says_which_one_to_use():
    with pytest.raises(TypeError, match="TritonRolloutBuffer cannot store .*Dict.*use TritonDictRolloutBuffer"):
        new_agent(PPO, make_dict_cartpole(), rollout_buffer_class=TritonRolloutBuffer)
    with pytest.raises(AssertionError, match="must be used with Dict"):  # as in Stable-Baselines3
        new_agent(PPO, make_cartpole(), rollout_buffer_class=TritonDictRolloutBuffer)
