"""Break the code on purpose, one place at a time, and check that the tests notice every time.

Each mutant is applied to a copy of the repository, and the tests that concern it run against the copy until the first
failure. A mutant that they let pass survives, and makes this program fail; so does one with which they do not end.

    python scripts/mutants.py reference    equations, boundary rule and validation, on the backend that compiles nothing
    python scripts/mutants.py cpu          the serial walk, captured steps and adapters
    python scripts/mutants.py triton       the parallel scan, on a GPU (the interpreter scans serially and has no fast
                                           path: some survive there)
    python scripts/mutants.py rllib        the adapter of RLlib, in the environment that has it

The mutants are rows of scripts/mutation/BACKEND.tsv. Those of an adapter run the adapters' tests, others the core's.
"""

import argparse
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
from tqdm import tqdm

from mutation.mutant import BACKENDS, Mutant, load_mutants

ROOT = Path(__file__).resolve().parent.parent
NOT_OF_MUTANTS = (  # tests of the core whose words are in expressions that mean others
    *("adding_a_loss", "adding_an_estimator", "benchmarks", "docs", "end_to_end", "estimators_cuda"),
    *("estimators_numbers", "language", "losses_cuda", "losses_frameworks"),
    *("oracles", "reports", "testing", "types", "warmup"),
)
CORE_TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/core/test_*.py"))
CORE_TESTS = [x for x in CORE_TESTS if Path(x).stem.removeprefix("test_") not in NOT_OF_MUTANTS]
ADAPTER_TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/adapters/test_*.py"))
RLLIB_TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/adapters/rllib/test_*.py"))
SLOW_TO_IMPORT = ("hypothesis", "numba", "packaging.version", "torch._dynamo.testing", "triton")
SLOW_OF_ADAPTERS = ("gymnasium", "ray.rllib.algorithms", "sb3_contrib", "torch.utils.tensorboard", "torchrl.objectives")
COMPILED = "compiled"  # a folder beside the copies: what the core as it is has compiled
FIND_CACHES = """
import sys
from pathlib import Path
from rl_triton_core._internal.equations import disk
for copy in sys.argv[1:]:
    disk.PACKAGE = Path(copy) / "rl_triton_core"
    print(disk.find_folder())
"""
PASSED, FAILED, NOT_RUN, ENDLESS = 0, 1, 4, -9
LIMIT = 600  # seconds for a mutant; most take a few


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tested", action="store_true", help="the tests have just passed without a mutant")
    options = parser.parse_args()
    mutants = load_mutants(options.backend)
    os.environ |= {"RL_TRITON_TEST_BACKENDS": options.backend}
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # so that it takes less time
    for name in (*SLOW_TO_IMPORT, *(SLOW_OF_ADAPTERS if any(map(is_of_adapter, mutants)) else ())):
        with suppress(ImportError):
            import_module(name)
    gc.freeze()  # the tests of every mutant look for garbage of their own only
    everything = mutants if options.tested else [*list_intact(mutants), *mutants]
    outcomes = run_mutants(everything, options.jobs)
    killed = 0
    progress = tqdm(outcomes, total=len(everything), desc=f"mutants ({options.backend})", disable=None)
    for mutant, code, output in progress:
        if is_intact(mutant):
            if code != PASSED:
                print(output, "the tests fail without a mutant", sep="\n")
                return 1
            continue
        result = name_outcome(code)
        killed += result == "killed"
        print(f"{result}: {mutant.name}", flush=True)
        if code > FAILED:
            print(output[-2000:], flush=True)
    print(f"mutants ({options.backend}): {killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


def list_intact(mutants: Sequence[Mutant]) -> list[Mutant]:
    """What breaks nothing, with the tests of all mutants of the core and of all those of the adapters."""
    parts = [[*some] for _, some in groupby(sorted(mutants, key=is_of_adapter), is_of_adapter)]
    tests = [sorted({f"({mutant.tests})" for mutant in some}) for some in parts]
    return [Mutant("none", some[0].file, "", "", "", " or ".join(x)) for some, x in zip(parts, tests, strict=True)]


def is_intact(mutant: Mutant) -> bool:
    return not mutant.before


def is_of_adapter(mutant: Mutant) -> bool:
    return mutant.file.startswith("adapters/")


def name_outcome(code: int) -> str:
    """A mutant that crashes the tests is noticed too."""
    if code == PASSED:
        return "survived"
    if code == ENDLESS:
        return f"the tests did not end in {LIMIT} s"
    return "the tests did not run" if code > FAILED else "killed"


class Outcome(NamedTuple):
    mutant: Mutant
    code: int  # what pytest returned, or minus the signal that ended it
    output: str


def run_mutants(mutants: Sequence[Mutant], jobs: int) -> Iterator[Outcome]:
    """Test every mutant in a process of its own, some at a time."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(mutants)), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder) / str(i) for i in range(len(mutants))]
        command = [sys.executable, "-c", FIND_CACHES, *map(str, [ROOT, *copies])]
        kept, *caches = map(Path, subprocess.check_output(command, cwd=ROOT, text=True).splitlines())
        with suppress(OSError):  # what is not there is compiled
            shutil.copytree(kept, Path(folder) / COMPILED)
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    mutant, copy, cache = waiting.pop(), copies[len(waiting)], caches[len(waiting)]
                    process = fork.Process(target=test_mutant, args=(mutant, copy, cache.name))
                    process.start()
                    limit = time.monotonic() + LIMIT if not is_intact(mutant) else math.inf
                    running[process.sentinel] = process, mutant, copy, limit
                ended = multiprocessing.connection.wait(list(running), timeout=1)
                late = [x for x, (*_, limit) in running.items() if x not in ended and time.monotonic() > limit]
                for sentinel in (*ended, *late):
                    process, mutant, copy, _ = running.pop(sentinel)
                    if sentinel in late:
                        process.kill()
                    process.join()
                    yield Outcome(mutant, process.exitcode, (copy / "log").read_text())
                    shutil.rmtree(copy)
        finally:
            for process, *_ in running.values():
                process.terminate()
                process.join()


def test_mutant(mutant: Mutant, copy: Path, cache: str) -> None:
    """Run a mutant's tests on a copy that has it.

    Those of adapters share a core that is as it is. One of the core begins with what was compiled of that: files there
    have the names of their code, so that it compiles what it breaks.
    """
    shared = is_of_adapter(mutant)
    for name in ("adapters", "tests", "docs", *([] if shared else ["rl_triton_core"])):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.nb[ci]", "plots"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    os.chdir(copy)
    own = [*map(str, (copy, copy / "adapters", ROOT, ROOT / "examples"))]  # the latter two for benchmarks, too
    sys.path[:] = [*own, *sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])  # processes of tests
    if not shared:
        os.environ |= {"NUMBA_CACHE_DIR": str(copy / "cache"), "NUMBA_OPT": "0"}
        with suppress(ImportError):
            import_module("numba.core.config").reload_config()
        with suppress(FileNotFoundError):
            shutil.copytree(copy.parent / COMPILED, copy / "cache" / cache, copy_function=os.link)
    with Path("log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        if not is_intact(mutant):
            apply_mutant(mutant, copy)
            os.environ["RL_TRITON_TEST_COMBINATIONS"] = "all"  # what notices may be left out otherwise
        files = find_test_files(mutant)
        if not files:  # without any, pytest would collect them all
            print(f"no file has {mutant.tests}")
            sys.exit(NOT_RUN)
        sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", mutant.tests, *files]))


def find_test_files(mutant: Mutant) -> list[str]:
    """Those that may have such tests: all words of the expression are in them, or ids of an estimator."""
    ids = read_test("tests/cases.py")
    expression = re.sub(r"not \w+", "True", mutant.tests)

    def may_have(file: str) -> bool:
        text = file + read_test(file) + ids
        return eval(re.sub(r"(?!and\b|or\b|True\b)\b\w+", lambda word: str(word[0] in text), expression))

    files = RLLIB_TESTS if "adapters/rllib/" in mutant.file else ADAPTER_TESTS if is_of_adapter(mutant) else CORE_TESTS
    return [file for file in files if may_have(file)]


@cache
def read_test(file: str) -> str:
    return (ROOT / file).read_text()


def apply_mutant(mutant: Mutant, copy: Path) -> None:
    """Break a copy of the repository, or end the process where there is no such place."""
    try:
        mutant.break_file(copy)
    except LookupError as error:
        print(error)
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    sys.exit(main())
