"""`rl-triton doctor`: find the usual troubles of an installation, and say what to do.

A check is a function without arguments that returns a `Finding`, and a line in `CHECKS`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rl_triton_core._internal.arguments.validation import read_switch
from rl_triton_core._internal.backend import PREFERENCE, needs_host, why_unavailable
from rl_triton_core._internal.launch.fast_path import fast_path_status
from rl_triton_core._internal.launch.threads import read_num_threads
from rl_triton_core.cli import caches
from rl_triton_core.cli.output import Report, Table
from rl_triton_core.system_info import ABSENT, TESTED, TRITON, package_version

HELP = "Find the usual troubles of an installation and say what to do. The exit status is 1 if there is one."
SWITCHES = {
    "RL_TRITON": "every adapter leaves its work to its framework",
    "RL_TRITON_CAPTURE": "no step of training is captured in a CUDA graph",
}
"""Switches of the environment, and what follows if one is 0."""
DISTRIBUTION = "rl-triton-core"


class Finding(NamedTuple):
    """What a check found."""

    status: str
    """``"ok"``, ``"warning"`` (not tried, may work) or ``"problem"``."""
    message: str
    advice: str = ""


def check_packages() -> Finding:
    """Compare what the core needs, and what is installed of frameworks, with lower bounds and with what was tried."""
    if package_version(DISTRIBUTION) == ABSENT:
        message = f"{DISTRIBUTION} is not installed, only importable: what it needs was not compared"
        return Finding("warning", message, "pip install -e . in the checkout")
    wanted = read_requirements()
    found = {x.name: package_version(x.name) for x in wanted}
    versions = {name: f"{name} {'is not installed' if x == ABSENT else x}" for name, x in found.items()}
    unmet = [x for x in wanted if is_unmet(x)]
    if unmet:
        message = "; ".join(f"{versions[x.name]}, expected {x.specifier}" for x in unmet)
        return Finding("problem", message, "pip install " + " ".join(f'"{x.name}{x.specifier}"' for x in unmet))
    newer = [x.name for x in wanted if is_newer_than_tested(x)]
    if newer:
        tried = ", ".join(f"{versions[name]} (tried up to {TESTED[name]})" for name in newer)
        advice = "run rl-triton selftest, and compare a short training run with and without the adapter"
        ray = "; call rl_triton_adapters.rllib.check_ray(), which compares its results" * ("ray" in newer)
        return Finding("warning", f"newer than what was tried: {tried}", advice + ray)
    return Finding("ok", f"known versions: {', '.join(versions.values())}")


def read_requirements() -> list[Requirement]:
    """Read what the core needs on this machine, and of its extras the frameworks that are installed; each once."""
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra", [])

    def counts(x: Requirement) -> bool:
        is_framework = x.name in TESTED and package_version(x.name) != ABSENT
        return applies(x, "") or (is_framework and any(applies(x, name) for name in extras))

    return list({x.name: x for x in map(Requirement, find_requires(DISTRIBUTION)) if counts(x)}.values())


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a package is needed on this machine with an extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def find_requires(distribution: str) -> list[str]:
    """Read what a distribution requires; nothing if it is not installed."""
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def parse_version(text: str) -> Version:
    """Read a version; what is none is older than all others."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def is_unmet(wanted: Requirement) -> bool:
    """Whether a package is missing or too old; a build ahead of a release counts as the release."""
    version = package_version(wanted.name)
    return version == ABSENT or parse_version(version).base_version not in wanted.specifier


def is_newer_than_tested(wanted: Requirement) -> bool:
    """Whether a package is newer than the versions that the tests have seen."""
    tested, version = parse_version(TESTED.get(wanted.name, "")), package_version(wanted.name)
    return wanted.name in TESTED and parse_version(version).release[: len(tested.release)] > tested.release


def check_triton() -> Finding:
    """Compare Triton with the version that PyTorch asks for."""
    if platform.system() != "Linux":
        return Finding("ok", "Triton is for Linux; the cpu backend needs none")
    requires = map(Requirement, find_requires("torch"))
    wanted = next((x.specifier for x in requires if x.name in TRITON and applies(x, "")), None)
    installed = package_version(*TRITON)
    advice = f'pip install "triton{wanted or ""}"'
    if installed == ABSENT:
        return Finding("problem", "Triton is not installed", advice)
    if wanted is None:
        return Finding("ok", f"Triton {installed}; PyTorch {torch.__version__} asks for none")
    if not wanted.contains(parse_version(installed), prereleases=True):
        message = f"Triton {installed} beside PyTorch {torch.__version__}, which asks for triton{wanted}"
        return Finding("problem", message, advice)
    fits = "is the one for" if str(wanted).startswith("==") else f"is as triton{wanted} asks, of"
    unused = "" if torch.version.cuda or torch.version.hip else ", which is built for CPUs and does not use it"
    return Finding("ok", f"Triton {installed} {fits} PyTorch {torch.__version__}{unused}")


def judge_gpu(driver: str | None) -> Finding:
    """Say whether PyTorch can use the GPU of this driver."""
    if torch.cuda.is_available():
        return Finding("ok", f"PyTorch can use {torch.cuda.device_count()} GPUs")
    if driver is None:
        return Finding("ok", "no GPU; calls on CPU tensors need none")
    build = "CUDA" if driver == "NVIDIA" else "ROCm"
    if (torch.version.cuda if driver == "NVIDIA" else torch.version.hip) is None:
        message = f"the machine has an {driver} GPU, but PyTorch {torch.__version__} was built without {build}"
        return Finding("problem", message, f"install PyTorch for {build}: https://pytorch.org/get-started/locally")
    message = f"the machine has an {driver} GPU, but PyTorch cannot use it"
    advice = "look at nvidia-smi or rocm-smi: the driver may be too old; in a container, let it have the GPU"
    return Finding("problem", message, f"{advice}; CUDA_VISIBLE_DEVICES may hide it")


def find_gpu_driver(root: Path = Path("/")) -> str | None:
    """Name the vendor of the machine's GPU as the kernel sees it, whatever PyTorch was built for."""
    if any((root / "proc/driver/nvidia/gpus").glob("*")) or (root / "dev/nvidia0").exists():
        return "NVIDIA"
    return "AMD" if (root / "dev/kfd").exists() and any((root / "dev/dri").glob("render*")) else None


def check_backends() -> Finding:
    """Look for devices whose calls would fall back to the slow reference backend."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    best = {device: PREFERENCE[device][0] for device in devices}
    reasons = {device: why_unavailable(name, torch.device(device)) for device, name in best.items()}
    missing = [f"{best[device]} on {device}: {reason}" for device, reason in reasons.items() if reason]
    if missing:
        steps = [find_remedy(best[device]) for device, reason in reasons.items() if reason]
        advice = f"{'; '.join(steps)}; until then, calls take the slow reference backend"
        return Finding("problem", f"backends not available: {'; '.join(missing)}", advice)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and needs_host(accelerator):
        message = f"calls on {accelerator.type} tensors are computed on copies in host memory"
        return Finding("warning", message, "keep in host memory what estimators and losses are given, if you can")
    return Finding("ok", ", ".join(f"calls on {device} tensors take {name}" for device, name in best.items()))


def find_remedy(backend: str) -> str:
    """Say what to do where a backend is not available."""
    if backend == "triton" and platform.system() != "Linux":
        return "use Linux, or WSL, since Triton is for Linux"
    if backend == "cpu" and os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "unset NUMBA_DISABLE_JIT"
    return f"pip install --upgrade {'numba' if backend == 'cpu' else backend}"


def check_caches() -> Finding:
    """Look for compiled code that is not kept, which every process compiles again, or that others can change."""
    wrong = [cache for cache in caches.find_caches().values() if cache.problem]
    if wrong:
        return Finding("problem", "; ".join(x.problem for x in wrong), "; ".join(x.advice for x in wrong))
    return Finding("ok", "compiled code is kept for the next process")


def check_fast_path() -> Finding:
    """Look for repeated calls that lost their fast path."""
    status = fast_path_status()
    if status.enabled and not status.reason:
        return Finding("ok", "repeated calls take it")
    advice = "unset RL_TRITON_FAST_PATH" if not status.enabled else "install the Triton that PyTorch asks for"
    return Finding("problem", status.reason or "it is switched off", advice)


def check_switches() -> Finding:
    """Look for switches of the environment that are off, or have no such position."""
    wrong, off = [], []
    for name, effect in SWITCHES.items():
        try:
            if not read_switch(name):
                off.append(f"{name}=0: {effect}")
        except ValueError as error:
            wrong.append(str(error))
    if wrong or off:
        return Finding("problem" if wrong else "warning", "; ".join(wrong + off), "unset them, or set them to 1")
    return Finding("ok", "nothing is switched off")


def check_interpreter() -> Finding:
    """Look for Triton's interpreter on a machine that could compile."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return Finding("ok", "off")
    message = "TRITON_INTERPRET is set: Triton's kernels run in an interpreter, thousands of times slower"
    return Finding("warning", message, "unset TRITON_INTERPRET, unless you debug a kernel")


def check_threads() -> Finding:
    """Compare the threads that the environment and PyTorch ask for with the processors that there are."""
    try:
        number = read_num_threads()
    except (TypeError, ValueError) as error:
        return Finding("problem", str(error), "set RL_TRITON_NUM_THREADS to a number, or unset it")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if number > processors:
        message = f"RL_TRITON_NUM_THREADS={number}, but this process may use {processors} processors"
        return Finding("problem", message, f"set RL_TRITON_NUM_THREADS to {processors} or less")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    free, threads = max(0.0, processors - load), torch.get_num_threads()
    if threads > max(1, round(free)):
        message = f"PyTorch has {threads} threads, where {free:.1f} of {processors} processors are free"
        return Finding("warning", message, "set OMP_NUM_THREADS=1: threads that wait for others take many times longer")
    return Finding("ok", f"calls on the CPU may use {number} of {processors} processors")


CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": check_packages,
    "triton": check_triton,
    "gpu": lambda: judge_gpu(find_gpu_driver()),
    "backends": check_backends,
    "caches": check_caches,
    "switches": check_switches,
    "fast path": check_fast_path,
    "interpreter": check_interpreter,
    "threads": check_threads,
}


def run(options: Any) -> Report:
    """Make all checks."""
    findings = {name: check() for name, check in CHECKS.items()}
    rows = [(name, x.status, x.message) for name, x in findings.items()]
    table = Table("", ("check", "state", "what was found"), rows)
    advice = [f"{name}: {x.advice}" for name, x in findings.items() if x.advice]
    problems = sum(x.status == "problem" for x in findings.values())
    verdict = f"{problems} problems" if problems else "nothing is wrong"
    data = {"problems": problems, "checks": {name: finding._asdict() for name, finding in findings.items()}}
    return Report(data, [table, "", *(["What to do:", *advice, ""] if advice else []), verdict], int(problems > 0))
