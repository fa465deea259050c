"""What a result depends on besides the code: the machine, the packages, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from rl_triton_core._internal.launch.fast_path import fast_path_status
from rl_triton_core._version import __version__

TRITON = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")
TESTED = {
    "numba": "0.68",
    "torch": "2.15",
    "triton": "3.9",
    "gymnasium": "1.4",
    "ray": "2.60",
    "rl-games": "1.6",
    "rsl-rl-lib": "5.5",
    "sb3-contrib": "2.9",
    "skrl": "2.1",
    "stable-baselines3": "2.9",
    "torchrl": "0.14",
    "trl": "1.16",
    "verl": "0.9",
}
"""The newest versions that the tests have seen."""
ABSENT = "none"


def system_info() -> dict[str, str]:
    """Describe the machine and the installation, for result files and bug reports.

    Frameworks are looked up, never imported. What is absent reads ``"none"``.

    Returns:
        Names and values, in the order in which they should be shown.
    """
    status, num_gpus = fast_path_status(), torch.cuda.device_count()
    found = {
        "rl_triton_core": __version__,
        "commit": find_commit(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_count": str(os.cpu_count()),
        "torch": package_version("torch"),
        "triton": package_version(*TRITON),
        "numba": package_version("numba"),
        "numpy": package_version("numpy"),
        "gpu": ", ".join(map(torch.cuda.get_device_name, range(num_gpus))) or ABSENT,
        "gpu_driver": driver_version() if num_gpus else ABSENT,
        "cuda": torch.version.cuda or ABSENT,
        "rocm": torch.version.hip or ABSENT,
        "fast_path": ("on" if status.enabled else "off") + (f": {status.reason}" if status.reason else ""),
    }
    return found | {name: package_version(name) for name in (*TESTED, "tensordict") if name not in found}


def package_version(*names: str) -> str:
    """Version of the first of these distributions that is installed."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ABSENT


def find_commit() -> str:
    """Commit of the checkout that the code runs from, marked ``-dirty`` if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ABSENT
    return output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def cpu_name() -> str:
    """The processor's name as the vendor writes it, where the system tells."""
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string")
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def driver_version() -> str:
    """Version of the GPU's driver."""
    if torch.version.hip:
        module = Path("/sys/module/amdgpu/version")
        return module.read_text().strip() if module.exists() else ABSENT
    lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0] if lines else ABSENT


def output_of(*command: str) -> str:
    """What a program prints; ``"none"`` if it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ABSENT
    return result.stdout.strip()
