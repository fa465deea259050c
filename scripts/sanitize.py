"""Run tests under the tools of CUDA's compute-sanitizer, on an NVIDIA GPU: make sanitize.

    python scripts/sanitize.py build/gpu                           all four tools
    python scripts/sanitize.py build/gpu --tools memcheck --select "triton and gae"

Every tool slows the GPU down many times, so a part of the suite runs. The log of each tool goes into the folder; the
exit status is 1 if a tool or a test found something.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TESTS = ("test_estimators_matrix.py", "test_estimators_packed.py", "test_normalization.py", "test_losses.py")
SELECTED = "triton and (random_cases or every_length or layouts or the_equation or heads or any_minibatch or any_shape)"
ERRORS_FOUND = 99
"""The exit status of compute-sanitizer if a program that succeeds has errors."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the logs go")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--select", default=SELECTED, help="which tests, as pytest's -k takes it")
    options = parser.parse_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        parser.error("compute-sanitizer is not there: install NVIDIA's CUDA toolkit, and put its bin into PATH")
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        parser.error("no NVIDIA GPU: torch.cuda.is_available() is false, or this is ROCm")
    options.folder.mkdir(parents=True, exist_ok=True)
    statuses = {tool: run_tool(sanitizer, tool, options.select, options.folder) for tool in options.tools}
    return int(any(statuses.values()))


def find_sanitizer() -> str | None:
    """The program of CUDA's toolkit, in PATH or below CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def run_tool(sanitizer: str, tool: str, select: str, folder: Path) -> int:
    """Run the tests under a tool and say how it went."""
    log = folder / f"sanitize_{tool}.log"
    files = [str(ROOT / "tests" / "core" / name) for name in TESTS]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select, *files]
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--target-processes", "all", *tests]
    # Without PyTorch's own cache of memory, every tensor is an allocation whose ends memcheck knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "RL_TRITON_TEST_BACKENDS": "triton"}
    environment.pop("TRITON_INTERPRET", None)
    environment.setdefault("RL_TRITON_TEST_COMBINATIONS", "few")
    with log.open("w") as file:
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    last_line = (log.read_text().strip().splitlines() or [""])[-1]
    print(f"{tool:<10} {'ok' if status.returncode == 0 else f'exit status {status.returncode}'}: {last_line} ({log})")
    return status.returncode


if __name__ == "__main__":
    sys.exit(main())
