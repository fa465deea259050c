"""examples/ppo_cleanrl.py: both of its arms train the same agent, it learns, and time limits are no ends."""

import argparse
import importlib.util
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from recorded_graphs import allow_captures

from rl_triton_core.capture import CapturedStep

pytest.importorskip("tensorboard")
pytest.importorskip("tqdm")

PATH = Path(__file__).parents[2] / "examples" / "ppo_cleanrl.py"
SIZES = {"--num-envs": "4", "--num-steps": "64", "--num-minibatches": "4", "--update-epochs": "4"}
SMALL = ["--quiet", "--seed", "3", *(x for pair in SIZES.items() for x in pair)]
PENDULUM = [*SMALL, "--env-id", "ShortPendulum-v0", "--total-timesteps", "1024", "--gamma", "0.9"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("ppo_cleanrl", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gym.register("ShortPendulum-v0", "gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=20)
    yield module
    del gym.registry["ShortPendulum-v0"]


def trained(example, tmp_path, advantages, arguments):
    args = example.parse_arguments([*arguments, "--advantages", advantages, "--log-dir", str(tmp_path)])
    return *example.train_agent(args), args


def same_parameters(left, right):
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_both_arms_learn_and_end_up_the_same(example, tmp_path):
    arguments = [*SMALL, "--total-timesteps", "6144", "--evaluation-episodes", "5"]
    stock, stock_curve, _ = trained(example, tmp_path, "stock", arguments)
    ours, curve, args = trained(example, tmp_path, "triton", arguments)
    assert same_parameters(ours, stock)
    assert curve == stock_curve
    assert len(curve) == 24 and curve[-1] > 2 * curve[0] > 20
    evaluation = example.evaluate_agent(ours, args)
    assert evaluation.shape == (args.evaluation_episodes,) and evaluation.mean() > 2 * curve[0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "CartPole-v1__ppo_cleanrl__stock__3",
        "CartPole-v1__ppo_cleanrl__triton__3",
    }
    assert all(list(path.glob("events.out.tfevents.*")) for path in tmp_path.iterdir())


def test_time_limits(example, tmp_path, monkeypatch):
    """Environments that are only ever truncated, with continuous actions: again the same, and not CleanRL's own way."""
    seen = []

    def as_terminations(rollout, next_value, next_done, args):
        seen.append(rollout)
        nothing = {"truncations": torch.zeros_like(rollout.truncations)}
        return example.compute_triton_advantages(rollout._replace(**nothing), next_value, next_done, args)

    monkeypatch.setitem(example.ADVANTAGES, "as_terminations", as_terminations)
    stock, _, _ = trained(example, tmp_path, "stock", PENDULUM)
    ours, _, _ = trained(example, tmp_path, "triton", PENDULUM)
    theirs, _, _ = trained(example, tmp_path, "as_terminations", PENDULUM)
    assert same_parameters(ours, stock)
    assert not same_parameters(theirs, stock)
    cut = torch.cat([x.truncations for x in seen])
    arrived = torch.cat([x.dones for x in seen])[1:]
    assert cut.sum() == 4 * (256 // 20) and torch.equal(cut[:-1], arrived)
    assert torch.equal(torch.cat([x.final_values for x in seen]) != 0, cut != 0)


@pytest.mark.parametrize("arguments", [SMALL, PENDULUM], ids=["CartPole", "Pendulum"])
def test_captured_updates_equal_eager_ones(example, tmp_path, monkeypatch, arguments):
    graphs = []

    def make_step(*given, enabled, **options):
        step = CapturedStep(*given, enabled=enabled, **options)
        graphs.append(step.graphs)
        return step

    allow_captures(monkeypatch)
    monkeypatch.setattr(example, "CapturedStep", make_step)
    arguments = [*arguments, "--total-timesteps", "1024"]
    (eager, _, _), (captured, _, _) = (
        trained(example, tmp_path, "triton", [*arguments, "--update", update]) for update in ("eager", "captured")
    )
    assert [x.replays for x in graphs] == [0, 4 * 4 * 4]
    torch.testing.assert_close([*captured.parameters()], [*eager.parameters()], rtol=1e-4, atol=1e-5)


def test_an_environment_it_cannot_learn_is_refused(example):
    envs = example.make_envs("FrozenLake-v1", 1)
    with pytest.raises(argparse.ArgumentTypeError, match="got Discrete.*expected Box observations"):
        example.Agent(envs)
