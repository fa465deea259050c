"""Test adapters with other versions of their frameworks than the installed ones: those of versions.json.

    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python           some, on their quickest tests
    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python --all     all, on all their tests
    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python --newest  the newest that there are

A version is installed, without what it asks for, into a folder of its own, which goes in front of the environment. Two
are tested at a time. Where an adapter refuses a version, the import has to fail and to name the version found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "versions"
ROWS = json.loads((ROOT / "scripts" / "versions.json").read_text())
NEWEST = "newest"
INSTALLING = Lock()  # two rows may have one version, and one folder
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
    """Install a version in its folder once, the newest always; what a failed attempt left there is removed first."""
    name = row["package"] if version == NEWEST else f"{row['package']}=={version}"
    folder = FOLDER / f"{row['package']}-{version}"
    if version == NEWEST or not (folder / ".ready").exists():
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
    if "refused" in row:
        return ["-c", IMPORT, row["refused"], f"{row['package']} {version}"]
    select = row.get("select", "") if everything else row["quick"]
    files = [str(ROOT / "tests" / file) for file in row["tests"].split()]
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *(["-k", select] if select else [])]


def test_version(python: str, row: dict, version: str, everything: bool) -> bool:
    start, name, is_well, output = time.monotonic(), f"{row['package']} {version}", False, ""
    try:
        with INSTALLING:
            folder = install(python, row, version)
        paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "adapters")))
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [str(Path(python).absolute()), *make_command(row, version, everything)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        is_well, output = done.returncode == 0, done.stdout + done.stderr
    except OSError as error:
        output = f"{error}\n"
    print(f"{output}{name}: {'ok' if is_well else 'failed'}, {time.monotonic() - start:.0f} s", flush=True)
    return is_well


def list_versions(kind: str, venvs: Iterable[str]) -> list[tuple[dict, str]]:
    """Rows and versions for the environments that there are: some, all, or the newest of each package."""
    rows = [row for row in ROWS if row["venv"] in venvs]
    if kind == NEWEST:
        first = {row["package"]: row for row in reversed(rows) if "tests" in row}
        return [(row, NEWEST) for row in first.values()]
    return [(row, version) for row in rows for version in row[kind]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="an environment's name and interpreter: frameworks=PATH")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--all", action="store_const", const="versions", dest="kind", help="all versions, on all tests")
    kinds.add_argument("--newest", action="store_const", const=NEWEST, dest="kind", help="the newest that there are")
    parser.set_defaults(kind="short")
    args = parser.parse_args()
    pythons = dict(x.split("=", 1) for x in args.pythons)
    versions = list_versions(args.kind, pythons)
    with ThreadPoolExecutor(2) as pool:
        well = list(pool.map(lambda x: test_version(pythons[x[0]["venv"]], *x, args.kind != "short"), versions))
    failed = [f"{row['package']} {version}" for (row, version), x in zip(versions, well, strict=True) if not x]
    print(f"failed: {', '.join(failed)}" if failed else "all as expected")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
