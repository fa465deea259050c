"""The environments of examples/ppo_gpu_envs.py step as Gymnasium's own do, and the example learns."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gpu_checks import forbid_waiting
from recorded_graphs import allow_captures
from torch.distributions import Categorical, Independent, Normal

pytest.importorskip("tensorboard")

import ppo_gpu_envs as example

ROWS = 50
CARTPOLE_BOUNDS = (2.5, 3.0, 0.22, 3.0)  # some of the states are terminal
PENDULUM_BOUNDS = (7.0, 8.0)


def double(name):
    return example.ENVIRONMENTS[name](ROWS, dtype=torch.float64)


def theirs(env, states, actions):
    """What Gymnasium's environment does from each of the states."""
    steps = []
    for state, action in zip(states, actions, strict=True):
        env.reset()
        env.unwrapped.state = state
        obs, reward, terminated, _, _ = env.unwrapped.step(action)
        steps.append((obs, reward, terminated, np.array(env.unwrapped.state)))
    return [np.array(column) for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(("name", "bounds"), [("cartpole", CARTPOLE_BOUNDS), ("pendulum", PENDULUM_BOUNDS)])
def test_transitions_are_those_of_gymnasium(name, bounds):
    rng = np.random.default_rng(0)
    states = rng.uniform(-1, 1, (ROWS, len(bounds))) * bounds
    actions = rng.integers(0, 2, ROWS) if name == "cartpole" else rng.uniform(-3, 3, (ROWS, 1))
    env = gym.make({"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}[name])
    obs, reward, terminated, after = theirs(env, states, actions)

    envs = double(name)
    state, got_reward, got_terminated = envs.compute_transition(torch.as_tensor(states), torch.as_tensor(actions))
    np.testing.assert_allclose(state.numpy(), after, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got_reward.numpy(), reward, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(got_terminated.numpy(), terminated)
    np.testing.assert_allclose(envs.observe_state(state).numpy(), obs, rtol=1e-6, atol=1e-6)
    assert terminated.any() == (name == "cartpole")


@pytest.mark.parametrize(("name", "bounds"), [("cartpole", (0.05,) * 4), ("pendulum", (np.pi, 1.0))])
def test_episodes_start_as_those_of_gymnasium(name, bounds):
    env = gym.make({"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}[name])
    envs = example.ENVIRONMENTS[name](4000)
    assert (envs.state.abs().amax(0) <= torch.tensor(bounds) * (1 + 1e-6)).all()
    assert (envs.state.abs().amax(0) > 0.99 * torch.tensor(bounds)).all()
    assert env.spec.max_episode_steps == envs.time_limit
    assert env.observation_space.shape == (envs.observations,)


def test_an_episode_that_ends_starts_anew_in_the_same_step():
    """The last one at the time limit, which is a termination."""
    envs = example.ENVIRONMENTS["cartpole"](4)
    envs.state[::3] = torch.tensor([2.39, 5.0, 0.0, 0.0])  # about to leave the track
    envs.elapsed[1::2] = envs.time_limit - 1
    obs, reward, terminated, truncated, final = envs.step(torch.ones(4, dtype=torch.long))
    assert (terminated.tolist(), truncated.tolist()) == ([True, False, False, True], [False, True, False, False])
    assert reward.tolist() == [1.0] * 4 and envs.elapsed.tolist() == [0, 0, 1, 0]
    assert final[0, 0] > 2.4 and (obs[:2].abs() <= 0.05).all() and torch.equal(obs[2], final[2])


@pytest.mark.parametrize("env", list(example.ENVIRONMENTS))
def test_both_arms_train_the_same_agent(env, tmp_path):
    agents = []
    for advantages in example.ADVANTAGES:
        options = ["--advantages", advantages, "--env", env, "--quiet", "--log-dir", str(tmp_path)]
        sizes = ["--total-timesteps", "2048", "--num-envs", "16", "--num-steps", "32", "--update-epochs", "2"]
        agents.append(example.train_agent(example.parse_arguments(options + sizes)))
    torch.testing.assert_close(*map(list, (agent.parameters() for agent in agents)), rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("update", ["compiled", "captured"])
@pytest.mark.parametrize("env", list(example.ENVIRONMENTS))
def test_other_updates_equal_eager_ones(env, update, device, monkeypatch):
    """Rollouts too: random numbers are drawn in the same order."""
    allow_captures(monkeypatch, device)
    trainings = []
    device = "cpu" if update == "compiled" else device
    for kind in ("eager", update):
        sizes = ["--num-envs", "8", "--num-steps", "8", "--update-epochs", "2", "--num-minibatches", "3"]
        options = [*sizes, "--env", env, "--update", kind, "--device", device]
        trainings.append(example.Training(example.parse_arguments(options)))
        for i in range(5):
            trainings[-1].run_iteration(1e-3 / (1 + i))
    eager, other = trainings
    if update == "captured":
        assert other.collect.reason == other.update.reason == ""
        assert device != "cpu" or (other.collect.graphs.replays, other.update.graphs.replays) == (5, 5 * 2 * 3)
    atol = 1e-5 if device == "cpu" else 1e-4
    torch.testing.assert_close(other.data["obs"], eager.data["obs"], rtol=1e-4, atol=atol)
    torch.testing.assert_close([*other.agent.parameters()], [*eager.agent.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("env", list(example.ENVIRONMENTS))
def test_nothing_waits_for_the_device(env):
    training = example.Training(example.parse_arguments(["--device", "cuda", "--num-steps", "8", "--env", env]))
    for _ in range(2):
        training.run_iteration(1e-3)  # what is compiled, or written for a kind of call, comes before
    with forbid_waiting():
        training.run_iteration(1e-3)


def test_it_learns(tmp_path):
    options = ["--env", "cartpole", "--total-timesteps", "60000", "--quiet", "--log-dir", str(tmp_path)]
    args = example.parse_arguments(options)
    torch.manual_seed(args.seed)
    untrained = example.Agent(example.ENVIRONMENTS["cartpole"](1), args.hidden)
    before, after = (example.evaluate_agent(agent, args).mean() for agent in (untrained, example.train_agent(args)))
    assert before < 100 < after


POLICIES = {
    "categorical": Categorical(logits=torch.tensor([0.5, 1.5, -2.0])),
    "Gaussian": Independent(Normal(torch.tensor([1.0, -1.0]), torch.tensor([0.2, 2.0])), 1),
}


@pytest.mark.parametrize("name", POLICIES)
def test_actions_have_the_policys_distribution(name):
    torch.manual_seed(0)
    policy = POLICIES[name].expand((40_000,))
    got, want = example.draw_actions(policy), policy.sample()
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.double().mean(0), want.double().mean(0), rtol=0.02, atol=0)
    torch.testing.assert_close(got.double().std(0), want.double().std(0), rtol=0.02, atol=0)
