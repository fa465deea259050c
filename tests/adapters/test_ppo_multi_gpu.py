"""examples/ppo_multi_gpu.py: two processes make the updates of one with the environments of both."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

pytest.importorskip("tensorboard")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import ppo_gpu_envs
import ppo_multi_gpu

RANKS = 2
SIZES = ["--num-envs", "8", "--num-steps", "16", "--env", "pendulum", "--learning-rate", "1e-2"]
pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="torch has no gloo"
)


def draw_minibatches(rank, size):
    return torch.randperm(size, generator=torch.Generator().manual_seed(rank)).chunk(4)


def train_share(rank, folder):
    """One process: a rollout, and an update of which every minibatch has a share here."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    training = ppo_multi_gpu.DistributedTraining(ppo_gpu_envs.parse_arguments([*SIZES, "--seed", str(rank)]))
    weights = {name: x.clone() for name, x in training.agent.state_dict().items()}
    training.data = {name: x.flatten(0, 1) for name, x in training.collect().items()}
    for rows in draw_minibatches(rank, len(training.data["obs"])):
        training.update(rows)
    torch.save((weights, training.data, training.agent.state_dict()), f"{folder}/{rank}")
    distributed.destroy_process_group()


def test_two_processes_make_the_updates_of_one(tmp_path):
    multiprocessing.spawn(train_share, (str(tmp_path),), nprocs=RANKS)
    weights, data, results = zip(*(torch.load(tmp_path / str(rank)) for rank in range(RANKS)), strict=True)
    training = ppo_gpu_envs.Training(ppo_gpu_envs.parse_arguments(SIZES))
    training.agent.load_state_dict(weights[0])
    training.data = {name: torch.cat([share[name] for share in data]) for name in data[0]}
    size = len(data[0]["obs"])
    shares = (draw_minibatches(rank, size) for rank in range(RANKS))
    for rows in zip(*shares, strict=True):
        training.update(torch.cat([rank * size + x for rank, x in enumerate(rows)]))
    assert not torch.equal(data[0]["obs"], data[1]["obs"])
    for name, want in training.agent.state_dict().items():
        assert torch.equal(results[0][name], results[1][name]), name
        torch.testing.assert_close(results[0][name], want, rtol=1e-4, atol=1e-6)
        assert name.endswith("bias") or not torch.equal(want, weights[0][name]), name


def test_the_command(tmp_path):
    options = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "128", "--log-dir", str(tmp_path)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*run, ppo_multi_gpu.__file__, *options, "--quiet", "--evaluation-episodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.count("evaluation: mean return") == 1
