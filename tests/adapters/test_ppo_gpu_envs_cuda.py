"""examples/ppo_gpu_envs.py on a GPU: neither a rollout nor an update waits for it."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_checks import forbid_waiting

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.end_to_end.ppo", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks.end_to_end import ppo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_nothing_waits_for_the_device(env):
    example = ppo.load_example()
    training = example.Training(example.parse_arguments(["--device", DEVICE, "--num-steps", "8", "--env", env]))
    for _ in range(2):
        training.run_iteration(1e-3)  # what is compiled, or written for a kind of call, comes before
    with forbid_waiting():
        training.run_iteration(1e-3)


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_captured_training_equals_eager_training(env):
    """Rollouts too: random numbers are drawn in the same order."""
    example, trainings = ppo.load_example(), []
    for update in ("eager", "captured"):
        args = ["--device", DEVICE, "--num-steps", "8", "--env", env, "--update", update]
        trainings.append(example.Training(example.parse_arguments(args)))
        for i in range(5):
            trainings[-1].run_iteration(1e-3 / (1 + i))
    eager, captured = trainings
    assert captured.collect.reason == "" and captured.update.reason == ""
    torch.testing.assert_close(captured.data["obs"], eager.data["obs"], rtol=1e-4, atol=1e-4)
    for got, want in zip(captured.agent.parameters(), eager.agent.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
