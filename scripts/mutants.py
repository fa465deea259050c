"""Break the code on purpose, one line at a time, and check that the tests notice every time.

Each mutant is applied to a copy of the package, and the tests that concern it run against the copy until the first
failure. A mutant that they let pass survives, and makes this program fail.

    python scripts/mutants.py reference    equations, boundary rule and validation, on the backend that compiles nothing
    python scripts/mutants.py cpu          the serial walk
    python scripts/mutants.py triton       the parallel scan, on a GPU (the interpreter scans serially: two survive there)
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    f"tests/core/test_{name}.py"
    for name in (
        "gae_known_answers",
        "estimators_known_answers",
        "estimators_streaming",
        "estimators_packed",
        "gae_containment",
        "estimators_containment",
        "gae_matrix",
        "estimators_matrix",
        "estimators_precision",
    )
]
PASSED, FAILED, NOT_RUN = 0, 1, 4


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Those that should notice, as pytest's -k selects them from tests/core."""


SHARED = [
    Mutant("nothing works", "solve.py", "        chosen.run(problem)", "        pass", "test_literal_numbers"),
    Mutant("GAE: value not subtracted", "estimators/gae.py", "next_value - value", "next_value", "gae"),
    Mutant("GAE: no discount", "estimators/gae.py", "step.gamma * step.next_value", "step.next_value", "gae"),
    Mutant("GAE: λ dropped", "estimators/gae.py", "step.continues, step.decay", "step.continues, step.gamma", "gae"),
    Mutant("GAE: reset dropped", "estimators/gae.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * delta", "gae"),
    Mutant("GAE: returns with the reward", "estimators/gae.py", "+ step.inputs[0]", "+ step.inputs[1]", "gae"),
    Mutant("V-Trace: ρ not clipped", "estimators/vtrace.py", "minimum(ratio, rho_bar) * delta", "ratio * delta", "vtrace"),
    Mutant("V-Trace: c not clipped", "estimators/vtrace.py", "lambda_ * minimum(ratio, c_bar)", "lambda_ * ratio", "vtrace"),
    Mutant("V-Trace: λ dropped", "estimators/vtrace.py", "trace = lambda_ * minimum", "trace = minimum", "vtrace"),
    Mutant("Retrace: λ dropped", "estimators/retrace.py", "trace = lambda_ * minimum", "trace = minimum", "retrace"),
    Mutant("V-Trace: c from ρ̄", "estimators/vtrace.py", "minimum(ratio, c_bar)", "minimum(ratio, rho_bar)", "vtrace"),
    Mutant("V-Trace: ratio inverted", "estimators/vtrace.py", "ratio = exp(target - behaviour)", "ratio = exp(behaviour - target)", "vtrace"),
    Mutant("V-Trace: advantages from values", "estimators/vtrace.py", "(step.next_value + after)", "step.next_value", "vtrace"),
    Mutant("V-Trace: advantages clipped by ρ̄", "estimators/vtrace.py", "_, _, _, rho_bar_pg = step.params", "_, rho_bar_pg, _, _ = step.params", "vtrace"),
    Mutant("Retrace: the trace of this action", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "minimum(exp(step.inputs[1] - step.inputs[2]), c_bar)", "retrace"),
    Mutant("Retrace: c not clipped", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "exp(target_after - behaviour_after)", "retrace"),
    Mutant("Retrace: advantages without the target after", "estimators/retrace.py", "step.following[0] + after", "step.following[0]", "retrace"),
    Mutant("Retrace: advantages drop the bootstrap", "estimators/retrace.py", "step.following[0] + after, step.next_value", "step.following[0] + after, 0", "retrace"),
    Mutant("Retrace: advantages not weighted", "estimators/retrace.py", "weight * (reward", "(reward", "retrace"),
    Mutant("λ-returns: all of the next value", "estimators/returns.py", "(step.gamma - beta) * step.next_value", "step.gamma * step.next_value", "lambda_returns or discounted"),
    Mutant("λ-returns: none of it at cuts", "estimators/returns.py", "(step.gamma - beta)", "(step.gamma - step.decay)", "lambda_returns or discounted"),
    Mutant("traces: reset dropped", "estimators/traces.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * x", "traces"),
    Mutant("traces: the state's flag forgotten", "estimators/traces.py", "else window.in_time(done)", "else None", "streaming"),
    Mutant("traces: the last flag not handed over", "estimators/traces.py", "pick(done, last, window)", "pick(done, 0 * last, window)", "streaming"),
    Mutant("traces: a masked end severs nothing", "estimators/traces.py", "over = over | ~pick", "over = over & ~pick", "streaming"),
    Mutant("traces: skipped windows end nothing", "estimators/traces.py", "pick(done, last, window), some\n", "pick(done, last, window), torch.ones_like(some)\n", "streaming"),
    Mutant("packed: sequences run on", "backends/reference.py", "torch.where(row.begins, 0, beta)", "beta", "packed and prefix"),
    Mutant("packed: neighbours of the sequence before", "backends/reference.py", "none = index < self.first", "none = index < 0", "packed and gae"),
    Mutant("packed: edge values in disorder", "backends/reference.py", "right=True", "right=False", "packed and test_an_edge"),
    Mutant("rule: terminations bootstrap", "boundaries.py", "select(ended, 0.0, select", "select(cut, 0.0, select", "gae and every"),
    Mutant("rule: a cut does not end", "boundaries.py", "(ended | cut) == 0", "ended == 0", "gae and every"),
    Mutant("rule: a termination does not end", "boundaries.py", "(ended | cut) == 0", "cut == 0", "gae and every"),
    Mutant("rule: truncation wins", "boundaries.py", "ended = terminated | (", "ended = (terminated & (cut == 0)) | (", "gae and every"),
    Mutant("rule: truncations ignored", "boundaries.py", "cut = truncated | last", "cut = last", "gae and every"),
    Mutant("rule: the window's end is no cut", "boundaries.py", "cut = truncated | last", "cut = truncated", "gae and every"),
    Mutant("rule: cuts take the neighbour", "boundaries.py", "select(cut, bootstrap, ahead)", "select(last, bootstrap, ahead)", "gae and every"),
    Mutant("rule: seals ignored", "boundaries.py", "terminated | (sealed & (cut == 0))", "terminated", "gae and every"),
    Mutant("rule: seals beat truncations", "boundaries.py", "(sealed & (cut == 0))", "sealed", "gae and every"),
    Mutant("sparse: missing values are 0", "validation.py", "torch.full(window.shape, math.nan", "torch.full(window.shape, 0.0", "final_values"),
    Mutant("sparse: edge misplaced", "validation.py", "window.num_steps - 1, device", "0, device", "final_values"),
]  # fmt: skip

CPU = [
    Mutant("nothing works", "backends/cpu.py", "        kernel(tuple(arguments), spans[0])", "        pass", "test_literal_numbers"),
    Mutant("carry seeded", "kernels/serial.py", "at(initial, zero, group, 0, left + j)\n            for", "at(initial, zero, group, 0, left + j) + 1\n            for", "test_linear_recurrence"),
    Mutant("carry kept from the rows before", "kernels/serial.py", "state[j] = at(initial, zero, group, 0, left + j)\n            for", "pass\n            for", "test_linear_recurrence or test_permuting"),
    Mutant("backward: gate multiplies", "kernels/serial.py", "select(beta == zero, zero, beta * after)", "beta * after", "test_gae_containment"),
    Mutant("backward: masked step not skipped", "kernels/serial.py", "sever(mask, memory, j)\n                        continue", "sever(mask, memory, j)", "gae and test_every_pattern"),
    Mutant("backward: masked cells not written", "kernels/serial.py", "clear(outputs, group, t, lane, zero)\n                        if", "if", "gae and test_every_pattern"),
    Mutant("backward: skip severs", "kernels/serial.py", "if not skip:", "if True:", "gae and test_every_pattern"),
    Mutant("backward: reset skips", "kernels/serial.py", "if not skip:", "if False:", "gae and test_every_pattern"),
    Mutant("backward: a masked end is no seal", "kernels/serial.py", "memory[1][j] = True", "memory[1][j] = False", "gae and test_every_pattern"),
    Mutant("backward: a masked end is an end", "kernels/serial.py", '"memory[0][j] = False", "memory[1][j] = True"', '"memory[0][j] = True", "memory[1][j] = True"', "gae and test_every_pattern"),
    Mutant("backward: seals stay", "kernels/serial.py", '"memory[0][j] = False", "memory[1][j] = False", *rows', '"memory[0][j] = False", *rows', "gae and test_every_pattern"),
    Mutant("backward: ends stay", "kernels/serial.py", '"memory[0][j] = False", "memory[1][j] = False", *rows', '"memory[1][j] = False", *rows', "gae and test_every_pattern"),
    Mutant("backward: memory of the rows before", "kernels/serial.py", '"memory[0][:] = True", "memory[1][:] = False"', '"memory[1][:] = False"', "gae and test_every_pattern"),
    Mutant("backward: terminated a step late", "kernels/serial.py", "flag(terminated, False, group, t, lane) | ended", "flag(terminated, False, group, min(t + 1, steps - 1), lane) | ended", "test_literal_numbers"),
    Mutant("backward: truncated a step early", "kernels/serial.py", "                        flag(truncated, False, group, t, lane),", "                        flag(truncated, False, group, max(t - 1, 0), lane),", "test_literal_numbers"),
    Mutant("backward: bootstrap of the neighbour lane", "kernels/serial.py", "at(bootstrap, zero, group, t, lane)", "at(bootstrap, zero, group, t, max(lane - 1, 0))", "gae and test_layouts_agree or gae_matrix"),
    Mutant("backward: the neighbour is the step itself", "kernels/serial.py", '"t + (position > 0)"', '"t"', "test_a_window_with_values"),
    Mutant("backward: the window's end is no end", "kernels/serial.py", "return position == 0, False", "return False, False", "test_a_window_with_values"),
    Mutant("backward: following value of the neighbour lane", "kernels/serial.py", "memory[2][{i}][j], ", "memory[2][{i}][max(j - 1, 0)], ", "gae_matrix"),
    Mutant("backward: neighbour's value leaks", "kernels/serial.py", "readout(step, state[j], select(continues, after, zero))", "readout(step, state[j], after)", "test_retrace or test_vtrace"),
    Mutant("discount 0 does not end", "kernels/serial.py", "return now, now * decay, now == 0", "return now, now * decay, False", "test_a_zero_discount and gae"),
    Mutant("backward: last row of a block dropped", "kernels/serial.py", "width = min(BLOCK, end_lane - left)\n            forget", "width = min(BLOCK, end_lane - left) - 1\n            forget", "test_literal_numbers"),
    Mutant("backward: first step dropped", "kernels/serial.py", "range(longest(offsets, steps, left, width)):\n                from_end", "range(longest(offsets, steps, left, width) - 1):\n                from_end", "test_literal_numbers"),
    Mutant("packed: the first step of the sequence before", "kernels/serial.py", "if t < start_of(offsets, t, lane)", "if t < start_of(offsets, t, lane) - 1", "test_every_sequence and gae"),
    Mutant("packed: all as long as the first", "kernels/serial.py", "most = max(most, offsets[lane + 1] - offsets[lane])", "most = offsets[left + 1] - offsets[left]", "test_every_sequence and gae"),
    Mutant("packed: forward runs on", "kernels/serial.py", "if t >= end_of(offsets, t + 1, lane)", "if t > end_of(offsets, t + 1, lane)", "test_every_sequence and prefix"),
    Mutant("forward: gate multiplies", "kernels/serial.py", "select(beta == zero, zero, beta * before)", "beta * before", "estimators_containment and trace"),
    Mutant("forward: resets a step early", "kernels/serial.py", "(over[j] | (flagged & starts_at)) == False", "(over[j] | flagged) == False", "test_eligibility_traces"),
    Mutant("forward: starts ignored", "kernels/serial.py", "(over[j] | (flagged & starts_at)) == False", "over[j] == False", "test_prefix_sums"),
    Mutant("forward: ends ignored", "kernels/serial.py", "over[j] = flagged & (not starts_at)", "over[j] = False", "test_eligibility_traces"),
    Mutant("forward: masks never sever", "kernels/serial.py", "over[j] |= not skip", "over[j] |= False", "test_every_pattern_of_four"),
    Mutant("forward: skipped steps sever", "kernels/serial.py", "over[j] |= not skip", "over[j] |= True", "test_every_pattern_of_four"),
    Mutant("forward: the window before forgotten", "kernels/serial.py", "over[j] = flag(departed, False, group, 0, left + j)", "over[j] = False", "streaming"),
    Mutant("minimum is no bound", "kernels/serial.py", "bound if x > bound else x", "x if x > bound else x", "test_vtrace"),
    Mutant("time and lanes swapped", "backends/cpu.py", "x if problem.time_dim == 0 else x.T", "x if problem.time_dim == 1 else x.T", "test_literal_numbers"),
    Mutant("strides ignored", "backends/cpu.py", '"C" if contiguous else "A"', '"C"', "gae_matrix"),
    Mutant("last span dropped", "backends/cpu.py", "in pairwise(edges) if low < high]", "in list(pairwise(edges))[:-1] if low < high]", "several_threads and discounted"),
]  # fmt: skip

TRITON = [
    Mutant("nothing works", "backends/triton.py", "        scan.scan[(programs,)]", "        (lambda *_, **__: None)", "test_literal_numbers"),
    Mutant("combine: reset lets NaN through", "kernels/scan.py", "through = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)", "through = beta_next * alpha", "containment"),
    Mutant("combine: overflow poisons", "kernels/scan.py", "through = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)", "through = tl.where(beta_next == 0, 0, beta_next * alpha)", "overflows"),
    Mutant("combine: β not multiplied", "kernels/scan.py", "return alpha_next + through, product,", "return alpha_next + through, beta_next,", "gae_matrix or test_linear_recurrence"),
    Mutant("combine: rounding of products lost", "kernels/scan.py", "tl.where(exact, 0, error)", "tl.where(exact, 0, 0 * error)", "precision"),
    Mutant("carry: gate multiplies", "kernels/scan.py", "alpha + tl.where((beta == 0) | (carried == 0), 0, beta * carried)", "alpha + beta * carried", "containment"),
    Mutant("carry dropped between tiles", "kernels/scan.py", "        state = at_end(scanned, BLOCK_TIME)\n", "", "gae_matrix or longer"),
    Mutant("carry taken from the wrong end", "kernels/scan.py", "== BLOCK_TIME - 1", "== 0", "gae_matrix or longer"),
    Mutant("carry seeded", "kernels/scan.py", "state = load(initial, group, 0, lane, lane < lanes, DTYPE)", "state = load(initial, group, 0, lane, lane < lanes, DTYPE) + 1", "test_linear_recurrence"),
    Mutant("neighbour value from t", "kernels/scan.py", "inputs[i], group, neighbour, lane, inner, DTYPE)", "inputs[i], group, t, lane, inner, DTYPE)", "test_a_window_with_values"),
    Mutant("mask ignored", "kernels/scan.py", "alpha = tl.where(valid, alpha, 0)", "alpha = tl.where(inside, alpha, 0)", "gae and (test_every or test_literal)"),
    Mutant("masked cells not cleared", "kernels/scan.py", "tl.where(valid, results[i], 0), mask=inside", "results[i], mask=inside", "gae and (test_every or test_literal)"),
    Mutant("skip severs", "kernels/scan.py", "beta = tl.where(valid, beta, 1)", "beta = tl.where(valid, beta, 0)", "gae and (test_every or test_literal)"),
    Mutant("reset severs nothing", "kernels/scan.py", "severed = inner & (valid_before == 0)", "severed = inner & (inner == 0)", "gae and (test_every or test_literal)"),
    Mutant("masked neighbours not passed over", "kernels/scan.py", "value = carry_on(value, passed, carried[i])", "value = values[i]", "gae and test_every"),
    Mutant("neighbours not carried between tiles", "kernels/scan.py", "value = carry_on(value, passed, carried[i])", "value = value", "gae_matrix or longer"),
    Mutant("terminated a step late", "kernels/scan.py", "done = flag(terminated, group, t, lane, inside)", "done = flag(terminated, group, neighbour, lane, inner)", "gae and (test_every or test_literal)"),
    Mutant("truncated a step early", "kernels/scan.py", "cut = flag(truncated, group, t, lane, inside)", "cut = flag(truncated, group, t - 1, lane, inside & (t > 0))", "gae and (test_every or test_literal)"),
    Mutant("bootstrap only at the end", "kernels/scan.py", "inside & (cut | none_or_over)", "inside & none_or_over", "gae and (test_every or test_literal)"),
    Mutant("discount 0 does not end", "kernels/scan.py", "done = done | (gamma_now == 0)", "done = done", "test_a_zero_discount"),
    Mutant("lanes and steps swapped", "kernels/scan.py", "t * stream[2] + lane * stream[3]", "t * stream[3] + lane * stream[2]", "test_literal_numbers or test_layouts"),
    Mutant("first step dropped", "kernels/scan.py", "inside = (position < length)", "inside = (position < length - 1)", "gae and (test_every or test_literal)"),
    Mutant("forward: own flag", "kernels/scan.py", "departs = flag(terminated, group, neighbour, lane, inner)", "departs = flag(terminated, group, t, lane, inner)", "test_eligibility_traces"),
    Mutant("forward: starts ignored", "kernels/scan.py", "starts = starts | done | cut", "starts = starts", "test_prefix_sums"),
    Mutant("forward: the window before forgotten", "kernels/scan.py", "tl.where(flag(departed, group, 0, lane, lane < lanes), 1.0, 0.0)", "zero", "streaming"),
    Mutant("state after: of this step", "kernels/scan.py", "tl.maximum(position - 1, 0)", "tl.maximum(position, 0)", "test_vtrace or test_retrace"),
    Mutant("state after: not carried", "kernels/scan.py", "tl.where(position == 0, carried, tl.gather(tile, index, 1))", "tl.gather(tile, index, 1)", "vtrace and (matrix or longer)"),
    Mutant("minimum is no bound", "kernels/scan.py", "tl.where(x > bound, bound, x)", "x", "test_vtrace"),
    Mutant("packed: sequences start at 0", "kernels/scan.py", "t = first + length - 1 - position", "t = length - 1 - position", "test_every_sequence and gae"),
    Mutant("packed: all as long as the longest", "kernels/scan.py", "inside = (position < length) & (lane < lanes)", "inside = (position < longest) & (lane < lanes)", "test_every_sequence and gae"),
    Mutant("packed: forward from 0", "kernels/scan.py", "t = first + position", "t = 0 * first + position", "test_every_sequence and prefix"),
]  # fmt: skip

MUTANTS = {"reference": SHARED, "cpu": CPU, "triton": TRITON}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=MUTANTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tested", action="store_true", help="the tests have just passed without a mutant")
    options = parser.parse_args()
    mutants = MUTANTS[options.backend]
    os.environ |= {"RL_TRITON_TEST_BACKENDS": options.backend, "NUMBA_OPT": "0"}  # compile fast
    for name in (
        "hypothesis",
        "numba",
        "torch",
        "triton",
    ):  # what a test process would spend most of its time importing
        with suppress(ImportError):
            import_module(name)
    intact = Mutant("none", "", "", "", " or ".join(sorted({f"({mutant.tests})" for mutant in mutants})))
    everything = mutants if options.tested else [intact, *mutants]
    outcomes = run(everything, options.jobs)
    outcomes = list(tqdm(outcomes, total=len(everything), desc=f"mutants ({options.backend})", disable=None))
    killed = 0
    for mutant, code, output in outcomes:
        if mutant is intact and code != PASSED:
            print(output, "the tests fail without a mutant", sep="\n")
            return 1
        if mutant is not intact and code > FAILED:
            print(f"{mutant.name}: the tests did not run\n{output[-2000:]}")
        elif mutant is not intact and code == PASSED:
            print(f"survived: {mutant.name}")
        else:
            killed += mutant is not intact
    print(f"mutants ({options.backend}): {killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


class Outcome(NamedTuple):
    mutant: Mutant
    code: int
    """What pytest returned, or minus the signal that ended it."""
    output: str


def run(mutants: Sequence[Mutant], jobs: int) -> Iterator[Outcome]:
    """Test every mutant in a process of its own, some at a time."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(mutants)), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                copy = Path(folder) / str(len(waiting))
                process = fork.Process(target=test, args=(waiting[-1], copy))
                process.start()
                running[process.sentinel] = process, waiting.pop(), copy
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, mutant, copy = running.pop(sentinel)
                process.join()
                yield Outcome(mutant, process.exitcode, (copy / "log").read_text())
                shutil.rmtree(copy)


def test(mutant: Mutant, copy: Path) -> None:
    """Run a mutant's tests on a copy that has it."""
    for name in ("rl_triton_core", "tests/core"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/conftest.py", "tests/oracles.py", "tests/oracles_estimators.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with Path("log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        if mutant.old:
            apply(mutant, copy / "rl_triton_core" / mutant.file)
        sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", mutant.tests, *FILES]))


def apply(mutant: Mutant, path: Path) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        print(f"expected one occurrence of {mutant.old!r} in {path.name}")
        sys.exit(NOT_RUN)
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
