"""What type checkers and editors see: results that depend on a flag, and the packages of an editable install."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from typing_extensions import assert_type

import rl_triton_core as ours
from rl_triton_core.losses import Categorical, ppo_loss, token_log_probs


def compute_loss(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    advantages, returns = ours.compute_gae(x, x, bootstrap_values=x, gamma=0.9, mask=x > 0)
    assert_type(returns, torch.Tensor)
    assert_type(ours.compute_gae(x, x, next_values=x, compute_returns=wanted).advantages, torch.Tensor)
    targets, of_policy = ours.compute_vtrace(x, x, log_ratios=x, rho_bar_pg=2.0, bootstrap_values=0.0)
    assert_type(of_policy, torch.Tensor)
    assert_type(ours.compute_retrace(x, x, log_ratios=x, expected_next_q=x).advantages, torch.Tensor)
    assert_type(ours.compute_eligibility_traces(x, decay=0.5), torch.Tensor)
    sums, state = ours.compute_episodic_prefix_sum(x, return_state=True)
    assert_type(state, ours.ScanState)
    assert_type(ours.compute_eligibility_traces(x, state=state, return_state=True)[1], ours.ScanState)
    assert_type(token_log_probs(x, x, entropy=True).entropy, torch.Tensor)
    loss = ppo_loss(Categorical(x), x, x, advantages, values=x, returns=returns).loss
    return loss + (targets + of_policy + sums).mean()


ours.compute_gae(torch.ones(1, 2), torch.ones(1, 2), gama=0.9)  # an error
"""
CHECKERS = {
    "mypy": ("--strict", "--cache-dir", ".cache", "--no-error-summary"),
    "pyright": ("--pythonpath", sys.executable),
}
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="only the package is here")


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_of_a_user_has_types(checker, tmp_path):
    """The one error is that of an argument that there is not."""
    found = shutil.which(checker, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "strict"}}')
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    command = [found, *CHECKERS[checker], "program.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    errors = set(re.findall(r"program\.py:(\d+).*error", result.stdout))
    assert errors == {str(len(PROGRAM.splitlines()))}, result.stdout + result.stderr


def test_an_editable_install_is_a_list_of_folders(tmp_path):
    """Not an import hook, which type checkers do not run. The page of the package links to no files."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with zipfile.ZipFile(wheel) as archive:
        (paths,) = [archive.read(name).decode().split() for name in archive.namelist() if name.endswith("core.pth")]
        (metadata,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    assert {*map(Path, paths)} == {ROOT, ROOT / "adapters"} and "rl_triton_auto.pth" in archive.namelist()
    assert "Description-Content-Type: text/markdown" in metadata and "compute_gae" in metadata
    assert not re.findall(r"\]\((?!https?://|#)", metadata), "a package index has no such files"
