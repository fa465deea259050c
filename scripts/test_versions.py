"""Test adapters with other versions of their frameworks than the installed ones: those of versions.json.

    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python           some, on their quickest tests
    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python --all     all, on all their tests

A version is installed, without what it asks for, into a folder of its own, which goes in front of the environment.
Where an adapter refuses it, the import has to fail and to name the version found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "versions"
ROWS = json.loads((ROOT / "scripts" / "versions.json").read_text())
IMPORT = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except ImportError as error:
    print(error)
    sys.exit(f"found {sys.argv[2]}" not in str(error))
sys.exit(1)
"""


def install(python: str, row: dict, version: str) -> Path:
    """Install a version once, and return its folder; what an attempt that failed has left is removed first."""
    name = f"{row['package']}=={version}"
    folder = FOLDER / name.replace("==", "-")
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-compile"]
        options += ["--ignore-requires-python", "--target", str(folder)]
        command = [python, "-m", "pip", "install", *options, name, *row.get("with", [])]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise OSError(f"pip could not install {name}, for which it asks a package index:\n{done.stderr.strip()}")
        (folder / ".ready").touch()
    return folder


def make_command(row: dict, version: str, everything: bool) -> list[str]:
    """The arguments of Python that test one version."""
    if "refused" in row:
        return ["-c", IMPORT, row["refused"], f"{row['package']} {version}"]
    select = row.get("select", "") if everything else row["quick"]
    file = str(ROOT / "tests" / "frameworks" / row["tests"])
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", file, *(["-k", select] if select else [])]


def test_version(python: str, row: dict, version: str, everything: bool) -> bool:
    """Test one version; say whether all is as expected."""
    start, name, is_well = time.monotonic(), f"{row['package']} {version}", False
    try:
        paths = os.pathsep.join(map(str, (install(python, row, version), ROOT, ROOT / "adapters")))
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [str(Path(python).absolute()), *make_command(row, version, everything)]
        is_well = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0
    except OSError as error:
        print(error)
    print(f"{name}: {'ok' if is_well else 'failed'}, {time.monotonic() - start:.0f} s", flush=True)
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="an environment's name and interpreter: frameworks=PATH")
    parser.add_argument("--all", action="store_true", help="all versions, on all tests")
    args = parser.parse_args()
    pythons = dict(x.split("=", 1) for x in args.pythons)
    versions = [(row, x) for row in ROWS if row["venv"] in pythons for x in row["versions" if args.all else "short"]]
    failed = [
        f"{row['package']} {version}"
        for row, version in versions
        if not test_version(pythons[row["venv"]], row, version, args.all)
    ]
    print(f"failed: {', '.join(failed)}" if failed else "all as expected")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
