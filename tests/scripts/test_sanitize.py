"""The verb that runs tests under compute-sanitizer, where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.py"


def test_it_says_that_the_tool_is_missing(tmp_path):
    if shutil.which("compute-sanitizer"):
        pytest.skip("it is there")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "logs")]
    result = subprocess.run(command, env={"CUDA_HOME": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "compute-sanitizer is not there: install NVIDIA's CUDA toolkit" in result.stderr
    assert not (tmp_path / "logs").exists()
