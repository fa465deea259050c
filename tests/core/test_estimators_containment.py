"""A NaN or an infinity stays in its own trajectory, and on its side of its own step: every cell of every input.

A window is stacked once for every place that can be poisoned, with a clean copy below each, so that one call tells of
all of them and of the rows beside them. What must not change must not change by a bit.
"""

import itertools

import cases
import numpy as np
import oracles
import pytest
import torch
from cases import How, Vector, find_readable, get_endings, get_name, random_case, run_case, same_bits, with_form

POISON = (np.nan, np.inf, -np.inf)
ALL = pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
MODES = pytest.mark.parametrize("mask_mode", ["skip", "reset"])


def repeat_rows(case, copies):
    """Each row `copies` times, one under the other."""
    state = case.get("state")
    repeated = None if state is None else tuple(np.repeat(x, copies, axis=0) for x in state)
    return case.map_arrays(lambda x: np.repeat(x, copies, axis=0)).replace(state=repeated)


def number_case_trajectories(case):
    if case.estimator is not cases.LINEAR:
        return oracles.number_trajectories(
            case.shape, **(get_endings(case) if case.estimator.forward else case.boundaries)
        )
    severed = case["beta"] == 0
    if not case.get("reverse", True):
        severed = np.append(severed[:, 1:], severed[:, :1], axis=1)
    return oracles.number_trajectories(case.shape, terminated=severed)


def find_reach(case, name, output, t):
    """Which steps may change where `name` changes at t, as far as the order in time tells."""
    steps = np.arange(case.shape[1])
    if case.estimator.forward or not case.get("reverse", True):
        return steps >= t
    ahead_only = [(cases.LAMBDA, "values", "returns")]
    ahead_only += [(cases.RETRACE, x, "targets") for x in ("log_ratios", "target_log_probs", "behaviour_log_probs")]
    return steps < t if (case.estimator, name, output) in ahead_only else steps <= t


def assert_contained(case, target, names, poison=POISON, how=cases.DEFAULT, times=None):
    """Poison each cell of each input in a row of its own, and compare with the clean row below it.

    Discounts below 0 are an error.
    """
    times = range(case.shape[1]) if times is None else times
    places = [place for place in itertools.product(names, times, poison) if place[0] != "gamma" or place[2] != -np.inf]
    dirty = repeat_rows(case, 2 * len(places))
    for i, (name, t, value) in enumerate(places):
        cells = dirty[name][2 * i :: 2 * len(places), t]
        cells.reshape(len(cells), -1)[:, 0] = value  # the first feature or action only
    ids, may_read = number_case_trajectories(case), find_readable(case)
    for output, result in zip(case.estimator.outputs, run_case(dirty, target, how), strict=True):
        got, clean = result.reshape(case.shape[0], len(places), 2, case.shape[1], -1).unbind(2)
        assert clean.isfinite().all() and same_bits(clean, clean[:, :1].expand_as(clean).contiguous()), (
            "a row beside it"
        )
        changed = got.view(torch.int32) != clean.view(torch.int32)
        assert not changed[..., 1:].any(), f"{output}: from one feature to another"
        for i, (name, t, value) in enumerate(places):
            read = may_read[name][:, t]
            reach = (ids == ids[:, [t]]) & read[:, None] & find_reach(case, name, output, t)
            leaks = np.argwhere(changed[:, i, :, 0].numpy() & ~reach)
            assert not len(leaks), f"{output}: {value} in {name} at {t} reaches (row, step) {leaks[:4].tolist()}"
            if np.isnan(value) and name in list_seen_inputs(case, output):  # else this would pass without a computation
                assert got[torch.as_tensor(read), i, t, 0].isnan().all(), f"{output}: {name} at {t} is not read"


def list_seen_inputs(case, output):
    """The inputs of which a NaN must be seen at its own step."""
    names = {"rewards", "q_values", "x", "alpha", "bootstrap_values", "next_values"}
    if output == "targets":
        names |= {"expected_next_q", "next_q_values"}
    if case.estimator is cases.VTRACE or output == "advantages":
        names |= {"log_ratios", "target_log_probs", "behaviour_log_probs"}
    return names


def make_pattern_case(estimator, cells, **changes):
    """Bit 0: terminated, or a decay of 0; bit 1: truncated; bit 2: masked."""
    cells = np.array(cells)
    term, trunc, mask = cells & 1 > 0, cells & 2 > 0, cells & 4 == 0
    case = random_case(estimator, *cells.shape, term=None, trunc=None)
    if estimator is cases.LINEAR:
        return case.replace(beta=np.where(cells & 3 > 0, 0.0, case["beta"]), **changes)
    flags = {"dones": term | trunc} if estimator is cases.PREFIX else {"terminated": term, "truncated": trunc}
    return case.replace(**flags, mask=None if mask.all() else mask, **changes)


def tell_variants(estimator, cells, mask_mode):
    """The same window told in each way that has other inputs, and the inputs that can be poisoned."""
    if estimator is cases.LINEAR:
        for reverse in (True, False):
            yield make_pattern_case(estimator, cells, reverse=reverse)
        return
    case = make_pattern_case(estimator, cells, mask_mode=mask_mode)
    if estimator is cases.PREFIX:
        yield case
        yield case.replace(boundary="starts_at")
    elif estimator is cases.TRACES:
        yield case.replace(decay=np.full(case.shape, 0.9))
        yield case.replace(x=np.repeat(case["x"][..., None], 2, axis=2), decay=np.full((*case.shape, 2), 0.9))
    else:
        yield case.replace(gamma=np.full(case.shape, 0.9))
        if estimator is cases.RETRACE:
            yield cases.with_log_probs(with_form(case, "actions"))
        elif estimator is not cases.DISCOUNTED:
            yield with_form(case, "next_values")


def list_real_inputs(case):
    return [name for name, x in case.args.items() if cases.is_per_step(x) and x.dtype.kind == "f"]


@pytest.mark.covering
@MODES
@ALL
def test_every_cell_of_every_pattern(target, estimator, mask_mode):
    """All 4096 windows of four steps; a sample of them where that would take long."""
    cells, poison = np.array(list(itertools.product(range(8), repeat=4))), POISON
    if not target.exhaustive:
        cells = np.random.default_rng(0).permutation(cells)[: 3 if target.interpreted else 128]
        poison = POISON[:1] if target.interpreted else POISON
    for case in tell_variants(estimator, cells, mask_mode):
        assert_contained(case, target, list_real_inputs(case), poison)


@pytest.mark.covering
@pytest.mark.parametrize(("mask_mode", "time_dim"), [("skip", -1), ("skip", 0), ("reset", -1)])
@ALL
def test_every_cell_of_a_long_window(target, estimator, mask_mode, time_dim):
    num_steps = 2100 if target.device == "cuda" else 17 if target.interpreted else 129
    case = random_case(estimator, 1, num_steps, seed=3, term=0.05, trunc=0.05, valid=0.9)
    if estimator is cases.LINEAR:
        case["beta"][:, ::9] = 0.0
    else:
        case = case.replace(mask_mode=mask_mode)
    every = {2100: 7, 129: 1, 17: 5}[num_steps]
    assert_contained(
        case, target, list_real_inputs(case)[:3], [np.nan], How(time_dim=time_dim), range(0, num_steps, every)
    )


@pytest.mark.parametrize("estimator", cases.BACKWARD, ids=get_name)
def test_a_zero_discount_contains_like_a_termination(target, estimator):
    """Once at a step inside the rollout, once at a truncation, once at the rollout's end; in every form."""
    gamma = np.full((3, 6), 0.9)
    gamma[[0, 1, 2], [2, 3, 5]] = 0.0
    case = make_pattern_case(estimator, [[0] * 6, [0, 0, 0, 2, 0, 0], [0] * 6], gamma=gamma)
    for form in {"dense", "next_values", "actions"}.intersection(cases.FORMS[estimator.name]):
        told = with_form(case, form)
        assert_contained(told, target, [name for name in list_real_inputs(told) if name != "gamma"], [np.nan])


@MODES
@pytest.mark.parametrize("estimator", cases.FORWARD, ids=get_name)
def test_an_initial_state(target, estimator, mask_mode):
    """A NaN in it reaches the first trajectory, of its own row and feature, if that carries on; else nothing."""
    case = random_case(estimator, 8, 15, valid=0.7, features=(2,), mask_mode=mask_mode)
    value, done = np.zeros((8, 2)), np.arange(8) % 4 == 0
    clean = run_case(case.replace(state=(value, done)), target)[0]
    dirty_value = value.copy()
    dirty_value[::2, 1] = np.nan
    got = run_case(case.replace(state=(dirty_value, done)), target)[0]
    ids = number_case_trajectories(case)
    for n in range(8):
        valid = np.flatnonzero(case.valid[n])
        first = (ids[n] == ids[n, valid[0]]) & (not done[n]) & (mask_mode == "skip" or valid[0] == 0)
        hit = torch.as_tensor(first & (n % 2 == 0))
        assert got[n, hit, 1].isnan().all()
        assert same_bits(got[n, :, 0].contiguous(), clean[n, :, 0].contiguous())
        assert same_bits(got[n, ~hit], clean[n, ~hit])


@pytest.mark.parametrize("reverse", [True, False])
def test_an_initial_state_of_a_recurrence(target, reverse):
    case = random_case(cases.LINEAR, 4, 9, reverse=reverse, initial=np.zeros(4))
    case["beta"][:, 4] = 0.0
    clean = run_case(case, target)[0]
    got = run_case(case.replace(initial=np.array([np.nan, 0.0, np.inf, 0.0])), target)[0]
    far = np.s_[:, :5] if reverse else np.s_[:, 4:]
    near = np.s_[::2, 5:] if reverse else np.s_[::2, :4]
    assert not got[near].isfinite().any()
    assert same_bits(got[far].contiguous(), clean[far].contiguous())
    assert same_bits(got[1::2].contiguous(), clean[1::2].contiguous())


def test_a_feature_with_a_bad_decay(target):
    case = random_case(cases.TRACES, 3, 9, features=(3,), decay=Vector(np.array([0.9, 0.5, 0.1])))
    dirty = case.replace(decay=Vector(np.array([0.9, np.nan, 0.1])))
    clean, got = run_case(case, target)[0], run_case(dirty, target)[0]
    assert same_bits(got[..., ::2].contiguous(), clean[..., ::2].contiguous()) and got[:, 1:, 1].isnan().any()
