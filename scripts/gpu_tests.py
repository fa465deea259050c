"""Run the whole test suite on a CUDA or ROCm machine and write what came of it to a folder.

    python scripts/gpu_tests.py FOLDER [--commit HASH] [--select EXPRESSION] [--limit SECONDS]
                                       [--suites adapters frameworks core]

Needs no installation of the project: torch, triton, numpy, pytest, pytest-xdist and hypothesis, and for all of it
numba, gymnasium, tqdm and the frameworks: what needs one that is missing is skipped. Other backends' tests are left to
machines without a GPU, and of a test's parameters a few combinations do, with every value of each among them:
RL_TRITON_TEST_BACKENDS and RL_TRITON_TEST_COMBINATIONS=all ask for more. Of the adapters' and frameworks' tests those
run that are marked `gpu`. Writes gpu_tests.json (hardware, versions, commit, and by suite counts and failures), and
SUITE.xml and SUITE.log of each, which names every test as it ends. Takes minutes.
"""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "adapters"))

from benchmarks import results

JOBS = min(64, len(os.sched_getaffinity(0)))
ROOT = results.ROOT
SUITES = {"adapters": ["-m", "gpu"], "frameworks": ["-m", "gpu"], "core": []}
"""Folders, and which of their tests, in the order in which they run: short ones first, for the limit is that of all."""
NONE_COLLECTED = 5  # pytest's exit code where no framework is installed


def main() -> int:
    parser = results.Parser(__doc__)
    parser.add_argument("--select", default="", help="run those tests only, as pytest's -k selects them")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which the tests are interrupted")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES), help="whose tests")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    result, ends = {"system": results.describe_system(options.commit)}, time.monotonic() + options.limit
    for suite in filter(options.suites.__contains__, SUITES):
        result[suite] = run_tests(suite, options.folder, options.select, ends - time.monotonic())
        (options.folder / "gpu_tests.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return max(part["exit_code"] for name, part in result.items() if name != "system")


def run_tests(suite: str, folder: Path, select: str, limit: float) -> dict[str, object]:
    started, junit = time.perf_counter(), folder / f"{suite}.xml"
    chosen = [str(ROOT / "tests" / suite), *SUITES[suite], "-k", select]
    junit.unlink(missing_ok=True)
    arguments = ["-v", "-n", str(JOBS), "--dist", "worksteal", *chosen]
    code = run_pytest(arguments, folder / f"{suite}.log", limit, junit)
    code = 0 if code == NONE_COLLECTED and SUITES[suite] else code
    seconds = round(time.perf_counter() - started, 1)
    return {"selected": select, "exit_code": code, "seconds": seconds, **count_results(junit)}


def count_results(junit: Path) -> dict[str, object]:
    """How many tests ran and passed, and which failed."""
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite is not None
    numbers = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        format_name(case)
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    properties = ((case, case.find("properties/property[@name='spilled_bytes']")) for case in suite.iter("testcase"))
    spilled = {format_name(case): int(found.get("value", "0")) for case, found in properties if found is not None}
    return {**numbers, "failed": failed, "spilled_bytes": spilled}  # of tests: bytes per thread that a kernel moves


def format_name(case: ET.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def run_pytest(arguments: list[str], log: Path, limit: float, report: Path) -> int:
    """Run tests of the checkout, with their output in a log; interrupted at the limit, they still report what they did.

    With the report written they are not interrupted: all have run, and their processes are ending.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment = {"RL_TRITON_TEST_BACKENDS": "triton", "RL_TRITON_TEST_COMBINATIONS": "few"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            if not report.exists():
                process.send_signal(signal.SIGINT)
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
