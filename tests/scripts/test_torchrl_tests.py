"""scripts/torchrl_tests.py, on files that stand in for those of a checkout of TorchRL."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl")

PROGRAM = Path(__file__).parents[2] / "scripts" / "torchrl_tests.py"
IMPORTS = """
import pytest, torch
from tensordict import TensorDict
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value.advantages import GAE, TD0Estimator, TDLambdaEstimator, VTrace
from torchrl.objectives.value.functional import td_lambda_return_estimate, vec_generalized_advantage_estimate as gae
"""
VALUES = """
@pytest.mark.parametrize("cls", [GAE, TDLambdaEstimator])
def test_classes(cls):
    assert cls.__module__.startswith("rl_triton_adapters") and not TD0Estimator.__module__.startswith("rl_triton")
    done = torch.zeros(4, 6, 1, dtype=torch.bool)
    after = {"observation": torch.randn(4, 6, 3), "reward": torch.randn(4, 6, 1), "done": done, "terminated": done}
    data = TensorDict({"observation": torch.randn(4, 6, 3), "next": after}, (4, 6))
    critic = ValueOperator(torch.nn.Linear(3, 1), in_keys=["observation"])
    assert cls(gamma=0.9, lmbda=0.9, value_network=critic)(data)["advantage"].isfinite().all()

def test_functions():
    x, done = torch.randn(4, 6, 1), torch.zeros(4, 6, 1, dtype=torch.bool)
    torch.testing.assert_close(gae(0.9, 0.0, x, x, x, done)[0], 0.9 * x)
    torch.testing.assert_close(td_lambda_return_estimate(0.9, 0.0, x, x, done), 1.9 * x)

def test_nothing():
    pass
"""
PPO = """
def test_names():
    assert ClipPPOLoss.__name__ == "TritonClipPPOLoss" and VTrace.__name__ == "TritonVTrace"
"""


def run(folder, *options):
    command = [sys.executable, PROGRAM, folder, "-q", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_tests_run_with_ours(tmp_path):
    folder = tmp_path / "test" / "objectives"
    folder.mkdir(parents=True)
    (folder / "test_values.py").write_text(IMPORTS + VALUES)
    missing = run(tmp_path)
    assert missing.returncode == 1 and "got 1 files, expected test_values.py and test_ppo.py" in missing.stderr
    (folder / "test_ppo.py").write_text(IMPORTS + PPO)
    result = run(tmp_path)
    assert not result.returncode and "5 passed" in result.stdout, result.stdout + result.stderr
    assert "rl_triton_core computed in 3 tests" in result.stdout
    (folder / "test_ppo.py").write_text("def test_wrong(): assert False")
    assert run(tmp_path, "-k", "wrong").returncode == 1
