"""Break the code on purpose, one line at a time, and check that the tests notice every time.

Each mutant is applied to a copy of the package, and the tests that concern it run against the copy until the first
failure. A mutant that they let pass survives, and makes this program fail.

    python scripts/mutants.py reference    equations, boundary rule and validation, on the backend that compiles nothing
    python scripts/mutants.py cpu          the serial walk
    python scripts/mutants.py triton       the parallel scan, on a GPU (the interpreter scans serially and replays nothing: some survive there)
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
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
        "launches",
        "fast_path",
        "normalization",
        "backends",
        "conventions",
        "estimators_autograd",
        "estimators_bad_input",
    )
]
SLOW_TO_IMPORT = ("hypothesis", "numba", "packaging.version", "torch", "triton")
PASSED, FAILED, NOT_RUN = 0, 1, 4


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Those that should notice, as pytest's -k selects them from tests/core."""


SHARED = [
    Mutant("nothing works", "_internal/solve.py", "        chosen.run(problem)", "        pass", "test_literal_numbers"),
    Mutant("backends: a normalisation of one's own is ignored", "normalization.py", "backend.normalize(", "Backend.normalize(", "test_a_backend_normalizes"),
    Mutant("backends: none sums expectations", "_internal/solve.py", "choose(backend, problem.like.device).supports_expectation", "False", "test_an_expectation_is_summed"),
    Mutant("backends: all sum expectations", "_internal/solve.py", "choose(backend, problem.like.device).supports_expectation", "True", "test_an_expectation_is_summed"),
    Mutant("GAE: value not subtracted", "estimators/gae.py", "next_value - value", "next_value", "gae_known_answers"),
    Mutant("GAE: no discount", "estimators/gae.py", "step.gamma * step.next_value", "step.next_value", "gae_known_answers"),
    Mutant("GAE: λ dropped", "estimators/gae.py", "step.continues, step.decay", "step.continues, step.gamma", "gae_known_answers"),
    Mutant("GAE: reset dropped", "estimators/gae.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * delta", "gae_known_answers"),
    Mutant("GAE: returns with the reward", "estimators/gae.py", "+ step.inputs[0]", "+ step.inputs[1]", "gae_known_answers"),
    Mutant("linear: α and β exchanged", "_internal/linear.py", "    return alpha, beta\n", "    return beta, alpha\n", "test_every_length and linear"),
    Mutant("linear: always in reverse", "estimators/linear.py", "LINEAR_BACKWARD if reverse else LINEAR_FORWARD", "LINEAR_BACKWARD", "test_an_initial_state_of_a_recurrence"),
    Mutant("linear: another state handed out", "_internal/linear.py", "return (state,)", "return (after,)", "test_every_length and linear"),
    Mutant("features: one discount for all", "_internal/solve.py", "gamma.unsqueeze(2).expand(like.shape)", "gamma[:1].unsqueeze(2).expand(like.shape)", "test_a_decay_of_any_form"),
    Mutant("features: initial values transposed", "_internal/solve.py", "initial.flatten(1)", "initial.flip(1).flatten(1)", "test_every_kind_of_features or streaming"),
    Mutant("V-Trace: ρ not clipped", "estimators/vtrace.py", "minimum(ratio, rho_bar) * delta", "ratio * delta", "test_vtrace"),
    Mutant("V-Trace: c not clipped", "estimators/vtrace.py", "lambda_ * minimum(ratio, c_bar)", "lambda_ * ratio", "test_vtrace"),
    Mutant("V-Trace: λ dropped", "estimators/vtrace.py", "trace = lambda_ * minimum", "trace = minimum", "test_vtrace"),
    Mutant("Retrace: λ dropped", "estimators/retrace.py", "trace = lambda_ * minimum", "trace = minimum", "test_retrace"),
    Mutant("V-Trace: c from ρ̄", "estimators/vtrace.py", "minimum(ratio, c_bar)", "minimum(ratio, rho_bar)", "test_vtrace"),
    Mutant("V-Trace: ratio inverted", "estimators/vtrace.py", "ratio = exp(target - behaviour)", "ratio = exp(behaviour - target)", "test_vtrace"),
    Mutant("V-Trace: advantages from values", "estimators/vtrace.py", "(step.next_value + after)", "step.next_value", "test_vtrace"),
    Mutant("V-Trace: advantages clipped by ρ̄", "estimators/vtrace.py", "_, _, _, rho_bar_pg = step.params", "_, rho_bar_pg, _, _ = step.params", "test_vtrace"),
    Mutant("Retrace: the trace of this action", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "minimum(exp(step.inputs[1] - step.inputs[2]), c_bar)", "test_retrace"),
    Mutant("Retrace: c not clipped", "estimators/retrace.py", "minimum(exp(target_after - behaviour_after), c_bar)", "exp(target_after - behaviour_after)", "test_retrace or test_extreme"),
    Mutant("Retrace: advantages without the target after", "estimators/retrace.py", "step.next_inputs[0] + after", "step.next_inputs[0]", "test_retrace"),
    Mutant("Retrace: advantages drop the bootstrap", "estimators/retrace.py", "step.next_inputs[0] + after, step.next_value", "step.next_inputs[0] + after, 0", "test_retrace"),
    Mutant("Retrace: advantages not weighted", "estimators/retrace.py", "weight * (reward", "(reward", "test_retrace"),
    Mutant("λ-returns: all of the next value", "estimators/returns.py", "(step.gamma - beta) * step.next_value", "step.gamma * step.next_value", "test_lambda_returns or test_discounted"),
    Mutant("λ-returns: none of it at cuts", "estimators/returns.py", "(step.gamma - beta)", "(step.gamma - step.decay)", "test_lambda_returns or test_discounted"),
    Mutant("traces: reset dropped", "estimators/traces.py", "select(step.continues, step.decay, 0)", "step.decay + 0 * x", "test_eligibility_traces"),
    Mutant("traces: the state's flag forgotten", "estimators/traces.py", "else layout.expand_over_time(done)", "else None", "streaming"),
    Mutant("traces: the last flag not handed over", "estimators/traces.py", "pick(done, last, layout)", "pick(done, 0 * last, layout)", "streaming"),
    Mutant("traces: a masked end severs nothing", "estimators/traces.py", "over = over | ~pick", "over = over & ~pick", "streaming"),
    Mutant("traces: skipped windows end nothing", "estimators/traces.py", "pick(done, last, layout), some\n", "pick(done, last, layout), torch.ones_like(some)\n", "streaming"),
    Mutant("traces: a decay of 0 ends the episode", "_internal/backends/reference.py", "terminated, truncated = row.flag(problem.terminated),", "terminated, truncated = row.flag(problem.terminated) | (torch.is_tensor(problem.gamma) and row.read(problem.gamma, dtype) == 0),", "matrix and random and traces"),
    Mutant("gradient: none by a factor of 0", "_internal/backends/reference.py", "factor * torch.where((factor == 0) & ~state.isfinite(), 0, state)", "torch.where(factor == 0, 0, factor * state)", "test_gradients and linear"),
    Mutant("gradient: of an infinite ratio", "_internal/primitives.py", "torch.where(over, torch.inf, torch.exp(torch.where(over, 0, x)))", "torch.exp(x)", "overflows_and_is_clipped"),
    Mutant("gradient: none by a probability of 0", "_internal/recurrence.py", "(self.probs != 0) | self.values.isfinite()", "self.probs != 0", "probability_of_zero"),
    Mutant("out: shifted views pass", "_internal/validation.py", "a.device == b.device and np.shares_memory", "a.data_ptr() == b.data_ptr() and np.shares_memory", "overlap_an_input_in_part"),
    Mutant("packed: sequences run on", "_internal/backends/reference.py", "torch.where(row.begins, 0, beta)", "beta", "packed and prefix"),
    Mutant("packed: neighbours of the sequence before", "_internal/backends/reference.py", "none = index < self.first", "none = index < 0", "packed and gae"),
    Mutant("packed: edge values in disorder", "_internal/backends/reference.py", "right=True", "right=False", "packed and test_an_edge"),
    Mutant("rule: terminations bootstrap", "boundaries.py", "select(ended, 0.0, select", "select(cut, 0.0, select", "gae and test_every_pattern"),
    Mutant("rule: a cut does not end", "boundaries.py", "(ended | cut) == 0", "ended == 0", "gae and test_every_pattern"),
    Mutant("rule: a termination does not end", "boundaries.py", "(ended | cut) == 0", "cut == 0", "gae and test_every_pattern"),
    Mutant("rule: truncation wins", "boundaries.py", "ended = terminated | (", "ended = (terminated & (cut == 0)) | (", "gae and test_every_pattern"),
    Mutant("rule: truncations ignored", "boundaries.py", "cut = truncated | is_last", "cut = is_last", "gae and test_every_pattern"),
    Mutant("rule: the window's end is no cut", "boundaries.py", "cut = truncated | is_last", "cut = truncated", "gae and test_every_pattern"),
    Mutant("rule: cuts take the neighbour", "boundaries.py", "select(cut, bootstrap, next_value)", "select(is_last, bootstrap, next_value)", "gae and test_every_pattern"),
    Mutant("rule: seals ignored", "boundaries.py", "terminated | (next_is_masked & (cut == 0))", "terminated", "gae and test_every_pattern"),
    Mutant("rule: seals beat truncations", "boundaries.py", "(next_is_masked & (cut == 0))", "next_is_masked", "gae and test_every_pattern"),
    Mutant("sparse: missing values are 0", "_internal/validation.py", "torch.full(layout.shape, math.nan", "torch.full(layout.shape, 0.0", "test_final_values and gae"),
    Mutant("sparse: edge misplaced", "_internal/validation.py", "layout.num_steps - 1, device", "0, device", "test_forms_of_final_values"),
    Mutant("normalisation: correction dropped", "_internal/moments.py", "select(enough, count - correction, 1)", "select(enough, count, 1)", "normalization and test_the_equation"),
    Mutant("normalisation: a floor that is added", "_internal/moments.py", "at_least(floor, root(variance + inside)) + added", "root(variance + inside) + floor + added", "normalization and test_the_equation"),
    Mutant("normalisation: one element is centred", "_internal/moments.py", "return select(enough, mean, 0)", "return mean", "normalization and test_no_more"),
    Mutant("normalisation: no spread divides by zero", "_internal/moments.py", "select(none, 0, 1 / select(none, 1, divisor))", "1 / divisor", "normalization and test_equal"),
    Mutant("normalisation: dimensions merged across gaps", "_internal/moments.py", "strides[-1] == tuple(shape[dim] * stride for stride in inner):", "strides[-1][0] == shape[dim] * inner[0]:", "normalization and test_layouts"),
    Mutant("normalisation: masked cells count", "_internal/backends/reference_moments.py", "merged(valid.double(), x,", "merged(torch.ones_like(x), x,", "normalization and test_the_equation"),
    Mutant("normalisation: every rank by itself", "normalization.py", "all_gather(every, own, group=group)", "every.copy_(own)", "normalization and test_two_processes and not compiled"),
    Mutant("normalisation: overlaps unseen", "normalization.py", "(None if same else advantages, mask)", "(None, mask)", "normalization and test_bad_input"),
    Mutant("fast path: numbers do not count", "_internal/fast_path.py", "            conditions.append(f\"({name} is", "            conditions.count(f\"({name} is", "fast_path and not_alike"),
    Mutant("fast path: types do not count", "_internal/fast_path.py", "or type({name}) is {kind} and {name} ==", "or {name} ==", "fast_path and not_alike"),
    Mutant("fast path: tensors are all alike", "_internal/fast_path.py", "[*conditions, f\"fits({', '.join(tensors)})\"]", "conditions", "fast_path and not_alike"),
    Mutant("fast path: a graph does not count", "_internal/fast_path.py", "conditions.append(f\"graph() is", "conditions.count(f\"graph() is", "fast_path and without_a_graph"),
    Mutant("fast path: strides do not count", "_internal/fast_path.py", "(x.shape, x.stride(), x.dtype", "(x.shape, x.dtype", "fast_path and what_is_alike"),
    Mutant("fast path: alignment does not count", "_internal/fast_path.py", "p{i} & 15 == {x.data_ptr() & 15}", "p{i} == p{i}", "fast_path and not_alike"),
    Mutant("fast path: one place or two", "_internal/fast_path.py", "if first.setdefault(x.data_ptr(), i) != i:", "if False:", "fast_path and in_place"),
    Mutant("fast path: overlap not looked for", "_internal/fast_path.py", "            lines += overlap_guard(x, places, tensors.values())", "            pass", "fast_path and overlap"),
    Mutant("fast path: the recorded pointers", "_internal/fast_path.py", "        return places[x.data_ptr()]", "        return str(x.data_ptr())", "fast_path and made_again"),
    Mutant("fast path: prepared at the first call", "_internal/fast_path.py", "if is_second_call(seen,", "if True or is_second_call(seen,", "fast_path and second_call"),
    Mutant("fast path: any launcher will do", "_internal/fast_path.py", "if len(taken) != 1 or not any(x is STREAM for x in taken[0])", "if not taken", "fast_path and launcher_that"),
    Mutant("fast path: failures escape", "_internal/fast_path.py", "except Exception:  # a copy", "except KeyError:  # a copy", "fast_path and kernel_that"),
    Mutant("gradients: β of the step itself", "_internal/solve.py", "after = torch.cat([beta[:, 1:], torch.zeros_like(beta[:, :1])], dim=1)", "after = beta", "autograd and test_gradients and plain and linear"),
    Mutant("gradients: the state of the step itself", "_internal/solve.py", "before = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], dim=1)", "before = state", "autograd and test_gradients and plain and linear"),
    Mutant("gradients: the scan in the same direction", "_internal/solve.py", "linear_scan(grad.flip(1), after.flip(1), ctx.backend).flip(1)", "linear_scan(grad, after, ctx.backend)", "autograd and test_gradients and plain and linear"),
    Mutant("gradients: none beyond the step", "_internal/solve.py", "return alpha_grad, alpha_grad * before, None", "return grad, alpha_grad * before, None", "autograd and test_gradients and plain and linear"),
    Mutant("conventions: arrivals taken for departures", "conventions.py", "tensor.narrow(dim, 1, layout.num_steps - 1), last", "tensor.narrow(dim, 0, layout.num_steps - 1), last", "conventions and by_hand"),
    Mutant("conventions: the step itself is filler", "conventions.py", "first.unsqueeze(dim), tensor.narrow(dim, 0,", "first.unsqueeze(dim), tensor.narrow(dim, 1,", "conventions and by_hand"),
    Mutant("conventions: no filler after a truncation", "conventions.py", "~shift_right(ended | cut, first, layout)", "~shift_right(ended, first, layout)", "conventions and by_hand"),
    Mutant("conventions: the window before forgotten", "conventions.py", "~shift_right(ended | cut, first, layout)", "~shift_right(ended | cut, 0 * first, layout)", "conventions and by_hand"),
    Mutant("conventions: the edge wins over a final value", "conventions.py", "torch.where(at_end & ~truncated, edge.unsqueeze(dim), final)", "torch.where(at_end, edge.unsqueeze(dim), final)", "conventions and by_hand"),
    Mutant("conventions: the edge for a final value left out", "conventions.py", "torch.where((at_end & truncated).any(dim), math.nan, edge)", "edge", "conventions and loud"),
    Mutant("conventions: PufferLib's rewards stay", "conventions.py", "departing = shift_left(rewards, per_env(\"next_reward\", next_reward, layout), layout)", "departing = rewards", "conventions and by_hand"),
    Mutant("conventions: RLlib's extra slots are steps", "conventions.py", "shift_left(~mask, ", "shift_left(mask, ", "conventions and by_hand"),
    Mutant("conventions: RSL-RL's time-outs terminate", "conventions.py", "Boundaries(done & ~cut, cut,", "Boundaries(done, cut,", "conventions and by_hand"),
    Mutant("conventions: RSL-RL's time-outs end by themselves", "conventions.py", "cut = done & per_step_flags(", "cut = per_step_flags(", "conventions and by_hand"),
]  # fmt: skip

STORED = (
    "\n    store(outputs, group, t, lane, readout(here, result, select(continues, state, zero)))\n    return result, "
)
"""What ends a step of the serial walk, and tells those of its two directions apart."""

CPU = [
    Mutant("nothing works", "_internal/backends/cpu.py", "    together(partial(kernel, tuple(arguments)), spans)", "    pass", "test_literal_numbers"),
    Mutant("carry seeded", "_internal/kernels/serial.py", "at(arguments[10], arguments[15], group, 0, lane), none", "at(arguments[10], arguments[7], group, 0, lane), none", "test_linear_recurrence"),
    Mutant("carry of the first lane", "_internal/kernels/serial.py", "at(arguments[10], arguments[15], group, 0, lane), none", "at(arguments[10], arguments[15], group, 0, 0), none", "test_an_initial_state_of_a_recurrence"),
    Mutant("backward: gate multiplies", "_internal/kernels/serial.py", f"select(beta == zero, zero, beta * state){STORED}False", f"beta * state{STORED}False", "test_gae_containment"),
    Mutant("backward: masked step not skipped", "_internal/kernels/serial.py", "return after if skip else (state, False, True, next_inputs)", "pass", "gae and test_every_pattern"),
    Mutant("backward: masked cells not written", "_internal/kernels/serial.py", "clear(outputs, group, t, lane, zero)\n        return after", "return after", "gae and test_every_pattern"),
    Mutant("backward: skip severs", "_internal/kernels/serial.py", "return after if skip else", "return after if False else", "gae and test_every_pattern"),
    Mutant("backward: reset skips", "_internal/kernels/serial.py", "return after if skip else", "return after if True else", "gae and test_every_pattern"),
    Mutant("backward: a masked end is no seal", "_internal/kernels/serial.py", "(state, False, True, next_inputs)", "(state, False, False, next_inputs)", "gae and test_every_pattern"),
    Mutant("backward: a masked end is an end", "_internal/kernels/serial.py", "(state, False, True, next_inputs)", "(state, True, True, next_inputs)", "gae and test_every_pattern"),
    Mutant("backward: seals stay", "_internal/kernels/serial.py", "return result, False, False, as_many", "return result, False, sealed, as_many", "gae and test_every_pattern"),
    Mutant("backward: ends stay", "_internal/kernels/serial.py", "return result, False, False, as_many", "return result, last, False, as_many", "gae and test_every_pattern"),
    Mutant("backward: terminated a step late", "_internal/kernels/serial.py", "flag(terminated, False, group, t, lane) | ended", "flag(terminated, False, group, min(t + 1, arguments[16] - 1), lane) | ended", "test_literal_numbers"),
    Mutant("backward: truncated a step early", "_internal/kernels/serial.py", "        flag(truncated, False, group, t, lane),", "        flag(truncated, False, group, max(t - 1, 0), lane),", "gae and test_every_pattern"),
    Mutant("backward: bootstrap of the neighbour lane", "_internal/kernels/serial.py", "at(bootstrap, zero, group, t, lane)", "at(bootstrap, zero, group, t, max(lane - 1, 0))", "gae and test_every_length"),
    Mutant("backward: the neighbour stays the same", "_internal/kernels/serial.py", "as_many(now, next_inputs)", "next_inputs", "test_a_window_with_values"),
    Mutant("backward: the window's end is no end", "_internal/kernels/serial.py", "none, sealed = types.boolean(True)", "none, sealed = types.boolean(False)", "test_a_window_with_values"),
    Mutant("backward: neighbour's value leaks", "_internal/kernels/serial.py", "select(continues, state, zero)))\n    return result, False", "state))\n    return result, False", "test_vtrace and terminated"),
    Mutant("discount 0 does not end", "_internal/kernels/serial.py", "return now, now * decay, now == 0", "return now, now * decay, False", "test_a_zero_discount_contains and gae"),
    Mutant("apart: carry kept from the lane before", "_internal/kernels/serial.py", "next_carry = enter(arguments, group, next_lane)", "next_carry = carry", "gae and test_permuting"),
    Mutant("apart: last lane dropped", "_internal/kernels/serial.py", "for k in range(end_lane - first_lane)", "for k in range(end_lane - first_lane - 1)", "gae and test_every_pattern"),
    Mutant("apart: last step dropped", "_internal/kernels/serial.py", "for i in range(left):", "for i in range(left - 1):", "test_literal_numbers"),
    Mutant("apart: the next lane's carry dropped", "_internal/kernels/serial.py", "next_left - both, next_carry", "next_left - both, carry", "test_every_sequence and discounted"),
    Mutant("apart: the next lane begun anew", "_internal/kernels/serial.py", "next_t + DIRECTION * both, next_left", "next_t, next_left", "test_every_sequence and discounted"),
    Mutant("apart: what is left is dropped", "_internal/kernels/serial.py", "if left == 0:", "if True:", "test_every_sequence and discounted"),
    Mutant("side by side: carry kept from the rows before", "_internal/kernels/serial.py", "state[j] = enter(arguments, group, left + j)[0]", "pass", "test_every_kind_of_features and linear and 33"),
    Mutant("side by side: memory of the rows before", "_internal/kernels/serial.py", '"memory[0][:] = True", "memory[1][:] = False"', '"memory[1][:] = False"', "lambda and test_wide_layouts_agree and skip"),
    Mutant("side by side: ends stay", "_internal/kernels/serial.py", '"memory[0][j] = after[1]", ', "", "lambda and test_wide_layouts_agree and skip"),
    Mutant("side by side: no seals", "_internal/kernels/serial.py", '"memory[1][j] = after[2]", ', "", "lambda and test_wide_layouts_agree and reset"),
    Mutant("side by side: the neighbour is the step itself", "_internal/kernels/serial.py", '"t + (position > 0)"', '"t"', "lambda and test_layouts_agree"),
    Mutant("side by side: the window's end is no end", "_internal/kernels/serial.py", "return position == 0, False", "return False, False", "discounted and test_layouts_agree"),
    Mutant("side by side: following value of the neighbour lane", "_internal/kernels/serial.py", "memory[2][{i}][j], ", "memory[2][{i}][max(j - 1, 0)], ", "lambda and test_wide_layouts_agree and skip"),
    Mutant("side by side: last row of a block dropped", "_internal/kernels/serial.py", "width = min(BLOCK, end_lane - left)\n            forget", "width = min(BLOCK, end_lane - left) - 1\n            forget", "discounted and test_layouts_agree"),
    Mutant("side by side: first step dropped", "_internal/kernels/serial.py", "for position in range(steps)", "for position in range(steps - 1)", "discounted and test_layouts_agree"),
    Mutant("side by side: forward carry kept from the rows before", "_internal/kernels/serial.py", "state[j], over[j] = enter(arguments, group, left + j)", "over[j] = False", "prefix and test_wide_layouts_agree and skip"),
    Mutant("side by side: forward's last step dropped", "_internal/kernels/serial.py", "for t in range(steps)", "for t in range(steps - 1)", "prefix and test_layouts_agree"),
    Mutant("packed: the first steps dropped", "_internal/kernels/serial.py", "end - 1, end - first", "end - 1, max(end - first - 1, 0)", "test_every_sequence and discounted"),
    Mutant("packed: ends of the sequence before", "_internal/kernels/serial.py", '"return offsets[unsigned(lane + 1)]"', '"return offsets[unsigned(lane)]"', "test_every_sequence and discounted"),
    Mutant("packed: forward from 0", "_internal/kernels/serial.py", "first if DIRECTION > 0", "0 if DIRECTION > 0", "test_every_sequence and prefix"),
    Mutant("packed: falling offsets taken", "_internal/validation.py", "and not falls.size", "", "test_bad_cu_seqlens and gae"),
    Mutant("forward: gate multiplies", "_internal/kernels/serial.py", f"select(beta == zero, zero, beta * state){STORED}flagged", f"beta * state{STORED}flagged", "test_infinity_minus and traces"),
    Mutant("forward: resets a step early", "_internal/kernels/serial.py", "(over | (flagged & starts_at)) == False", "(over | flagged) == False", "test_eligibility_traces and truncated"),
    Mutant("forward: starts ignored", "_internal/kernels/serial.py", "(over | (flagged & starts_at)) == False", "over == False", "test_prefix_sums and boundary"),
    Mutant("forward: ends ignored", "_internal/kernels/serial.py", "return result, flagged & (not starts_at)", "return result, flagged & False", "test_eligibility_traces and terminated"),
    Mutant("forward: masks never sever", "_internal/kernels/serial.py", "return state, over | (not skip)", "return state, over", "test_every_pattern_of_four and prefix"),
    Mutant("forward: skipped steps sever", "_internal/kernels/serial.py", "return state, over | (not skip)", "return state, over | True", "test_every_pattern_of_four and prefix"),
    Mutant("forward: the window before forgotten", "_internal/kernels/serial.py", "flag(arguments[11], False, group, 0, lane)", "flag(None, False, group, 0, lane)", "test_two_windows and prefix"),
    Mutant("minimum is no bound", "_internal/kernels/serial.py", "bound if x > bound else x", "x if x > bound else x", "test_vtrace"),
    Mutant("time and lanes swapped", "_internal/backends/cpu.py", "x if problem.time_dim == 0 else x.T", "x if problem.time_dim == 1 else x.T", "test_every_length and discounted"),
    Mutant("strides ignored", "_internal/backends/cpu.py", '"C" if not apart and contiguous(arguments) else "A"', '"C"', "test_layouts and discounted"),
    Mutant("last span dropped", "_internal/backends/cpu.py", "in pairwise(edges) if low < high]", "in list(pairwise(edges))[:-1] if low < high]", "several_threads and prefix"),
    Mutant("parts but the first not done", "_internal/backends/cpu.py", "for part in parts[1:]]", "for part in parts[2:]]", "several_threads and prefix"),
    Mutant("one name for all in the disk cache", "_internal/backends/cpu.py", 'name = f"{recurrence.name}_{fingerprint(recurrence, wanted)}"', 'name = "loop"', "different_processes"),
    Mutant("normalisation: a large mean cancels", "_internal/kernels/serial_moments.py", "pivot = first_valid(values, masked, valid, first, end)", "pivot = 0.0", "normalization and test_a_large_mean"),
    Mutant("normalisation: masked cells count", "_internal/kernels/serial_moments.py", "count += counts[j] != 0", "count += 1", "normalization and test_the_equation"),
    Mutant("normalisation: masked cells in the sums", "_internal/kernels/serial_moments.py", "if not counts[j]:", "if False:", "normalization and test_the_equation"),
    Mutant("normalisation: masked cells not cleared", "_internal/kernels/serial_moments.py", "normalized if counts[j] else 0.0", "normalized", "normalization and test_the_equation"),
    Mutant("normalisation: parts as if of one mean", "_internal/backends/cpu_moments.py", "part_m2 + apart * apart * count * share", "part_m2", "normalization and test_parts"),
    Mutant("normalisation: last span dropped", "_internal/backends/cpu_moments.py", "for first in range(0, size, SPAN)]", "for first in range(0, max(size - SPAN, 1), SPAN)]", "normalization and test_large"),
]  # fmt: skip

TRITON = [
    Mutant("nothing works", "_internal/backends/triton.py", "            kernel = scan.scan[call.grid](*call.arguments, **call.options)", "            kernel = None", "test_literal_numbers"),
    Mutant("combine: reset lets NaN through", "_internal/kernels/scan.py", "return alpha_next + passed(beta_next, alpha), passed(beta_next, beta)", "return alpha_next + beta_next * alpha, passed(beta_next, beta)", "launches and leaks"),
    Mutant("combine: reset lets NaN through, exactly", "_internal/kernels/scan.py", "through = passed(beta_next, alpha) + ", "through = beta_next * alpha + ", "launches and leaks"),
    Mutant("combine: overflow poisons", "_internal/kernels/scan.py", "tl.where((factor == 0) | (state == 0), 0, factor * state)", "tl.where(factor == 0, 0, factor * state)", "launches and zeros"),
    Mutant("combine: β not multiplied", "_internal/kernels/scan.py", "return alpha_next + through, product, where_rounded", "return alpha_next + through, beta_next, where_rounded", "launches and gae"),
    Mutant("combine: rounding of products lost", "_internal/kernels/scan.py", 'float("inf")), 0, error)', 'float("inf")), 0, 0 * error)', "launches and exact"),
    Mutant("carry: gate multiplies", "_internal/kernels/scan.py", "    return alpha + passed(beta, carried)", "    return alpha + beta * carried", "launches and leaks"),
    Mutant("step: gate multiplies", "_internal/kernels/scan.py", "tl.where(beta == 0, alpha, alpha + beta * state)", "alpha + beta * state", "launches and leaks"),
    Mutant("fold: a reset forgotten", "_internal/kernels/scan.py", "severed = severed | (betas[i] == 0)", "severed = severed", "launches and (leaks or zeros)"),
    Mutant("fold: rounding of products lost", "_internal/kernels/scan.py", "rest = tl.fma(betas[i], rest, tl.fma(betas[i], beta, -product))", "rest = rest", "launches and exact"),
    Mutant("fold: first step dropped", "_internal/kernels/scan.py", "    alpha = alphas[0]\n", "    alpha = 0 * alphas[0]\n", "launches and gae"),
    Mutant("carry dropped between tiles", "_internal/kernels/scan.py", "                state = at_end(scanned)\n", "                state = 0 * at_end(scanned)\n", "launches and gae"),
    Mutant("carry taken from the wrong end", "_internal/kernels/scan.py", "== CHUNKS - 1\n", "== 0\n", "launches and gae"),
    Mutant("carry seeded", "_internal/kernels/scan.py", "state = load(initial, lanes_place, 0, exists, DTYPE)", "state = load(initial, lanes_place, 0, exists, DTYPE) + 1", "test_linear_recurrence"),
    Mutant("chunks enter with their own state", "_internal/kernels/scan.py", "tl.maximum(chunk - 1, 0)", "tl.maximum(chunk, 0)", "launches and gae"),
    Mutant("chunks: nothing enters the first", "_internal/kernels/scan.py", "return tl.where(chunk == 0, carried, before)", "return tl.where(chunk == 0, 0, before)", "launches and gae"),
    Mutant("chunks of several warps are not moved", "_internal/kernels/scan.py", "tl.where(known_next != 0, before_next, last)", "tl.where(known_next != 0, before_next, last_next)", "launches and gae"),
    Mutant("segments: their folds are not used", "_internal/kernels/scan.py", "            state = after_segments(", "            _ = after_segments(", "launches and gae"),
    Mutant("segments: one too many", "_internal/kernels/scan.py", "exists & (earlier < segment)", "exists & (earlier <= segment)", "launches and gae"),
    Mutant("segments: none of the serial ones", "_internal/kernels/scan.py", "tl.range(0, segment, loop_unroll_factor=8)", "tl.range(1, segment, loop_unroll_factor=8)", "launches and gae"),
    Mutant("segments: folds of the last tile", "_internal/kernels/scan.py", "return combine_exactly(alpha, beta, rest, at_end(alphas), at_end(betas), at_end(rests))", "return at_end(alphas), at_end(betas), at_end(rests)", "launches and gae"),
    Mutant("segments: some are empty", "_internal/kernels/launch.py", "return -(-tiles // -(-tiles // min(tiles, number)))", "return min(tiles, number)", "launches and none_is_empty"),
    Mutant("segments: of a GPU that is busy", "_internal/kernels/launch.py", "if wanted < 8 or tiles < 8:", "if tiles < 8:", "launches and none_is_empty"),
    Mutant("tile read ahead twice", "_internal/kernels/scan.py", "tl.minimum(tile + 1, tiles_end - 1)", "tl.minimum(tile, tiles_end - 1)", "launches and gae"),
    Mutant("chunk in the order of memory", "_internal/kernels/scan.py", "steps[len(steps) - 1 - i if BACKWARD else i]", "steps[i]", "test_literal_numbers"),
    Mutant("elements mixed up", "_internal/kernels/scan.py", "        parts = even + odd\n", "        parts = odd + even\n", "launches and gae"),
    Mutant("neighbour's value of the chunk itself", "_internal/kernels/scan.py", "t = place.start + (1 << LOG_UNROLL)\n", "t = place.start + (1 << LOG_UNROLL) - 1\n", "launches and gae"),
    Mutant("mask ignored", "_internal/kernels/scan.py", "tl.where(valid[i], alpha, 0)", "tl.where(True, alpha, 0)", "gae and (test_every or test_literal)"),
    Mutant("masked cells not cleared", "_internal/kernels/scan.py", "tl.where(valid[i], results[i][k], 0)", "results[i][k]", "gae and (test_every or test_literal)"),
    Mutant("skip severs", "_internal/kernels/scan.py", "tl.where(valid[i], beta, 1)", "tl.where(valid[i], beta, 0)", "gae and (test_every or test_literal)"),
    Mutant("reset severs nothing", "_internal/kernels/scan.py", "                    severed = valid[i] == 0\n", "                    severed = severed & (valid[i] == 0)\n", "gae and (test_every or test_literal)"),
    Mutant("reset severs nothing between chunks", "_internal/kernels/scan.py", "there & (flag(mask, place, t, there) == 0)", "there & (there == 0)", "launches and gae"),
    Mutant("masked neighbours not passed over", "_internal/kernels/scan.py", "tl.where(valid[i], now[j][i], before[j + 1])", "now[j][i]", "gae and test_every"),
    Mutant("masked neighbours not passed over between chunks", "_internal/kernels/scan.py", "        missing = tl.where(valid[i], 0.0, missing)", "        missing = 0.0 * missing", "launches and gae"),
    Mutant("neighbours not carried between tiles", "_internal/kernels/scan.py", "            carried = last\n", "            carried = carried\n", "launches and gae"),
    Mutant("truncated ignored", "_internal/kernels/scan.py", "cut = given(cut, place, tl.int1, LOG_UNROLL)", "cut = given((), place, tl.int1, LOG_UNROLL)", "gae and (test_every or test_literal)"),
    Mutant("bootstrap only at the end", "_internal/kernels/scan.py", "where = (cut[i] | none_or_over) & inside(place, t, EVEN)", "where = none_or_over & inside(place, t, EVEN)", "gae and (test_every or test_literal)"),
    Mutant("dense bootstrap of the neighbour", "_internal/kernels/scan.py", "value_at_cut = values_at_cut[i]", "value_at_cut = values_at_cut[max(i - 1, 0)]", "launches and gae"),
    Mutant("discount 0 does not end", "_internal/kernels/scan.py", "ended = ended | (gamma_now == 0)", "ended = ended", "test_a_zero_discount"),
    Mutant("lanes and steps swapped", "_internal/kernels/scan.py", "group, step, lane = strides_of(stream, place)", "group, lane, step = strides_of(stream, place)", "test_literal_numbers or test_layouts"),
    Mutant("all strides are the common ones", "_internal/kernels/scan.py", "        return (stream[1], stream[2], stream[3])", "        return place.strides", "test_layouts"),
    Mutant("alignment of the lanes assumed", "_internal/backends/triton.py", "return 4 if math.gcd(4, *strides) == 4 else 1", "return 4", "gae_matrix"),
    Mutant("first step dropped", "_internal/kernels/scan.py", "return (t < place.end) & (place.lane < place.lanes)", "return (t < place.end) & (place.lane < place.lanes) & (t > 0)", "gae and (test_every or test_literal)"),
    Mutant("forward: own flag", "_internal/kernels/scan.py", "departs = departs + (done[i] | cut[i],)", "departs = departs + (done[i - 1] | cut[i - 1],)", "test_eligibility_traces"),
    Mutant("forward: flags between chunks forgotten", "_internal/kernels/scan.py", "over = over | edge[NUM_LOOKAHEAD]", "over = over", "launches and traces"),
    Mutant("forward: starts ignored", "_internal/kernels/scan.py", "starts = starts | ended | cut[i]", "starts = starts", "test_prefix_sums"),
    Mutant("forward: the window before forgotten", "_internal/kernels/scan.py", "left = flag(previous_done, lanes_place, 0, exists)", "left = flag(None, lanes_place, 0, exists)", "streaming"),
    Mutant("state after: of this step", "_internal/kernels/scan.py", "                after = tl.where(continues, scanned, 0)\n                scanned = advanced(alphas[i], betas[i], scanned)\n", "                scanned = advanced(alphas[i], betas[i], scanned)\n                after = tl.where(continues, scanned, 0)\n", "test_vtrace or test_retrace"),
    Mutant("expectation: of the first actions", "_internal/kernels/scan.py", "range(0, expected[2], BLOCK_ACTIONS)", "range(0, BLOCK_ACTIONS, BLOCK_ACTIONS)", "any_number_of_actions"),
    Mutant("expectation: of the first few actions", "_internal/kernels/scan.py", "tl.static_range(0, ACTIONS, BLOCK_ACTIONS)", "tl.static_range(0, BLOCK_ACTIONS, BLOCK_ACTIONS)", "any_number_of_actions"),
    Mutant("expectation: past the last action", "_internal/kernels/scan.py", "start + BLOCK_ACTIONS <= ACTIONS", "start <= ACTIONS", "any_number_of_actions"),
    Mutant("expectation: probability 0 counts", "_internal/kernels/scan.py", "tl.where(prob == 0, 0, prob * value)", "prob * value", "launches and retrace"),
    Mutant("minimum is no bound", "_internal/kernels/scan.py", "tl.where(x > bound, bound, x)", "x", "test_vtrace"),
    Mutant("segments: valid steps are looked for nearby only", "_internal/kernels/scan.py", "missing = missing & (nearest < 0) & ((t < place.end) if BACKWARD else (t >= first))", "missing = missing & (t != t)", "launches and gaps"),
    Mutant("segments: nothing is carried over a gap", "_internal/kernels/scan.py", "found = (tl.where(there, tl.where(over, 1.0, 0.0), carried[0]),)", "found = (carried[0],)", "launches and gaps"),
    Mutant("segments: the last tiles forgotten", "_internal/kernels/scan.py", "of_segment = tl.cdiv(tiles, tl.num_programs(1))", "of_segment = tiles // tl.num_programs(1)", "launches and gae"),
    Mutant("packed: sequences start at 0", "_internal/kernels/scan.py", "        first = tl.load(offsets + lane, mask=exists, other=0).to(INDEX)\n", "        first = 0 * tl.load(offsets + lane, mask=exists, other=0).to(INDEX)\n", "test_every_sequence and prefix"),
    Mutant("packed: all end at the row's end", "_internal/kernels/scan.py", "        end = tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX)\n", "        end = 0 * tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX) + steps\n", "test_every_sequence and gae"),
    Mutant("fast path: no call is repeated", "_internal/fast_path.py", "or device() != {index}", "or True", "fast_path and like_calls"),
    Mutant("fast path: always the same stream", "_internal/fast_path.py", "stream_of({index})", "0", "fast_path and stream"),
    Mutant("normalisation: a large mean cancels", "_internal/kernels/moments.py", "if count == 0:", "if count < 0:", "normalization and test_a_large_mean"),
    Mutant("normalisation: masked cells count", "_internal/kernels/moments.py", "tl.sum(valid.to(tl.int32))", "tl.sum(inside.to(tl.int32))", "normalization and test_the_equation"),
    Mutant("normalisation: masked cells in the sums", "_internal/kernels/moments.py", "apart = tl.where(valid, x - pivot, 0)", "apart = tl.where(inside, x - pivot, 0)", "normalization and test_the_equation"),
    Mutant("normalisation: masked cells not cleared", "_internal/kernels/moments.py", "tl.where(valid, (x - subtracted) * factor, 0)", "((x - subtracted) * factor)", "normalization and test_the_equation"),
    Mutant("normalisation: parts as if of one mean", "_internal/kernels/moments.py", "    m2 += tl.where(count > 0, count * (apart - shift) * (apart - shift), 0)\n", "", "normalization and test_parts"),
    Mutant("normalisation: tiles of the first columns only", "_internal/kernels/moments.py", "(tile % across).to(tl.int64) * BLOCK_COLUMNS", "(tile * 0).to(tl.int64)", "normalization and test_large"),
]  # fmt: skip

MUTANTS = {"reference": SHARED, "cpu": CPU, "triton": TRITON}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=MUTANTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tested", action="store_true", help="the tests have just passed without a mutant")
    options = parser.parse_args()
    mutants = MUTANTS[options.backend]
    os.environ |= {"RL_TRITON_TEST_BACKENDS": options.backend}
    os.environ |= {"NUMBA_OPT": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # so that it takes less time
    for name in SLOW_TO_IMPORT:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()  # the tests of every mutant look for garbage of their own only
    intact = Mutant("none", "", "", "", " or ".join(sorted({f"({mutant.tests})" for mutant in mutants})))
    everything = mutants if options.tested else [intact, *mutants]
    outcomes = run(everything, options.jobs)
    killed = 0
    progress = tqdm(outcomes, total=len(everything), desc=f"mutants ({options.backend})", disable=None)
    for mutant, code, output in progress:
        if mutant is intact:
            if code != PASSED:
                print(output, "the tests fail without a mutant", sep="\n")
                return 1
            continue
        result = verdict(code)
        killed += result == "killed"
        print(f"{result}: {mutant.name}", flush=True)
        if code > FAILED:
            print(output[-2000:], flush=True)
    print(f"mutants ({options.backend}): {killed} of {len(mutants)} killed")
    return 0 if killed == len(mutants) else 1


def verdict(code: int) -> str:
    """A mutant that crashes the tests is noticed too."""
    if code == PASSED:
        return "survived"
    return "the tests did not run" if code > FAILED else "killed"


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
        try:
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
        finally:
            for process, *_ in running.values():
                process.terminate()
                process.join()


def test(mutant: Mutant, copy: Path) -> None:
    """Run a mutant's tests on a copy that has it."""
    for name in ("rl_triton_core", "tests/core"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.nb[ci]"))
    for path in (*ROOT.glob("tests/*.py"), ROOT / "docs/conventions.md", ROOT / "pyproject.toml"):
        place = copy / path.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(path, place)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    with Path("log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        if mutant.old:
            apply(mutant, copy / "rl_triton_core" / mutant.file)
        sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", mutant.tests, *files(mutant)]))


def files(mutant: Mutant) -> list[str]:
    """Those that may have such tests: all words of the expression are in them, or ids of an estimator."""
    ids = (ROOT / "tests/core/estimator_cases.py").read_text()
    expression = re.sub(r"not \w+", "True", mutant.tests)

    def may_have(file: str) -> bool:
        text = file + (ROOT / file).read_text() + ids
        return eval(re.sub(r"(?!and\b|or\b|True\b)\b\w+", lambda word: str(word[0] in text), expression))

    return [file for file in FILES if may_have(file)]


def apply(mutant: Mutant, path: Path) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        print(f"expected one occurrence of {mutant.old!r} in {path.name}")
        sys.exit(NOT_RUN)
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main())
