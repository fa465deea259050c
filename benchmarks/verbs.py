"""Time the verbs of the Makefile that a newcomer runs first, on this machine, with the environment that is there.

    python benchmarks/verbs.py FOLDER [--verb demo test] [--commit HASH]

Writes verbs.json: seconds. What a file that is there has of other verbs stays in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files

VERBS = ("demo", "test")


def main(arguments: list[str] | None = None) -> None:
    """Time each verb once; one that fails has no time."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--verb", nargs="+", choices=VERBS, default=VERBS)
    options = parser.parse_args(arguments)
    head = {"system": files.describe_system(options.commit), "device": "cpu"}
    path = options.folder / "verbs.json"
    rows = files.continue_result(path, head, lambda row: row["verb"] not in options.verb, "rows").get("rows", [])
    for verb in options.verb:
        rows.append({"verb": verb, "seconds": round(time_verb(verb), 1)})
        files.write_result(path, head, rows=sorted(rows, key=lambda row: VERBS.index(row["verb"])))


def time_verb(verb: str) -> float:
    """Seconds of a verb, whose environment is made before."""
    subprocess.run(["make", f"{os.environ.get('VENV', '.venv')}/.ready"], cwd=files.ROOT, check=True)
    start = time.perf_counter()
    subprocess.run(["make", verb], cwd=files.ROOT, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
