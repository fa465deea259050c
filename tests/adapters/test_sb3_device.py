"""Minibatches made on the training device: those of Stable-Baselines3, and its agents, bit for bit on the CPU."""

import copy
import weakref

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnvWrapper
from test_sb3 import (
    BOX,
    DICT,
    DISCRETE,
    UPDATES,
    assert_close_agent,
    learn,
    make_cartpole,
    make_dict_cartpole,
    make_normalised_pendulum,
    make_pendulum,
    new_agent,
    same_bits,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rl_triton_adapters.sb3 import TritonDictRolloutBuffer, TritonRolloutBuffer, rollout_buffer_class_for
from rl_triton_adapters.sb3.device import BatchedTerminalValues, DeviceDictRolloutBuffer, DeviceRolloutBuffer

# ---------------------------------------------------------------------------------------------------------------------
# The buffer alone
# ---------------------------------------------------------------------------------------------------------------------


def stack_samples(space: spaces.Space, count: int):
    """Samples of a space as a vectorised environment of Stable-Baselines3 returns them."""
    if isinstance(space, spaces.Dict):
        return {key: stack_samples(part, count) for key, part in space.spaces.items()}
    return np.stack([space.sample() for _ in range(count)])


def fill_buffer(
    buffer_class,
    observation_space,
    action_space=DISCRETE,
    n_steps=6,
    n_envs=3,
    device="cpu",
    extra=None,
    policy_device=None,
):
    """A buffer as `collect_rollouts` leaves it; the same one for every class. `extra` makes more for `add()`."""
    policy_device = policy_device or device
    for seed, space in enumerate((observation_space, action_space)):
        space.seed(seed)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    buffer = buffer_class(n_steps, observation_space, action_space, device, gamma=0.9, gae_lambda=0.8, n_envs=n_envs)
    for _ in range(n_steps):
        actions = stack_samples(action_space, n_envs)
        buffer.add(
            stack_samples(observation_space, n_envs),
            actions.reshape(-1, 1) if isinstance(action_space, spaces.Discrete) else actions,
            rng.standard_normal(n_envs),
            rng.random(n_envs) < 0.3,
            torch.randn(n_envs, 1, generator=generator).to(policy_device),
            torch.randn(n_envs, generator=generator).to(policy_device),
            **(extra(rng) if extra else {}),
        )
    last_values = torch.randn(n_envs, 1, generator=generator).to(policy_device)
    buffer.compute_returns_and_advantage(last_values, rng.random(n_envs) < 0.3)
    return buffer


def draw_minibatches(
    buffer: RolloutBuffer, batch_size: int | None = None, epochs: int = 2, seed: int = 7
) -> list[dict]:
    """All samples of some epochs; fields that are dictionaries taken apart."""
    np.random.seed(seed)  # noqa: NPY002
    batches = [batch._asdict() for _ in range(epochs) for batch in buffer.get(batch_size)]
    for batch in batches:
        if isinstance(batch["observations"], dict):
            batch |= {f"observations.{key}": value for key, value in batch.pop("observations").items()}
    return batches


def assert_same_minibatches(actual: RolloutBuffer, expected: RolloutBuffer, batch_size: int | None = None) -> None:
    for left, right in zip(draw_minibatches(actual, batch_size), draw_minibatches(expected, batch_size), strict=True):
        assert left.keys() == right.keys()
        for name in right:
            assert left[name].device == right[name].device and left[name].is_contiguous(), name
            assert same_bits(left[name].cpu().numpy(), right[name].cpu().numpy()), name


def stock_of(space: spaces.Space) -> type[RolloutBuffer]:
    return DictRolloutBuffer if isinstance(space, spaces.Dict) else RolloutBuffer


def device_of(space: spaces.Space) -> type[RolloutBuffer]:
    return rollout_buffer_class_for(space, device_storage=True)


OBSERVATIONS = [
    BOX,
    spaces.Box(0, 255, (2, 4, 3), np.uint8),
    spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    DISCRETE,
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(4),
    DICT,
]
ACTIONS = [DISCRETE, spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (2, 2), np.float64)]
ACTIONS += [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]


@pytest.mark.parametrize("action_space", ACTIONS, ids=str)
@pytest.mark.parametrize("observation_space", OBSERVATIONS, ids=str)
def test_the_same_minibatches_of_every_space(observation_space, action_space):
    buffers = [fill_buffer(cls(observation_space), observation_space, action_space) for cls in (device_of, stock_of)]
    assert_same_minibatches(*buffers, batch_size=4)


@pytest.mark.parametrize("batch_size", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("n_steps", "n_envs"), [(1, 1), (1, 4), (9, 1), (4, 5)])
def test_the_same_minibatches_of_every_size(n_steps, n_envs, batch_size):
    buffers = [fill_buffer(cls, BOX, n_steps=n_steps, n_envs=n_envs) for cls in (DeviceRolloutBuffer, RolloutBuffer)]
    assert_same_minibatches(*buffers, batch_size)


def test_a_zero_dimensional_log_probability():
    for cls in (RolloutBuffer, DeviceRolloutBuffer):
        buffer = cls(1, BOX, DISCRETE, device="cpu")
        buffer.add(np.zeros((1, 3)), np.zeros((1, 1)), np.zeros(1), np.ones(1), torch.zeros(1, 1), torch.tensor(-2.0))
        assert draw_minibatches(buffer)[0]["old_log_prob"].tolist() == [-2.0]


@pytest.mark.parametrize("space", [BOX, DICT], ids=["plain", "dict"])
def test_a_rollout_is_stored_in_the_arrays_of_stable_baselines3(space):
    ours, stock = fill_buffer(device_of(space), space), fill_buffer(stock_of(space), space)
    for name in ("actions", "rewards", "values", "episode_starts", "log_probs", "advantages", "returns"):
        assert same_bits(getattr(ours, name), getattr(stock, name)), name
    for key in space.spaces if isinstance(space, spaces.Dict) else [...]:
        assert same_bits(ours.observations[key], stock.observations[key])


class CrossDeviceOperations(TorchDispatchMode):
    """Collect the operations between tensors of more than one device, which are copies."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        result = function(*arguments, **(kwargs or {}))
        tensors = [x for x in (*arguments, *(kwargs or {}).values(), result) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1:
            self.functions.append(function)
        return result


@pytest.mark.parametrize(("space", "arrays"), [(BOX, 6), (DICT, 7)], ids=["plain", "dict"])
def test_a_rollout_is_copied_to_the_device_once_and_no_step_of_it(space, arrays):
    """The device is "meta", which has no data: whatever came back from there would be an error."""
    with CrossDeviceOperations() as copies:
        buffer = fill_buffer(device_of(space), space, n_steps=32, device="meta", policy_device="cpu")
        assert copies.functions == []
        batches = draw_minibatches(buffer, batch_size=5, epochs=3)
    assert len(copies.functions) == arrays + 3  # and the order of each epoch
    assert {tensor.device.type for batch in batches for tensor in batch.values()} == {"meta"}


def test_after_get_values_and_returns_are_the_arrays_of_stable_baselines3():
    ours, stock = fill_buffer(DeviceRolloutBuffer, BOX), fill_buffer(RolloutBuffer, BOX)
    for buffer in (ours, stock):
        draw_minibatches(buffer)
    assert same_bits(ours.values, stock.values) and same_bits(ours.returns, stock.returns)


def test_minibatches_are_copies_that_the_next_rollout_leaves_alone():
    buffer = fill_buffer(DeviceRolloutBuffer, BOX)
    batch = next(buffer.get())
    before = batch.observations.clone()
    buffer.observations.fill(9.0)
    buffer.reset()
    assert torch.equal(batch.observations, before)


def test_the_next_rollout_finds_the_memory_of_the_last_one_free():
    buffer = fill_buffer(DeviceRolloutBuffer, BOX)
    draw_minibatches(buffer)
    storage = weakref.ref(buffer._rollout[0])
    buffer.reset()
    assert storage() is None


def test_a_copied_buffer_is_independent():
    buffer = fill_buffer(DeviceRolloutBuffer, BOX)
    twin = copy.deepcopy(buffer)
    buffer.log_probs.fill(7.0)
    assert_same_minibatches(twin, fill_buffer(RolloutBuffer, BOX))


def test_an_incomplete_rollout_is_refused():
    buffer = DeviceRolloutBuffer(4, BOX, DISCRETE, device="cpu")
    with pytest.raises(RuntimeError, match="not complete: 0 of 4 steps"):
        next(buffer.get())


def test_advantages_after_get_are_refused():
    buffer = fill_buffer(DeviceRolloutBuffer, BOX)
    draw_minibatches(buffer)
    with pytest.raises(ValueError, match=r"values: got shape \(18, 1\), expected \(6, 3\): .*before get\(\)"):
        buffer.compute_returns_and_advantage(torch.zeros(3, 1), np.zeros(3, bool))


# ---------------------------------------------------------------------------------------------------------------------
# Terminal values
# ---------------------------------------------------------------------------------------------------------------------


class CountCalls(BaseCallback):
    """Count the calls of `predict_values`, and the steps at which some environment was truncated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.calls = self.steps = self.truncated = 0
        predict_values = ActorCriticPolicy.predict_values

        def counted(*args):
            self.calls += 1
            return predict_values(*args)

        monkeypatch.setattr(ActorCriticPolicy, "predict_values", counted)

    def _on_step(self) -> bool:
        truncated = sum(info["TimeLimit.truncated"] for info in self.locals["infos"])
        self.truncated += truncated
        self.steps += truncated > 0
        return True


@pytest.mark.parametrize(
    ("algorithm", "make_env"),
    [(A2C, make_cartpole), (PPO, make_dict_cartpole), (PPO, make_normalised_pendulum)],
)
@pytest.mark.parametrize("device_storage", [False, True])
@pytest.mark.covering
def test_one_call_for_all_environments_and_the_same_agent(algorithm, make_env, device_storage, monkeypatch):
    def trained(*callbacks: BaseCallback, **kwargs) -> tuple[BaseAlgorithm, CountCalls]:
        agent = new_agent(algorithm, make_env(), **kwargs)
        with monkeypatch.context() as patches:
            count = CountCalls(patches)
            learn(agent, *callbacks, count)
        return agent, count

    stock, theirs = trained()
    buffer_class = rollout_buffer_class_for(stock.observation_space, device_storage=device_storage)
    agent, count = trained(BatchedTerminalValues(), rollout_buffer_class=buffer_class)
    assert (count.steps, count.truncated) == (theirs.steps, theirs.truncated)
    rollouts = UPDATES[algorithm]
    assert theirs.calls == theirs.truncated + rollouts  # one more at the end of each
    assert count.calls == count.steps + rollouts < theirs.calls
    assert_close_agent(agent, stock)


class Forgetful(VecEnvWrapper):
    """An environment that gives the first copy's terminal observations to nobody."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        infos[0].pop("terminal_observation", None)
        return observations, rewards, dones, infos


@pytest.mark.parametrize("wrap", [lambda env: env, Forgetful], ids=["all", "all but one"])
def test_terminal_values_reach_the_rewards(wrap):
    rewards = []
    for callback in (None, BatchedTerminalValues()):
        agent = new_agent(PPO, wrap(make_pendulum()), rollout_buffer_class=DeviceRolloutBuffer)
        agent.learn(1, callback=callback)
        rewards.append(agent.rollout_buffer.rewards)
    torch.testing.assert_close(rewards[1], rewards[0], rtol=1e-6, atol=1e-6)


def test_terminal_values_of_an_off_policy_algorithm_are_refused():
    agent = DQN("MlpPolicy", make_cartpole(1), device="cpu", buffer_size=10)
    with pytest.raises(TypeError, match="DQN keeps no rollouts"):
        agent.learn(1, callback=BatchedTerminalValues())


# ---------------------------------------------------------------------------------------------------------------------
# Choosing the class
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize(
    ("space", "device_storage", "expected"),
    [
        (BOX, False, TritonRolloutBuffer),
        (DICT, False, TritonDictRolloutBuffer),
        (DISCRETE, True, DeviceRolloutBuffer),
        (spaces.MultiDiscrete([2, 3]), False, TritonRolloutBuffer),
        (spaces.MultiBinary(4), False, TritonRolloutBuffer),
        (DICT, True, DeviceDictRolloutBuffer),
    ],
)
def test_the_chooser_says_what_it_chose(algorithm, space, device_storage, expected, capsys):
    assert rollout_buffer_class_for(space, algorithm, device_storage=device_storage) is expected
    assert capsys.readouterr().out == f"Using {expected.__name__} for {algorithm.__name__} on {space}\n"
    assert rollout_buffer_class_for(space, algorithm, device_storage=device_storage, verbose=0) is expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("algorithm", [DQN, SAC, "PPO"])
def test_the_chooser_says_which_algorithms_it_serves(algorithm):
    with pytest.raises(TypeError, match=r"(DQN|SAC|PPO) keeps no rollouts, .*use an algorithm class such as PPO, A2C"):
        rollout_buffer_class_for(BOX, algorithm)
