"""The script that tests other versions of frameworks: what it says of one that cannot be installed or has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rl_triton_core.system_info import TESTED

ROOT = Path(__file__).resolve().parents[2]
REFUSED = "raise ImportError('found mine 1.0, needs another')"


def run_script(folder, *rows):
    """Run a copy of it on these rows, without an index of packages."""
    script = folder / "scripts" / "test_versions.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text((ROOT / "scripts" / "test_versions.py").read_text())
    (script.parent / "versions.json").write_text(json.dumps(rows))
    command = [sys.executable, str(script), f"any={sys.executable}"]
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_version_that_cannot_be_installed_is_said_plainly(tmp_path):
    """Also where an earlier attempt was interrupted; the others are tested."""
    ready = tmp_path / ".cache" / "versions" / "mine-1.0"
    ready.mkdir(parents=True)
    (ready / ".ready").touch()
    (ready / "refusing.py").write_text(REFUSED)
    (tmp_path / ".cache" / "versions" / "other-2.0").mkdir()
    other = {"package": "other", "venv": "any", "short": ["2.0"], "refused": "other"}
    mine = {"package": "mine", "venv": "any", "short": ["1.0"], "refused": "refusing"}
    code, output = run_script(tmp_path, other, mine)
    assert code == 1 and "Traceback" not in output
    assert "pip could not install other==2.0, for which it asks a package index:\nERROR: " in output
    assert "mine 1.0: ok" in output and output.endswith("failed: other 2.0\n")
    (ready / "refusing.py").write_text(REFUSED.replace("found", "instead of"))
    code, output = run_script(tmp_path, mine)
    assert code == 1 and "mine 1.0: failed" in output


def test_the_newest_version_of_every_framework_is_tested():
    """Those that adapters and recipes are for, by their own tests."""
    packages = {x["package"] for x in json.loads((ROOT / "scripts" / "versions.json").read_text()) if "tests" in x}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints-frameworks.txt").read_text().splitlines()}
    recipes, others = {"openrlhf", "rlinf", "skyrl"}, {"benchmarl", "unilab-rl"}
    assert packages == others | recipes | TESTED.keys() - {"numba", "torch", "triton"} and recipes <= pinned
