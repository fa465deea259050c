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
TESTS = [
    f"tests/core/test_{name}.py"
    for name in (
        "gae_known_answers",
        "estimators_known_answers",
        "estimators_matrix",
        "gae_matrix",
        "gae_containment",
        "estimators_containment",
    )
]
PASSED, FAILED = 0, 1


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


CANARY = Mutant("nothing works", "solve.py", "        chosen.run(problem)", "        pass")

SHARED = [
    CANARY,
    Mutant("GAE: value not subtracted", "estimators/gae.py", "next_value - value", "next_value"),
    Mutant("GAE: no discount", "estimators/gae.py", "step.gamma * step.next_value", "step.next_value"),
    Mutant("GAE: λ dropped", "estimators/gae.py", "step.continues, step.decay", "step.continues, step.gamma"),
    Mutant("GAE: reset dropped", "estimators/gae.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * delta"),
    Mutant("GAE: returns with the reward", "estimators/gae.py", "+ step.inputs[0]", "+ step.inputs[1]"),
    Mutant("V-Trace: ρ not clipped", "estimators/vtrace.py", "minimum(ratio, rho_bar) * delta", "ratio * delta"),
    Mutant("V-Trace: c not clipped", "estimators/vtrace.py", "step.decay * minimum(ratio, c_bar)", "step.decay * ratio"),
    Mutant("V-Trace: c from ρ̄", "estimators/vtrace.py", "minimum(ratio, c_bar)", "minimum(ratio, rho_bar)"),
    Mutant("V-Trace: ratio inverted", "estimators/vtrace.py", "ratio = exp(target - behaviour)", "ratio = exp(behaviour - target)"),
    Mutant("V-Trace: advantages from values", "estimators/vtrace.py", "(step.next_value + after)", "step.next_value"),
    Mutant("V-Trace: advantages clipped by ρ̄", "estimators/vtrace.py", "_, _, rho_bar_pg = step.params", "rho_bar_pg, _, _ = step.params"),
    Mutant("Retrace: the trace of this action", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "minimum(exp(step.inputs[1] - step.inputs[2]), c_bar)"),
    Mutant("Retrace: c not clipped", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "exp(target_after - behaviour_after)"),
    Mutant("Retrace: advantages without the target after", "estimators/retrace.py", "step.following[0] + after", "step.following[0]"),
    Mutant("Retrace: advantages drop the bootstrap", "estimators/retrace.py", "step.following[0] + after, step.next_value", "step.following[0] + after, 0"),
    Mutant("Retrace: advantages not weighted", "estimators/retrace.py", "weight * (reward", "(reward"),
    Mutant("λ-returns: all of the next value", "estimators/returns.py", "(step.gamma - beta) * step.next_value", "step.gamma * step.next_value"),
    Mutant("λ-returns: none of it at cuts", "estimators/returns.py", "(step.gamma - beta)", "(step.gamma - step.decay)"),
    Mutant("traces: reset dropped", "estimators/traces.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * x"),
    Mutant("traces: the state's flag forgotten", "estimators/traces.py", "done.unsqueeze(window.time_dim).expand(window.shape)", "None"),
    Mutant("traces: the last flag not handed over", "estimators/traces.py", "done.select(time, -1).clone()", "done.select(time, 0).clone()"),
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
        Mutant("carry seeded", "kernels/serial.py", "            for j in range(width):\n                state[j] = at(initial, zero, group, 0, left + j)\n            for t in range(steps - 1", "            for j in range(width):\n                state[j] = at(initial, zero, group, 0, left + j) + 1\n            for t in range(steps - 1"),
        Mutant("carry kept from the rows before", "kernels/serial.py", "            for j in range(width):\n                state[j] = at(initial, zero, group, 0, left + j)\n            for t in range(steps - 1", "            for t in range(steps - 1"),
        Mutant("backward: gate multiplies", "kernels/serial.py", "select(beta == zero, zero, beta * after)", "beta * after"),
        Mutant("backward: mask ignored", "kernels/serial.py", "if not flag(mask, True, group, t, lane):\n                        clear(outputs, group, t, lane, zero)\n                        if", "if False:\n                        clear(outputs, group, t, lane, zero)\n                        if"),
        Mutant("backward: masked cells not written", "kernels/serial.py", "clear(outputs, group, t, lane, zero)\n                        if", "if"),
        Mutant("backward: skip severs", "kernels/serial.py", "if not skip:", "if True:"),
        Mutant("backward: reset skips", "kernels/serial.py", "if not skip:", "if False:"),
        Mutant("backward: a masked end is no seal", "kernels/serial.py", "sealed[j] = True", "sealed[j] = False"),
        Mutant("backward: seals stay", "kernels/serial.py", "                    last[j] = False\n                    sealed[j] = False\n", "                    last[j] = False\n"),
        Mutant("backward: terminated a step late", "kernels/serial.py", "flag(terminated, False, group, t, lane) | ended", "flag(terminated, False, group, min(t + 1, steps - 1), lane) | ended"),
        Mutant("backward: truncated a step early", "kernels/serial.py", "                        flag(truncated, False, group, t, lane),", "                        flag(truncated, False, group, max(t - 1, 0), lane),"),
        Mutant("backward: bootstrap of the neighbour lane", "kernels/serial.py", "at(bootstrap, zero, group, t, lane)", "at(bootstrap, zero, group, t, max(lane - 1, 0))"),
        Mutant("backward: following value of the neighbour lane", "kernels/serial.py", "following = column(ahead, j)", "following = column(ahead, max(j - 1, 0))"),
        Mutant("backward: neighbour's value leaks", "kernels/serial.py", "readout(step, state[j], select(continues, after, zero))", "readout(step, state[j], after)"),
        Mutant("discount 0 does not end", "kernels/serial.py", "return now, now * decay, now == 0", "return now, now * decay, False"),
        Mutant("backward: last row of a block dropped", "kernels/serial.py", "width = min(BLOCK, end_lane - left)\n            last", "width = min(BLOCK, end_lane - left) - 1\n            last"),
        Mutant("backward: first step dropped", "kernels/serial.py", "range(steps - 1, -1, -1)", "range(steps - 1, 0, -1)"),
        Mutant("forward: gate multiplies", "kernels/serial.py", "select(beta == zero, zero, beta * before)", "beta * before"),
        Mutant("forward: resets a step early", "kernels/serial.py", "(over[j] | (flagged & starts_at)) == False", "(over[j] | flagged) == False"),
        Mutant("forward: starts ignored", "kernels/serial.py", "(over[j] | (flagged & starts_at)) == False", "over[j] == False"),
        Mutant("forward: ends ignored", "kernels/serial.py", "over[j] = flagged & (not starts_at)", "over[j] = False"),
        Mutant("forward: masks never sever", "kernels/serial.py", "over[j] |= not skip", "over[j] |= False"),
        Mutant("forward: skipped steps sever", "kernels/serial.py", "over[j] |= not skip", "over[j] |= True"),
        Mutant("forward: the window before forgotten", "kernels/serial.py", "over[j] = flag(departed, False, group, 0, left + j)", "over[j] = False"),
        Mutant("minimum is no bound", "kernels/serial.py", "bound if x > bound else x", "x if x > bound else x"),
        Mutant("time and lanes swapped", "backends/cpu.py", "x if problem.time_dim == 0 else x.T", "x if problem.time_dim == 1 else x.T"),
        Mutant("last span dropped", "backends/cpu.py", "in pairwise(edges) if low < high]", "in list(pairwise(edges))[:-1] if low < high]"),
    ],
    "triton": [
        Mutant("combine: reset lets NaN through", "kernels/scan.py", "through = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)", "through = beta_next * alpha"),
        Mutant("combine: overflow poisons", "kernels/scan.py", "through = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)", "through = tl.where(beta_next == 0, 0, beta_next * alpha)"),
        Mutant("combine: β not multiplied", "kernels/scan.py", "product = tl.where((beta_next == 0) | (beta == 0), 0, beta_next * beta)", "product = tl.where((beta_next == 0) | (beta == 0), 0, beta_next)"),
        Mutant("combine: rounding of products lost", "kernels/scan.py", "tl.where(exact, 0, error)", "tl.where(exact, 0, 0 * error)"),
        Mutant("carry: gate multiplies", "kernels/scan.py", "alpha + tl.where((beta == 0) | (carried == 0), 0, beta * carried)", "alpha + beta * carried"),
        Mutant("carry dropped between tiles", "kernels/scan.py", "        state = at_end(scanned, BLOCK_TIME)\n", ""),
        Mutant("carry taken from the wrong end", "kernels/scan.py", "== BLOCK_TIME - 1", "== 0"),
        Mutant("carry seeded", "kernels/scan.py", "state = load(initial, group, 0, lane, lane < lanes, DTYPE)", "state = load(initial, group, 0, lane, lane < lanes, DTYPE) + 1"),
        Mutant("neighbour value from t", "kernels/scan.py", "load(inputs[i], group, neighbour, lane, inner, DTYPE)", "load(inputs[i], group, t, lane, inner, DTYPE)"),
        Mutant("mask ignored", "kernels/scan.py", "alpha = tl.where(valid, alpha, 0)", "alpha = tl.where(inside, alpha, 0)"),
        Mutant("masked cells not cleared", "kernels/scan.py", "tl.where(valid, results[i], 0), mask=inside", "results[i], mask=inside"),
        Mutant("skip severs", "kernels/scan.py", "1 if SKIP else 0", "0"),
        Mutant("reset skips", "kernels/scan.py", "1 if SKIP else 0", "1"),
        Mutant("seals ignored", "kernels/scan.py", "severed = inner & (valid_before == 0)", "severed = inner & (position < 0)"),
        Mutant("masked neighbours not passed over", "kernels/scan.py", "value = carry_on(value, passed, carried[i])", "value = values[i]"),
        Mutant("neighbours not carried between tiles", "kernels/scan.py", "value = carry_on(value, passed, carried[i])", "value = value"),
        Mutant("terminated a step late", "kernels/scan.py", "done = flag(terminated, group, t, lane, inside)", "done = flag(terminated, group, neighbour, lane, inner)"),
        Mutant("truncated a step early", "kernels/scan.py", "cut = flag(truncated, group, t, lane, inside)", "cut = flag(truncated, group, t - 1, lane, inside & (t > 0))"),
        Mutant("bootstrap only at the end", "kernels/scan.py", "inside & (cut | none_or_over)", "inside & none_or_over"),
        Mutant("discount 0 does not end", "kernels/scan.py", "done = done | (gamma_now == 0)", "done = done"),
        Mutant("lanes and steps swapped", "kernels/scan.py", "t * stream[2] + lane * stream[3]", "t * stream[3] + lane * stream[2]"),
        Mutant("first step dropped", "kernels/scan.py", "inside = (position < steps)", "inside = (position < steps - 1)"),
        Mutant("forward: own flag", "kernels/scan.py", "departs = flag(terminated, group, neighbour, lane, inner)", "departs = flag(terminated, group, t, lane, inner)"),
        Mutant("forward: starts ignored", "kernels/scan.py", "starts = starts | done | cut", "starts = starts"),
        Mutant("forward: the window before forgotten", "kernels/scan.py", "tl.where(flag(departed, group, 0, lane, lane < lanes), 1.0, 0.0)", "zero"),
        Mutant("state after: of this step", "kernels/scan.py", "tl.maximum(position - 1, 0)", "tl.maximum(position, 0)"),
        Mutant("state after: not carried", "kernels/scan.py", "tl.where(position == 0, carried, tl.gather(tile, index, 1))", "tl.gather(tile, index, 1)"),
        Mutant("minimum is no bound", "kernels/scan.py", "tl.where(x > bound, bound, x)", "x"),
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
        for name in ("tests/conftest.py", "tests/oracles.py", "tests/oracles_estimators.py", "pyproject.toml"):
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
