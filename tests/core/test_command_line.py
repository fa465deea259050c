"""The command `rl-triton`: what it prints, and what `doctor` finds in installations that are broken on purpose."""

import json
import os
import platform
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from rl_triton_core._internal.mlp import compile
from rl_triton_core.cli import COMMANDS, doctor, main, output
from rl_triton_core.system_info import TESTED

ROOT = Path(__file__).parents[2]


def run_command(*arguments, **environment):
    """Run the command in a process of its own, with other variables in its environment."""
    command = [sys.executable, "-m", "rl_triton_core", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def add_distribution(folder, name, version, *requires):
    """Install the metadata of a package, which is all that is read of it."""
    folder.joinpath(f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {x}" for x in requires)]
    lines += [f"Provides-Extra: {extra}" for extra in re.findall(r'extra == "(.*)"', "\n".join(requires))]
    text = "Metadata-Version: 2.1\n" + "\n".join(lines) + "\n"
    folder.joinpath(f"{name.replace('-', '_')}-{version}.dist-info", "METADATA").write_text(text)


@pytest.mark.skipif(doctor.package_version(doctor.DISTRIBUTION) == doctor.ABSENT, reason="nothing is installed")
def test_a_broken_installation(tmp_path):
    """Old and unknown packages, a cache that is a file, no fast path, a wrong number of threads: all are found."""
    site, file = tmp_path / "site", tmp_path / "file"
    file.touch()
    add_distribution(site, "numba", "0.50.1")
    add_distribution(site, "triton", "3.0.0")
    add_distribution(site, "torch", torch.__version__, 'triton==3.4.0; platform_system == "Linux"')
    result = run_command(
        *("doctor", "--json"),
        PYTHONPATH=os.pathsep.join([str(site), str(ROOT), *sys.path]),
        TRITON_CACHE_DIR=str(file / "triton"),
        NUMBA_CACHE_DIR=str(file / "numba"),
        RL_TRITON_FAST_PATH="no",
        RL_TRITON_NUM_THREADS="many",
        RL_TRITON="off",
        TRITON_INTERPRET="1",
    )
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    checks = report["checks"]
    found = {name: check["status"] for name, check in checks.items() if check["status"] != "ok"}
    broken = dict.fromkeys(("packages", "triton", "caches", "switches", "fast path", "threads"), "problem")
    assert found == broken | {"interpreter": "warning"}
    assert report["problems"] == len(broken)
    assert "numba 0.50.1, expected >=0.61" in checks["packages"]["message"]
    assert 'pip install "triton==3.4.0"' in checks["triton"]["advice"]
    assert all(name in checks["caches"]["advice"] for name in ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"))
    assert "RL_TRITON: got 'off', expected one of 0, 1" in checks["switches"]["message"]
    assert "RL_TRITON_FAST_PATH" in checks["fast path"]["advice"]
    assert "'many'" in checks["threads"]["message"]


def test_a_checkout_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    status, message, advice = doctor.check_packages()
    assert status == "warning" and "not installed" in message and advice.startswith("pip install -e .")


def test_without_a_command_it_describes_the_machine():
    result = run_command(RL_TRITON_NUM_THREADS="3", RL_TRITON="0", RL_TRITON_FAST_PATH="no")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("rl_triton_core ")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rl_triton_core", "3"] in lines and ["RL_TRITON_NUM_THREADS", "3"] in lines
    assert ["RL_TRITON", "0"] in lines and ["RL_TRITON_FAST_PATH", "no"] in lines
    assert ["cpu", "reference", "available"] in lines


@pytest.mark.parametrize("name", doctor.SWITCHES)
def test_what_is_switched_off_is_said(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert doctor.check_switches().status == "ok"
    monkeypatch.setenv(name, "0")
    finding = doctor.check_switches()
    assert finding.status == "warning" and f"{name}=0" in finding.message and finding.advice


@pytest.mark.parametrize(
    "load, threads, status", [(0.2, 4, "ok"), (1.0, 4, "warning"), (9.0, 1, "ok"), (9.0, 2, "warning")]
)
def test_more_threads_than_free_processors(monkeypatch, load, threads, status):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert doctor.check_threads().status == status


def test_the_page_describes_every_command_and_variable_of_the_environment():
    text = (ROOT / "docs" / "install.md").read_text()
    sources = [*(ROOT / "rl_triton_core").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r'"(RL_TRITON(?:_[A-Z]+)*)"', path.read_text())}
    assert named >= {*doctor.SWITCHES, "RL_TRITON_NUM_THREADS"} and all(f"`{name}`" in text for name in named)
    assert all(f"\n### {name}\n" in text for name in COMMANDS)


NEWEST = {"torch", "triton", "gymnasium"}
"""Of these, newer versions than those of the constraints were tried, as `make test-newest` does every night."""


def test_the_tested_versions_are_those_of_the_constraints():
    names = ("constraints.txt", "constraints-frameworks.txt")
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.partition(";")[0].strip().split("==") for line in lines if "==" in line.partition(";")[0])
    for name, tested in TESTED.items():
        pinned = Version(pins[name]).release[: len(Version(tested).release)]
        assert pinned == Version(tested).release or (name in NEWEST and pinned < Version(tested).release), name


def install_packages(folder, monkeypatch, requires, **versions):
    """Install this project with these requirements and packages with these versions, and nothing else."""
    add_distribution(folder, "rl-triton-core", "9.9", *requires)
    for name, version in versions.items():
        add_distribution(folder, name, version)
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_it_is_a_command_of_the_distribution():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert lines[lines.index("[project.scripts]") + 1] == f'rl-triton = "{main.__module__}:{main.__name__}"'


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("1.10", "problem", "pip install"),
        ("2.9.7", "ok", ""),
        ("2.10.0", "warning", "compare"),
        ("ray", "warning", "check_ray"),
    ],
)
def test_versions_of_frameworks(tmp_path, monkeypatch, version, status, said):
    """Too old, that which was tried, and newer; what is not installed, and what is no framework, is left out."""
    extras = [f'{name}; extra == "sb3"' for name in ("stable-baselines3>=2.9", "ray>=2", "matplotlib>=3")]
    packages = {"ray": "99.1"} if version == "ray" else {"stable-baselines3": version, "matplotlib": "1"}
    install_packages(tmp_path, monkeypatch, extras, **packages)
    found, message, advice = doctor.check_packages()
    assert found == status and said in advice and ("ray" in packages) == ("ray" in message + advice)


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.7.1", "problem", "torch 2.7.1, expected >=2.8"),
        ("2.8.0a0+nv25.8", "ok", "torch 2.8.0a0+nv25.8"),
        ("2.13.7+cpu", "ok", "torch 2.13.7+cpu"),
        ("2.16.0", "warning", "torch 2.16.0 (tried up to 2.15)"),
        ("3.1", "warning", "torch 3.1 (tried up to 2.15)"),
        ("a build", "problem", "torch a build, expected >=2.8"),
    ],
)
def test_versions_of_what_the_core_needs(tmp_path, monkeypatch, version, status, said):
    requires = "torch>=2.8", 'matplotlib>=3.9; extra == "bench"', 'nothing>=1; platform_system == "Plan 9"'
    install_packages(tmp_path, monkeypatch, requires, torch=version)
    finding = doctor.check_packages()
    assert finding.status == status and said in finding.message and "nothing" not in finding.message
    assert ("selftest" in finding.advice) == (status == "warning")


@pytest.mark.parametrize(
    ("asked", "installed", "status", "said"),
    [
        ('triton==3.4.0; platform_system == "Linux"', "3.4.0+git1", "ok", "is the one for"),
        ("triton~=3.4", "3.9.0", "ok", "is as triton~=3.4 asks, of PyTorch"),
        ('triton==3.4.0; platform_system == "Linux"', "3.4.1", "problem", "asks for triton==3.4.0"),
        ("pytorch-triton-rocm==3.4.0", "3.5.0", "problem", "asks for triton==3.4.0"),
        ('triton==3.4.0; platform_system == "Plan 9"', "3.9.0", "ok", "asks for none"),
        ("sympy>=1.13", "3.9.0", "ok", "asks for none"),
    ],
)
def test_the_triton_of_pytorch(tmp_path, monkeypatch, asked, installed, status, said):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    add_distribution(tmp_path, "torch", "2.8.0", asked)
    add_distribution(tmp_path, "triton", installed)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    finding = doctor.check_triton()
    assert finding.status == status and said in finding.message


@pytest.mark.parametrize(("device", "status"), [("mps", "warning"), ("xpu", "warning"), ("cpu", "ok")])
def test_accelerators_without_a_backend(monkeypatch, device, status):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device != "cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device))
    finding = doctor.check_backends()
    assert finding.status == status and (device in finding.message)


def test_no_triton_is_advised_where_there_is_none(monkeypatch):
    """On Windows and macOS."""
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "why_unavailable", lambda name, device: "its import failed")
    findings = [doctor.check_triton(), doctor.check_backends()]
    assert [x.status for x in findings] == ["ok", "problem"]
    assert not re.search(r"pip install.*triton", " ".join(x.advice for x in findings))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert "pip install --upgrade triton" in doctor.check_backends().advice


def test_the_gpu_that_pytorch_cannot_use(tmp_path):
    """As the kernel shows it: a folder for each NVIDIA GPU, device files for those of AMD."""
    assert doctor.find_gpu_driver(tmp_path) is None
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    (tmp_path / "dev" / "dri" / "renderD128").touch()
    assert doctor.find_gpu_driver(tmp_path) is None
    (tmp_path / "dev" / "kfd").touch()
    assert doctor.find_gpu_driver(tmp_path) == "AMD"
    (tmp_path / "proc" / "driver" / "nvidia" / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert doctor.find_gpu_driver(tmp_path) == "NVIDIA"
    assert doctor.judge_gpu(None).status == "ok"
    if not torch.cuda.is_available():
        finding = doctor.judge_gpu("NVIDIA")
        assert finding.status == "problem"
        assert ("built without CUDA" in finding.message) == (torch.version.cuda is None)


def test_warmup(capsys):
    options = ["--estimator", "gae", "normalize_advantages", "--shape", "3", "5", "--backend", "reference"]
    compile.find_functions.cache_clear()
    compile.compile_callback.cache_clear()
    assert main(["warmup", *options, "--updates", "gaussian", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)
    assert list(seconds) == ["gae", "normalize_advantages", "update, gaussian"]
    assert compile.compile_callback.cache_info().currsize == len(compile.CALLED)
    assert all(time >= 0 for time in seconds.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("warmup --estimator gae --updates beta", "--updates: got 'beta', expected one of categorical"),
        ("warmup --estimator gae --shape -1 5", "shape: got (-1, 5), expected two sizes of at least 1"),
        ("warmup --estimator gae --shape 100000000000 100000000000", "expected one that fits into memory"),
        ("warmup --estimator gae --device nonsense", "device: got 'nonsense', expected one that there is here"),
        ("warmup --estimator gae --device meta", "device: got 'meta', expected one that there is here"),
        ("warmup --estimator gae --backend cpu --device meta", "backend: got 'cpu', which is not available"),
        ("selftest --cases 0", "--cases: got 0, expected at least 1"),
        ("selftest --seed -1", "--seed: got -1, expected at least 0"),
        ("selftest --case -1", "--case: got -1, expected at least 0"),
        ("run --off sb -- true", "expected a command, and for --off one of sb3, sb3-contrib, rllib"),
        ("run --json --off sb -- true", "unrecognized arguments: --json"),
    ],
)
def test_wrong_usage(capsys, arguments, said):
    """Exit status 2 and a message, never a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and "compiling: 1" not in printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
@pytest.mark.parametrize("arguments", [["env"], ["--help"]])
def test_output_that_cannot_be_written(arguments):
    """One line and status 1; what is lost on standard error ends nothing."""
    command = [sys.executable, "-m", "rl_triton_core", *arguments]
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        run = partial(subprocess.run, command, text=True, check=False, env=environment)
        result = run(stdout=full, stderr=subprocess.PIPE)
        assert result.returncode == 1 and re.fullmatch(r"rl-triton: error: .*No space left.*\n", result.stderr)
        assert run(stdout=subprocess.PIPE, stderr=full).returncode == 0


def test_standard_streams_that_are_closed(monkeypatch):
    """They are None then."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["warmup", "--estimator", "gae", "--backend", "reference"]) == 0


def test_a_reader_that_has_read_enough():
    """As `head` has after a line."""
    command = [sys.executable, "-m", "rl_triton_core", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_what_is_done_is_said_where_there_is_no_terminal(capsys, monkeypatch):
    """At first and then every few seconds, on standard error."""
    seconds = iter([0.0, 1.0, 5.5, 5.5, 10.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(seconds))
    assert [*output.track_progress("abc", "working", 3)] == ["a", "b", "c"]
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["working: 0 of 3", "working: 2 of 3"] and not printed.out
