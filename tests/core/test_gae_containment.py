"""A NaN or an infinity stays in its own episode, at or before its own step: every cell of every input, bit for bit.

A window is stacked once for every place that can be poisoned, with a clean copy below each, so that one call tells of
all of them and of the rows beside them.
"""

import itertools
from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from cases import CELLS, Case, How, Sparse, random_case, run, same_bits

DEFAULT = How()
POISON = (np.nan, np.inf, -np.inf)
MATRICES = ("rewards", "values", "terminated", "truncated", "gamma", "bootstrap_values", "next_values", "mask")


def stack(case, copies):
    """Each row `copies` times, one under the other."""
    matrices = {name: getattr(case, name) for name in MATRICES}
    arrays = {name: x for name, x in matrices.items() if isinstance(x, np.ndarray)}
    return replace(case, **{name: np.repeat(x, copies, axis=0) for name, x in arrays.items()})


def flags(case):
    """Terminated, truncated and mask, present or not; a discount of 0 of its own ends a step like a termination."""
    none = np.zeros(case.rewards.shape, bool)
    terminated, truncated = (none if x is None else x for x in (case.terminated, case.truncated))
    return terminated | (np.ndim(case.gamma) > 0) & (case.gamma == 0), truncated, case.valid


def readable(case):
    """Where the bootstrap, and where next_values, may be read at all."""
    terminated, truncated, valid = flags(case)
    edges = ~np.isnan(oracles.dense_bootstrap(np.ones(len(valid)), valid.shape, valid, case.mask_mode))
    before_hole = np.zeros(valid.shape, bool)
    if case.mask_mode == "reset":
        before_hole[:, :-1] = ~valid[:, 1:]
    going_on = valid & ~terminated
    return {
        "bootstrap_values": going_on & (truncated | (edges & ~before_hole)),
        "next_values": going_on & (truncated | ~before_hole),
    }


def assert_contained(case, target, names, poison=POISON, how=DEFAULT):
    """Poison each cell of each input in a row of its own, and compare with the clean stack."""
    num_envs, num_steps = case.rewards.shape
    places = list(itertools.product(names, range(num_steps), poison))
    clean = stack(case, 2 * len(places))
    dirty = replace(clean, **{name: getattr(clean, name).copy() for name in names})
    ids = oracles.episode_ids(*flags(case), case.mask_mode)
    may_read, steps = readable(case), np.arange(num_steps)
    reach = np.zeros((num_envs, 2 * len(places), num_steps), bool)
    for i, (name, t, value) in enumerate(places):
        getattr(dirty, name)[2 * i :: 2 * len(places), t] = value
        reads = case.valid[:, t] & may_read.get(name, case.valid)[:, t]
        reach[:, 2 * i] = (ids == ids[:, [t]]) & (steps <= t) & reads[:, None]
    reach = reach.reshape(-1, num_steps)
    for got, want in zip(run(dirty, target, how), run(clean, target, how), strict=True):
        assert want.isfinite().all()
        changed = (got.view(torch.int32) != want.view(torch.int32)).numpy()
        leaks = np.argwhere(changed & ~reach)
        assert not len(leaks), [(places[row // 2 % len(places)], case_row(clean, row), t) for row, t in leaks[:4]]
        hit = torch.as_tensor((dirty.rewards != clean.rewards) & clean.valid)
        assert not got[hit].isfinite().any(), "the poison was not even read"


def case_row(case, row):
    return {name: x[row].astype(int).tolist() for name, x in zip(("term", "trunc", "valid"), flags(case), strict=True)}


def pattern_case(cells, **changes):
    """Bit 0: terminated, bit 1: truncated, bit 2: masked."""
    cells = np.array(cells)
    term, trunc, mask = cells & 1 > 0, cells & 2 > 0, cells & 4 == 0
    case = random_case(*cells.shape, terminated=term, truncated=trunc, mask=None if mask.all() else mask)
    return replace(case, **changes)


def forms(shape):
    """The same window with each way to tell the values at the cuts, and the inputs that can be poisoned."""
    yield {"gamma": np.full(shape, 0.9)}, ("rewards", "values", "gamma", "bootstrap_values")
    yield {"next_values": np.ones(shape), "bootstrap_values": None}, ("rewards", "values", "next_values")
    yield {"lambda_": 0.0}, ("rewards", "values", "bootstrap_values")


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("pattern", CELLS)
def test_every_cell(target, pattern, mask_mode):
    for (changes, names), poison in zip(forms((1, 6)), [[np.nan], [np.inf], []], strict=True):
        case = pattern_case([CELLS[pattern]], mask_mode=mask_mode, **changes)
        if poison or not target.interpreted:
            assert_contained(case, target, names, poison if target.interpreted else POISON)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_every_cell_of_every_pattern(target, mask_mode):
    """All 4096 windows of four steps; a sample of them, and NaN alone, where that would take long."""
    cells, poison = np.array(list(itertools.product(range(8), repeat=4))), POISON
    if not target.exhaustive:
        cells, poison = np.random.default_rng(0).permutation(cells)[: 16 if target.interpreted else 256], POISON[:1]
    for changes, names in itertools.islice(forms(cells.shape), 2):
        assert_contained(pattern_case(cells, mask_mode=mask_mode, **changes), target, names, poison)


@pytest.mark.parametrize("name", ["bootstrap_values", "next_values"])
def test_a_zero_discount_contains_like_a_termination(target, name):
    """Once at a step inside the window, once at a truncation, once at the window's end."""
    gamma = np.full((3, 6), 0.9)
    gamma[[0, 1, 2], [2, 3, 5]] = 0.0
    case = pattern_case([[0] * 6, [0, 0, 0, 2, 0, 0], [0] * 6], gamma=gamma)
    if name == "next_values":
        case = replace(case, bootstrap_values=None, next_values=np.ones((3, 6)))
    assert_contained(case, target, ("rewards", "values", name), [np.nan])


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("time_dim", [-1, 0])
def test_every_cell_of_a_long_window(target, mask_mode, time_dim):
    num_steps = 2100 if target.device == "cuda" else 17 if target.interpreted else 129
    case = random_case(1, num_steps, seed=3, term=0.05, trunc=0.05, valid=0.9, mask_mode=mask_mode)
    assert_contained(case, target, ("rewards", "values", "bootstrap_values"), [np.nan], How(time_dim=time_dim))


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("kind", ["NaN", "missing"])
def test_final_values(target, kind, mask_mode):
    """Take one final value away, or make it NaN: its episode is NaN up to it, and nothing else changes."""
    case = random_case(4, 15, term=0.1, trunc=0.2, valid=0.8, mask_mode=mask_mode)
    env, time = np.nonzero(readable(case)["bootstrap_values"])
    value = np.arange(1.0, len(env) + 1)
    ids, steps = oracles.episode_ids(*flags(case), mask_mode), np.arange(15)
    want = run(replace(case, bootstrap_values=Sparse(env.tolist(), time.tolist(), value.tolist())), target)
    for i in range(len(env)):
        entries = [env, time, np.where(np.arange(len(env)) == i, np.nan, value)]
        if kind == "missing":
            entries = [np.delete(x, i) for x in entries]
        dirty = replace(case, bootstrap_values=Sparse(*(x.tolist() for x in entries)))
        reach = torch.as_tensor((ids == ids[env[i], time[i]]) & (steps <= time[i]))
        for got, expected in zip(run(dirty, target), want, strict=True):
            assert got[reach].isnan().all()
            assert same_bits(got[~reach], expected[~reach])


def test_edges(target):
    """The edge's value of one row, NaN, in an array for all rows."""
    case = random_case(5, 9, truncated=None, bootstrap_values=np.arange(5.0))
    clean = [
        run(replace(case, bootstrap_values=x), target) for x in (np.arange(5.0), Sparse([], [], [], np.arange(5.0)))
    ]
    for n in range(5):
        edge = np.where(np.arange(5) == n, np.nan, case.bootstrap_values)
        sparse = Sparse([], [], [], edge)
        ids = oracles.episode_ids(*flags(case))
        reach = torch.as_tensor((ids == ids[n, -1]) & readable(case)["bootstrap_values"][n, -1])
        for form, want in zip((edge, sparse), clean, strict=True):
            for got, expected in zip(run(replace(case, bootstrap_values=form), target), want, strict=True):
                assert got[reach].isnan().all()
                assert same_bits(got[~reach], expected[~reach])


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_flags_in_masked_cells_mean_nothing(target, mask_mode):
    case = random_case(6, 21, term=0.2, trunc=0.2, valid=0.6, mask_mode=mask_mode)
    other = {
        name: np.where(case.mask, getattr(case, name), ~getattr(case, name)) for name in ("terminated", "truncated")
    }
    for one, two in zip(run(case, target), run(replace(case, **other), target), strict=True):
        assert same_bits(one, two)


def test_infinity_minus_infinity_stays_behind_a_reset(target):
    """An episode whose values overflow to infinity and then to NaN, before and after clean ones."""
    shape = (3, 12)
    rewards = np.ones(shape)
    rewards[:, 5], rewards[:, 6] = np.inf, -np.inf
    done = np.zeros(shape, bool)
    done[:, [3, 7]] = True
    for changes in ({"terminated": done}, {"truncated": done}):
        case = Case(rewards, np.zeros(shape), **changes, bootstrap_values=0.0)
        clean = replace(case, rewards=np.ones(shape))
        got, want = run(case, target)[0], run(clean, target)[0]
        outside = [0, 1, 2, 3, 8, 9, 10, 11]
        assert same_bits(got[:, outside].contiguous(), want[:, outside].contiguous())
        assert got[:, 4:6].isnan().all()
