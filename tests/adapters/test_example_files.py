"""The examples are short, have the same flags, and run by the commands of adapters/README.md."""

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import command_line
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PARTS = ("upgo.py", "gpu_envs.py", "command_line.py", "ppo_sb3_report.py", "ppo_multi_gpu.py", "advantages_verl.py")
"""An estimator, environments, what is shared, a report, what takes the flags of ppo_gpu_envs.py, advantages alone."""
TRAINING = [path.name for path in EXAMPLES if path.name not in (*PARTS, "cleanrl_diff.py")]
NEEDED = {"example": "stable_baselines3", "example-rllib": "ray.rllib", "example-frameworks": "skrl"}
"""A package that a verb's environment has and the others lack."""


def commands():
    """Verb, file and options of each."""
    table = (ROOT / "adapters" / "README.md").read_text()
    for verb, run in re.findall(r"^\| `make (example\S*) RUN=\"?(.+?)\"?` \|", table, re.MULTILINE):
        name, *options = shlex.split(run)
        yield verb, name, options


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_less_than_300_lines(path):
    assert len(path.read_text().splitlines()) < 300


def test_every_example_has_a_command():
    found = list(commands())
    assert {name for _, name, _ in found} == set(TRAINING)
    assert {verb for verb, *_ in found} == {*NEEDED}


@pytest.mark.parametrize(("verb", "name", "options"), list(commands()))
def test_an_example_takes_its_command(verb, name, options):
    pytest.importorskip(NEEDED[verb])
    pytest.importorskip("tensorboard")
    options = [command_line.device("auto") if x == "cuda" else x for x in options]
    args = importlib.import_module(name.removesuffix(".py")).parse_arguments(options)
    assert args.advantages == "triton" and args.target_return is not None


# --- wrong arguments, files and installations: one line and a status that is not 0 ------------------------------------


@pytest.mark.parametrize(("verb", "name"), dict.fromkeys((verb, name) for verb, name, _ in commands()))
def test_every_number_of_an_example_has_limits(verb, name, capsys):
    pytest.importorskip(NEEDED[verb])
    pytest.importorskip("tensorboard")
    parse = importlib.import_module(name.removesuffix(".py")).parse_arguments
    options = re.findall(r'add_argument\("(--[\w-]+)", (?:type|default)=', (ROOT / "examples" / name).read_text())
    for option in set(options) - {"--target-return", "--log-dir", "--output"}:
        for value in ("-1", "nonsense"):
            with pytest.raises(SystemExit) as stopped:
                parse([option, value])
            assert stopped.value.code == 2 and f"argument {option}" in capsys.readouterr().err


@pytest.mark.parametrize(("told", "least", "most"), [("nan", 0.0, 1.0), ("1.5", 0.0, 1.0), ("0", 1, None)])
def test_numbers_out_of_their_limits(told, least, most, capsys):
    parser = command_line.argparse.ArgumentParser()
    limits = (least,) if most is None else (least, most)
    parser.add_argument("--number", type=command_line.within(*limits))
    assert parser.parse_args(["--number", "1"]).number == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--number", told])
    assert f"argument --number: got {told}, expected" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("name", "goes"), [("file/curves", False), ("curves", True)])
def test_curves_that_cannot_be_written_end_nothing(tmp_path, capsys, name, goes):
    """It is said once where a folder cannot be made, or goes while it is written to."""
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    curves = command_line.Curves(str(tmp_path / name))
    if goes:
        shutil.rmtree(tmp_path / name)
    for step in range(99):
        curves.add_scalar("return", 1.0, step)
    curves.close()
    assert capsys.readouterr().err.count("No curves for TensorBoard, training goes on: ") == 1


def test_a_rollout_has_two_samples_for_each_minibatch(capsys):
    example = pytest.importorskip("ppo_gpu_envs", exc_type=ImportError)
    sizes = ["--num-envs", "3", "--num-steps", "5", "--num-minibatches"]
    assert example.parse_arguments([*sizes, "7"]).num_minibatches == 7
    with pytest.raises(SystemExit):
        example.parse_arguments([*sizes, "8"])
    assert "--num-minibatches: got 8, expected at most half of 15 samples" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.parse_arguments(["--num-envs", "16384", "--num-steps", "128"])
    assert "--total-timesteps: got 400000, expected at least one rollout of 2097152" in capsys.readouterr().err


PROGRAMS = [path for path in EXAMPLES if "with needing(" in path.read_text()]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_without_its_framework_says_what_to_install(path, monkeypatch, capsys):
    """An extra that there is; other programs that import it get the error."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    source = path.read_text()
    first = re.search(r"with needing\(.*\n    (?:import|from) (\w+)", source)[1]
    monkeypatch.setitem(sys.modules, first, None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    said = re.fullmatch(rf"{path.name}: error: .*{first}.*pip install -e .*\[(.*)\].*\n", capsys.readouterr().err)
    assert stopped.value.code == 2 and f"\n{said[1]} = [" in (ROOT / "pyproject.toml").read_text()
    with pytest.raises(ImportError):
        runpy.run_path(str(path))


@pytest.mark.parametrize("script", ["missing.py", ".", "binary.py", "other.py"])
def test_files_that_cannot_be_read_or_changed(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "binary.py").write_bytes(b"\xd0\x00")
    (tmp_path / "other.py").write_text("print()")
    monkeypatch.setattr(sys, "argv", ["cleanrl_diff.py", str(tmp_path / script)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "examples" / "cleanrl_diff.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert re.fullmatch(rf"cleanrl_diff\.py: error: .*{re.escape(str(tmp_path))}.*\n", capsys.readouterr().err)


def test_advantages_are_those_of_verl(monkeypatch, capsys):
    pytest.importorskip("verl")
    from rl_triton_adapters.verl import uninstall

    monkeypatch.setattr(sys, "argv", ["advantages_verl.py", "--batch-size", "8", "--response-length", "32"])
    importlib.import_module("advantages_verl").main()
    uninstall()
    assert capsys.readouterr().out.startswith("gae   verl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_output_that_cannot_be_written():
    code = "import command_line; command_line.run(lambda: print('x'))"
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(ROOT / "examples")
    command = [sys.executable, "-c", code]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert found.returncode == 2 and re.fullmatch(r"-c: error: .*No space left.*\n", found.stderr)


def test_devices_and_environments_that_there_are_not(capsys):
    pytest.importorskip("gymnasium")
    assert command_line.device("cpu") == "cpu" and command_line.environment("CartPole-v1") == "CartPole-v1"
    assert command_line.device("auto") in ("cpu", "cuda")
    device, environment = command_line.device, command_line.environment
    for read, name in ((device, "meta"), (device, "cuda:99"), (environment, "X")):
        with pytest.raises(command_line.argparse.ArgumentTypeError, match=f"got {name}, expected"):
            read(name)
