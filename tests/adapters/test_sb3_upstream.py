"""The GAE tests of Stable-Baselines3 itself, from its source distribution, with our buffers in the place of its own.

The file is fetched once, by pip, into `.cache/`. Where that is impossible the test fails, so that it cannot go missing
unnoticed; RL_TRITON_OFFLINE=1 says that no network is meant to be there, and only then it is skipped.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = version("stable-baselines3")
CACHE = ROOT / ".cache" / f"stable_baselines3-{VERSION}"
UPSTREAM = "tests/test_gae.py"


def download_upstream_tests() -> None:
    """Put the upstream test file into the cache: whole or not at all."""
    CACHE.parent.mkdir(exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        command += ["--no-deps", "--no-binary", "stable-baselines3", "--dest", folder, f"stable-baselines3=={VERSION}"]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        archives = list(Path(folder).glob("*.tar.gz"))
        if result.returncode or not archives:
            pytest.fail(
                f"the source distribution of stable-baselines3 {VERSION} could not be fetched "
                f"(set RL_TRITON_OFFLINE=1 to skip this test on a machine without network):\n{result.stderr}",
                pytrace=False,
            )
        with tarfile.open(archives[0]) as archive:
            member = next(name for name in archive.getnames() if name.endswith(f"/{UPSTREAM}"))
            source = archive.extractfile(member)
            assert source is not None
            (Path(folder) / "test_gae.py").write_bytes(source.read())
        CACHE.mkdir(exist_ok=True)
        os.replace(Path(folder) / "test_gae.py", CACHE / "test_gae.py")


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A folder that holds nothing but the upstream tests."""
    if not (CACHE / "test_gae.py").exists():
        if os.environ.get("RL_TRITON_OFFLINE") == "1":
            pytest.skip(f"RL_TRITON_OFFLINE=1, and {CACHE.relative_to(ROOT)} holds no upstream tests yet")
        download_upstream_tests()
    (tmp_path / "test_gae.py").write_bytes((CACHE / "test_gae.py").read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run_upstream(folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(ROOT), str(ROOT / "adapters"), str(HERE), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-p", "sb3_upstream.substitute", "-p", "no:cacheprovider", "-q"]
    command += [f"--kind={kind}", "--calls=calls.json", "--junit-xml=report.xml", "test_gae.py", "-k", "not SAC"]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.parametrize("kind", ["Triton", "Device"])
def test_the_gae_tests_of_stable_baselines3_pass_with_our_buffers(upstream, kind):
    """All of them but those of SAC, which keeps no rollouts."""
    result = run_upstream(upstream, kind)
    assert result.returncode == 0, result.stdout + result.stderr

    report = ET.parse(upstream / "report.xml").getroot().find("testsuite")
    assert report is not None
    counts = {name: int(report.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts.pop("tests") > 0 and not any(counts.values()), result.stdout

    names = [case.attrib["name"] for case in report.iter("testcase")]
    on_policy = {name for name in names if ("PPO" in name or "A2C" in name) and "False-A2C" not in name}
    calls = json.loads((upstream / "calls.json").read_text())
    assert on_policy and calls.keys() == on_policy, "every upstream test that trains PPO or A2C must run our method"
    assert min(calls.values()) >= 2
