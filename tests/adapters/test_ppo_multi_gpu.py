"""examples/ppo_multi_gpu.py: two processes make the updates of one with the environments of both."""

import sys

import pytest
import torch
from processes import GLOO, run_command, run_ranks

pytest.importorskip("tensorboard")

import ppo_gpu_envs
import ppo_multi_gpu

from benchmarks import __main__ as runner
from benchmarks import results

RANKS = 2
SIZES = ["--num-envs", "8", "--num-steps", "16", "--env", "pendulum", "--learning-rate", "1e-2"]
EPOCHS = 3
pytestmark = GLOO
SETUPS = {
    "gloo": ("gloo", "cpu", "eager"),
    "nccl": ("nccl", "cuda", "eager"),
    "nccl captured": ("nccl", "cuda", "captured"),
    "gloo on GPUs": ("gloo", "cuda", "captured"),
}


def test_updates_without_averages_are_refused():
    with pytest.raises(ValueError, match="--update: got compiled, which averages no gradients"):
        ppo_multi_gpu.DistributedTraining(ppo_gpu_envs.parse_arguments([*SIZES, "--update", "compiled"]))


def draw_minibatches(rank, size):
    generator = torch.Generator().manual_seed(rank)
    return [rows for _ in range(EPOCHS) for rows in torch.randperm(size, generator=generator).chunk(4)]


def train_share(rank, device, update):
    """One process: a rollout, and an update of which every minibatch has a share here."""
    device = f"cuda:{rank}" if device == "cuda" else device
    options = [*SIZES, "--seed", str(rank), "--device", device, "--update", update]
    training = ppo_multi_gpu.DistributedTraining(ppo_gpu_envs.parse_arguments(options))
    weights = {name: x.clone() for name, x in training.agent.state_dict().items()}
    training.data = {name: x.flatten(0, 1).clone() for name, x in training.collect().items()}
    for i, rows in enumerate(draw_minibatches(rank, len(training.data["obs"]))):
        training.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        training.update(rows.to(device))
    captured, reason = len(training.update.captured), training.update.reason
    training.update.reset()
    return weights, training.data, training.agent.state_dict(), captured, reason


@pytest.mark.parametrize(
    "setup",
    [pytest.param(name, marks=() if name == "gloo" else pytest.mark.gpu, id=name.replace(" ", "_")) for name in SETUPS],
)
def test_processes_make_the_updates_of_one(setup, tmp_path):
    kind, device, update = SETUPS[setup]
    ranks = RANKS if device == "cpu" else min(RANKS, torch.cuda.device_count())  # NCCL takes one process per GPU
    shares = run_ranks(train_share, tmp_path, device, update, ranks=ranks, kind=kind)
    weights, data, results, captured, reasons = zip(*shares, strict=True)
    graphs = 2 if setup == "nccl captured" else 0  # DistributedDataParallel prepares itself in a first one
    assert captured == (graphs,) * ranks
    assert all(bool(reason) == (setup != "nccl captured") for reason in reasons), reasons
    assert all("NCCL" in reason for reason in reasons) or setup != "gloo on GPUs"
    training = ppo_gpu_envs.Training(ppo_gpu_envs.parse_arguments([*SIZES, "--device", device]))
    training.agent.load_state_dict(weights[0])
    training.data = {name: torch.cat([share[name] for share in data]).to(device) for name in data[0]}
    size = len(data[0]["obs"])
    minibatches = (draw_minibatches(rank, size) for rank in range(ranks))
    for i, rows in enumerate(zip(*minibatches, strict=True)):
        training.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
        training.update(torch.cat([rank * size + x for rank, x in enumerate(rows)]).to(device))
    assert ranks == 1 or not torch.equal(data[0]["obs"], data[1]["obs"])
    for name, want in training.agent.state_dict().items():
        assert all(torch.equal(results[0][name], other[name]) for other in results), name
        torch.testing.assert_close(results[0][name], want.cpu(), rtol=1e-4, atol=1e-6)
        assert name.endswith("bias") or not torch.equal(want.cpu(), weights[0][name]), name


def test_the_command(tmp_path):
    options = ["--num-envs", "8", "--num-steps", "8", "--total-timesteps", "128", "--log-dir", str(tmp_path)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*run, ppo_multi_gpu.__file__, *options, "--quiet", "--evaluation-episodes", "2"]
    assert run_command(*command).count("evaluation: mean return") == 1


def test_the_benchmark_runs(tmp_path):
    arguments = ["--quick", "--device", "cpu", "--seconds", "0.1", "--commit", "test"]
    assert runner.main([str(tmp_path), "multi_gpu", *arguments]) == 0
    rows = results.select_rows(results.read_result(tmp_path / "multi_gpu.csv").rows, metric="iteration")
    assert [(row.read_setting()["processes"], row.arm) for row in rows] == [("2", "eager"), ("2", "captured")]
    assert all(row.median > 0 and bool(row.note) == (row.arm == "captured") for row in rows)
