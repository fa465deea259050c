"""Break the code on purpose, one line at a time, and check that the tests notice every time.

Each mutant is applied to a copy of the package, and the tests run against the copy until the first failure. A mutant
that the tests let pass survives, and makes this program fail.

    python scripts/mutants.py                     those of the shared rules and of the cpu backend
    python scripts/mutants.py --backend triton    those of the shared rules and of the Triton kernel
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/core/test_gae_known_answers.py", "tests/core/test_gae_containment.py", "tests/core/test_gae_matrix.py"]
PASSED, FAILED = 0, 1


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


CANARY = Mutant("nothing works", "solve.py", "    chosen.run(problem)", "    pass")

SHARED = [
    CANARY,
    Mutant("GAE: value not subtracted", "estimators/gae.py", "next_value - value", "next_value"),
    Mutant("GAE: no discount", "estimators/gae.py", "step.gamma * step.next_value", "step.next_value"),
    Mutant("GAE: λ dropped", "estimators/gae.py", "step.continues, step.decay", "step.continues, step.gamma"),
    Mutant("GAE: reset dropped", "estimators/gae.py", "select(step.continues, step.decay, 0)", "step.decay"),
    Mutant("GAE: returns with the reward", "estimators/gae.py", "+ step.inputs[0]", "+ step.inputs[1]"),
    Mutant("rule: terminations bootstrap", "boundaries.py", "select(ended, 0.0, select", "select(cut, 0.0, select"),
    Mutant("rule: a cut does not end", "boundaries.py", "(ended | cut) == 0", "ended == 0"),
    Mutant("rule: a termination does not end", "boundaries.py", "(ended | cut) == 0", "cut == 0"),
    Mutant("rule: truncation wins", "boundaries.py", "ended = terminated | (", "ended = (terminated & (cut == 0)) | ("),
    Mutant("rule: truncations ignored", "boundaries.py", "cut = truncated | last", "cut = last"),
    Mutant("rule: the window's end is no cut", "boundaries.py", "cut = truncated | last", "cut = truncated"),
    Mutant("rule: cuts take the neighbour", "boundaries.py", "select(cut, bootstrap, ahead)", "select(last, bootstrap, ahead)"),
    Mutant("rule: seals ignored", "boundaries.py", "terminated | (sealed & (cut == 0))", "terminated"),
    Mutant("rule: seals beat truncations", "boundaries.py", "(sealed & (cut == 0))", "sealed"),
    Mutant("sparse: missing values are 0", "validation.py", "torch.full(window.shape, math.nan", "torch.full(window.shape, 0.0"),
    Mutant("sparse: edge misplaced", "validation.py", "window.num_steps - 1, device", "0, device"),
]  # fmt: skip

BACKENDS = {
    "cpu": [
        Mutant("carry seeded with the bootstrap", "kernels/serial.py", "state[:] = zero", "state[:] = at(bootstrap, zero, 0, steps - 1, left)"),
        Mutant("carry kept from the rows before", "kernels/serial.py", "            state[:] = zero\n", ""),
        Mutant("reset gate multiplies", "kernels/serial.py", "select(beta == zero, zero, beta * state[j])", "beta * state[j]"),
        Mutant("mask ignored", "kernels/serial.py", "if not flag(mask, True, group, t, lane):", "if False:"),
        Mutant("masked cells not written", "kernels/serial.py", "                        clear(outputs, group, t, lane, zero)\n", ""),
        Mutant("skip severs", "kernels/serial.py", "if not skip:", "if True:"),
        Mutant("reset skips", "kernels/serial.py", "if not skip:", "if False:"),
        Mutant("a masked end is no seal", "kernels/serial.py", "sealed[j] = True", "sealed[j] = False"),
        Mutant("seals stay", "kernels/serial.py", "                    sealed[j] = False\n\n", "\n"),
        Mutant("terminated read a step late", "kernels/serial.py", "flag(terminated, False, group, t, lane)", "flag(terminated, False, group, min(t + 1, steps - 1), lane)"),
        Mutant("truncated read a step early", "kernels/serial.py", "flag(truncated, False, group, t, lane)", "flag(truncated, False, group, max(t - 1, 0), lane)"),
        Mutant("bootstrap of the neighbour lane", "kernels/serial.py", "at(bootstrap, zero, group, t, lane)", "at(bootstrap, zero, group, t, max(lane - 1, 0))"),
        Mutant("following value of the neighbour lane", "kernels/serial.py", "following = column(ahead, j)", "following = column(ahead, max(j - 1, 0))"),
        Mutant("discount 0 does not end", "kernels/serial.py", "return now, now * decay, now == 0", "return now, now * decay, False"),
        Mutant("last row of a block dropped", "kernels/serial.py", "range(min(BLOCK, end_lane - left))", "range(min(BLOCK, end_lane - left) - 1)"),
        Mutant("first step dropped", "kernels/serial.py", "range(steps - 1, -1, -1)", "range(steps - 1, 0, -1)"),
        Mutant("time and lanes swapped", "backends/cpu.py", "x if problem.time_dim == 0 else x.T", "x if problem.time_dim == 1 else x.T"),
        Mutant("last span dropped", "backends/cpu.py", "in pairwise(edges) if low < high]", "in list(pairwise(edges))[:-1] if low < high]"),
    ],
    "triton": [
        Mutant("combine: reset lets NaN through", "kernels/scan.py", "tl.where((beta_next == 0) | (alpha == 0), 0.0, beta_next * alpha)", "beta_next * alpha"),
        Mutant("combine: overflow poisons", "kernels/scan.py", "(beta_next == 0) | (alpha == 0), 0.0, beta_next * alpha", "beta_next == 0, 0.0, beta_next * alpha"),
        Mutant("combine: β not multiplied", "kernels/scan.py", "(beta == 0), 0.0, beta_next * beta)", "(beta == 0), 0.0, beta_next)"),
        Mutant("carry: gate multiplies", "kernels/scan.py", "alpha + tl.where((beta == 0) | (carried == 0), 0.0, beta * carried)", "alpha + beta * carried"),
        Mutant("carry dropped between tiles", "kernels/scan.py", "        state = at_end(scanned, BLOCK_TIME)\n", ""),
        Mutant("carry taken from the wrong end", "kernels/scan.py", "== BLOCK_TIME - 1", "== 0"),
        Mutant("carry seeded", "kernels/scan.py", "tl.zeros([BLOCK_LANES, 1], tl.float32)", "tl.zeros([BLOCK_LANES, 1], tl.float32) + 1.0"),
        Mutant("neighbour value from t", "kernels/scan.py", "load(inputs[i], group, t + 1, lane, inner)", "load(inputs[i], group, t, lane, inner)"),
        Mutant("mask ignored", "kernels/scan.py", "alpha = tl.where(valid, alpha, 0.0)", "alpha = tl.where(inside, alpha, 0.0)"),
        Mutant("masked cells not cleared", "kernels/scan.py", "tl.where(valid, results[i], 0.0), mask=inside", "results[i], mask=inside"),
        Mutant("skip severs", "kernels/scan.py", "1.0 if SKIP else 0.0", "0.0"),
        Mutant("reset skips", "kernels/scan.py", "1.0 if SKIP else 0.0", "1.0"),
        Mutant("seals ignored", "kernels/scan.py", "sealed = inner & (valid_next == 0)", "sealed = nowhere"),
        Mutant("masked neighbours not passed over", "kernels/scan.py", "value = carry_on(value, passed, ahead[i])", "value = following[i]"),
        Mutant("neighbours not carried between tiles", "kernels/scan.py", "value = carry_on(value, passed, ahead[i])", "value = value"),
        Mutant("the end not carried between tiles", "kernels/scan.py", "both) * unseen", "both)"),
        Mutant("terminated read a step late", "kernels/scan.py", "ended = flag(terminated, group, t, lane, inside)", "ended = flag(terminated, group, t + 1, lane, inner)"),
        Mutant("truncated read a step early", "kernels/scan.py", "cut = flag(truncated, group, t, lane, inside)", "cut = flag(truncated, group, t - 1, lane, inside & (t > 0))"),
        Mutant("bootstrap only at the end", "kernels/scan.py", "inside & (cut | last)", "inside & last"),
        Mutant("discount 0 does not end", "kernels/scan.py", "ended = ended | (gamma_now == 0)", "ended = ended"),
        Mutant("lanes and steps swapped", "kernels/scan.py", "t * stream[2] + lane * stream[3]", "t * stream[3] + lane * stream[2]"),
        Mutant("first step dropped", "kernels/scan.py", "inside = (t >= 0)", "inside = (t >= 1)"),
    ],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = SHARED + BACKENDS[options.backend]
    outcome = run_tests(None, options.backend)
    if outcome.returncode != PASSED:
        print(outcome.stdout, "the tests fail without a mutant", sep="\n")
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda mutant: run_tests(mutant, options.backend), mutants)
        outcomes = list(tqdm(results, total=len(mutants), desc=f"mutants ({options.backend})", disable=None))
    survivors = [m.name for m, outcome in zip(mutants, outcomes, strict=True) if outcome.returncode == PASSED]
    broken = [(m, o) for m, o in zip(mutants, outcomes, strict=True) if o.returncode not in (PASSED, FAILED)]
    for mutant, outcome in broken:
        print(f"{mutant.name}: the tests did not run\n{outcome.stdout[-2000:]}")
    for name in survivors:
        print(f"survived: {name}")
    print(f"mutants ({options.backend}): {len(mutants) - len(survivors) - len(broken)} of {len(mutants)} killed")
    return 1 if survivors or broken else 0


def run_tests(mutant: Mutant | None, backend: str) -> subprocess.CompletedProcess[str]:
    """The tests of one backend on a copy with the mutant in it."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("rl_triton_core", "tests/core"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests/conftest.py", "tests/oracles.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        if mutant is not None:
            apply(mutant, copy / "rl_triton_core" / mutant.file)
        environment = os.environ | {"RL_TRITON_TEST_BACKENDS": backend, "PYTHONPATH": folder}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def apply(mutant: Mutant, path: Path) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: expected one occurrence of {mutant.old!r} in {path.name}")
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
