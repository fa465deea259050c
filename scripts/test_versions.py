"""Test adapters with other versions of their frameworks than the installed ones: those of versions.json.

    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python           some, on their quickest tests
    python scripts/test_versions.py frameworks=.venv-frameworks/bin/python --all     all, on all their tests

A version is installed, without what it asks for, into a folder of its own, which goes in front of the environment.
Where an adapter refuses it, the import has to fail and to name the version found.
"""

import argparse
import json
import os
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
    """Install a version once, and return its folder."""
    folder = FOLDER / f"{row['package']}-{version}"
    if not (folder / ".ready").exists():
        names = [f"{row['package']}=={version}", *row.get("with", [])]
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--ignore-requires-python"]
        subprocess.run([python, "-m", "pip", "install", *options, "--target", folder, *names], check=True)
        (folder / ".ready").touch()
    return folder


def make_command(row: dict, version: str, everything: bool) -> list[str]:
    """The arguments of Python that test one version."""
    if "refused" in row:
        return ["-c", IMPORT, row["refused"], f"{row['package']} {version}"]
    select = row.get("select", "") if everything else row["quick"]
    file = str(ROOT / "tests" / "frameworks" / row["tests"])
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", file, *(["-k", select] if select else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="an environment's name and interpreter: frameworks=PATH")
    parser.add_argument("--all", action="store_true", help="all versions, on all tests")
    args = parser.parse_args()
    pythons, failed = dict(x.split("=", 1) for x in args.pythons), []
    for row in (x for x in ROWS if x["venv"] in pythons):
        for version in row["versions" if args.all else "short"]:
            start, name = time.monotonic(), f"{row['package']} {version}"
            folder = install(pythons[row["venv"]], row, version)
            paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "adapters")))
            env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            command = [str(Path(pythons[row["venv"]]).absolute()), *make_command(row, version, args.all)]
            code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
            print(f"{name}: {'failed' if code else 'ok'}, {time.monotonic() - start:.0f} s", flush=True)
            failed += [name] if code else []
    print(f"failed: {', '.join(failed)}" if failed else "all as expected")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
