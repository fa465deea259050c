"""The example of docs/adding-an-estimator.md: an estimator from outside the package has all that the others have."""

import doctest
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from rl_triton_core import FinalValues
from rl_triton_core.testing import assert_close, random_rollout

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples" / "upgo.py").exists():
    pytest.skip("only the package is here", allow_module_level=True)
sys.path.insert(0, str(ROOT / "examples"))
upgo = importlib.import_module("upgo")

GAMMA = 0.9
SHAPE = (3, 17)
MASKS = pytest.mark.parametrize(("mask", "mask_mode"), [(False, "skip"), (True, "skip"), (True, "reset")])


def rollout(seed=0, dtype=torch.float32, mask=False, gamma=GAMMA, shape=SHAPE):
    """Arguments of compute_upgo, [num_envs, T] on the CPU, with both flags and steps that have both."""
    r = random_rollout(*shape, seed=seed, terminated_prob=0.15, truncated_prob=0.15, dtype=dtype)
    arguments = {**r._asdict(), "gamma": gamma}
    if mask:
        arguments["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    return arguments


def oracle(rewards, values, terminated, truncated, bootstrap_values, gamma, mask=None, mask_mode="skip"):
    """(A, G) from the published equation, one row and one step at a time, and how often it went either way."""
    gamma = torch.as_tensor(gamma, dtype=torch.float64).expand_as(rewards)
    mask = torch.ones_like(terminated) if mask is None else mask
    returns, advantages = torch.zeros(2, *rewards.shape, dtype=torch.float64)
    ways = {True: 0, False: 0}
    for n, row in enumerate(mask.tolist()):
        steps = [t for t, valid in enumerate(row) if valid]
        q_ahead = g_ahead = v_ahead = None
        for i, t in reversed(list(enumerate(steps))):
            reward, value, discount, edge = (float(x[n, t]) for x in (rewards, values, gamma, bootstrap_values))
            before_hole = mask_mode == "reset" and t + 1 < len(row) and not row[t + 1]
            if terminated[n, t] or (before_hole and not truncated[n, t]):
                q = g = reward
            elif truncated[n, t] or i == len(steps) - 1:
                q = g = reward + discount * edge
            else:
                upgoing = q_ahead >= v_ahead
                ways[upgoing] += 1
                q = reward + discount * v_ahead
                g = reward + discount * (g_ahead if upgoing else v_ahead)
            returns[n, t], advantages[n, t] = g, g - value
            q_ahead, g_ahead, v_ahead = q, g, value
    return advantages, returns, ways


def run(target, arguments, time_dim=-1, **changes):
    """The results as [num_envs, T] on the CPU."""

    def turned(x):
        return x.t().contiguous() if time_dim == 0 and x.ndim == 2 else x

    def placed(x):
        return turned(x).to(target.device) if isinstance(x, torch.Tensor) else x

    arguments = {name: placed(x) for name, x in {**arguments, **changes}.items()}
    results = upgo.compute_upgo(**arguments, time_dim=time_dim, backend=target.backend)
    return [turned(x).cpu() for x in results]


def check(target, arguments, expected, rtol=None, **changes):
    *wanted, ways = expected
    assert all(ways.values()), "the comparison always went the same way"
    for got, want in zip(run(target, arguments, **changes), wanted, strict=True):
        assert_close(got, want, rtol=rtol)


# -- known answers ----------------------------------------------------------------------------------------------------

MIDDLE = torch.tensor([[False, True, False]])


@pytest.mark.parametrize(
    ("rewards", "changes", "expected"),
    [
        ([1, -2, 3], {}, [1, 1, 3]),
        ([1, 2, 3], {}, [6, 5, 3]),
        ([1, 0, 3], {}, [4, 3, 3]),  # exactly as expected: goes on
        ([1, 2, -3], {}, [3, 2, -3]),
        ([1, -2, 3], {"bootstrap_values": 10.0}, [1, 11, 13]),
        ([1, -2, 3], {"gamma": 0.5}, [1, -0.5, 3]),
        ([1, 2, 3], {"terminated": MIDDLE}, [3, 2, 3]),
        ([1, -2, 3], {"truncated": MIDDLE, "bootstrap_values": 10.0}, [9, 8, 13]),
        ([1, -2, 3], {"terminated": MIDDLE, "truncated": MIDDLE, "bootstrap_values": 10.0}, [1, -2, 13]),
        ([1, -2, 3], {"mask": ~MIDDLE}, [4, 0, 3]),
        ([1, -2, 3], {"mask": ~MIDDLE, "mask_mode": "reset"}, [1, 0, 3]),
    ],
)
def test_known_answers(target, rewards, changes, expected):
    arguments = {"rewards": torch.tensor([rewards]).float(), "values": torch.zeros(1, 3)}
    for result in run(target, {**arguments, "bootstrap_values": 0.0, "gamma": 1.0, **changes}):
        assert result.tolist() == [expected]


def test_values_of_their_own(target):
    """δ = (-1, 2, -4), by hand: step 0 follows step 1, step 1 does not follow step 2."""
    arguments = {"rewards": torch.ones(1, 3), "values": torch.tensor([[4.0, 2.0, 3.0]])}
    advantages, returns = run(target, arguments, bootstrap_values=-2.0, gamma=1.0)
    assert advantages.tolist() == [[1, 2, -4]]
    assert returns.tolist() == [[5, 4, -1]]


def test_docstring_example_runs():
    result = doctest.testmod(upgo)
    assert result.attempted and not result.failed


# -- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_dim", [-1, 0])
@MASKS
def test_equals_the_oracle(target, mask, mask_mode, time_dim):
    arguments = rollout(mask=mask)
    expected = oracle(**arguments, mask_mode=mask_mode)
    check(target, arguments, expected, mask_mode=mask_mode, time_dim=time_dim)


def test_a_discount_per_step(target):
    gamma = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) + 0.1
    gamma[0, 4] = 0.0
    arguments = rollout(gamma=gamma)
    terminated = arguments["terminated"] | (gamma == 0)
    check(target, arguments, oracle(**{**arguments, "terminated": terminated}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(target, dtype):
    arguments = rollout(dtype=dtype)
    check(target, arguments, oracle(**arguments), rtol=1e-6)


def test_float64(float64_target):
    arguments = rollout(dtype=torch.float64)
    check(float64_target, arguments, oracle(**arguments), rtol=1e-12)


@pytest.mark.parametrize("form", ["number", "edge", "next_values", "sparse"])
def test_forms_of_the_continuation(target, form):
    arguments = rollout()
    bootstrap = arguments["bootstrap_values"]
    done = arguments["terminated"] | arguments["truncated"]
    changes = {}
    if form == "number":
        bootstrap = torch.full(SHAPE, 1.5)
        changes = {"bootstrap_values": 1.5}
    elif form == "edge":
        arguments["truncated"] = torch.zeros(SHAPE, dtype=torch.bool)
        changes = {"bootstrap_values": bootstrap[:, -1].contiguous(), "truncated": None}
    elif form == "next_values":
        ahead = torch.cat([arguments["values"][:, 1:], bootstrap[:, -1:]], dim=1)
        changes = {"next_values": torch.where(done, bootstrap, ahead), "bootstrap_values": None}
    else:
        env, time = torch.nonzero(done, as_tuple=True)
        parts = (env, time, bootstrap[env, time], bootstrap[:, -1])
        changes = {"bootstrap_values": FinalValues(*(x.to(target.device) for x in parts))}
    check(target, arguments, oracle(**{**arguments, "bootstrap_values": bootstrap}), **changes)


@pytest.mark.parametrize("mask", [False, True])
def test_sequences_end_to_end(target, mask):
    arguments = rollout(mask=mask, shape=(1, 33))
    ends = [0, 7, 7, 8, 26, 33]
    pieces = []
    for start, end in itertools.pairwise(ends):
        piece = {name: x[:, start:end] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        pieces.append(oracle(**piece))
    flat = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    got = run(target, flat, cu_seqlens=torch.tensor(ends))
    for result, *wanted in zip(got, *[piece[:2] for piece in pieces], strict=True):
        assert_close(result, torch.cat(wanted, dim=1)[0])


# -- what comes with the library --------------------------------------------------------------------------------------


@MASKS
def test_gradients(float64_target, mask, mask_mode):
    gamma = torch.linspace(0.5, 1.0, 18, dtype=torch.float64).view(3, 6)
    arguments = rollout(dtype=torch.float64, mask=mask, gamma=gamma, shape=(3, 6))
    assert all(oracle(**arguments, mask_mode=mask_mode)[2].values())
    names = ("rewards", "values", "bootstrap_values", "gamma")

    def function(*tensors):
        changed = dict(zip(names, tensors, strict=True))
        return upgo.compute_upgo(**{**arguments, **changed}, mask_mode=mask_mode, backend=float64_target.backend)

    assert torch.autograd.gradcheck(function, [arguments[name].requires_grad_() for name in names])


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_nan_stays_in_its_episode(target, mask_mode):
    """Every cell of every input in a row of its own: what changes lies in its episode, at or before it.

    All steps do better than expected, so that nothing but the NaN itself could keep it from the steps before.
    """
    num_steps = 8
    terminated, truncated, masked = torch.zeros(3, num_steps, dtype=torch.bool)
    terminated[2] = truncated[4] = masked[6] = True
    starts = [0, 3, 5] + ([7] if mask_mode == "reset" else [])
    episode = [sum(t >= start for start in starts) for t in range(num_steps)]

    names = ("rewards", "values", "bootstrap_values", "gamma")
    places = list(itertools.product(names, range(num_steps)))
    ones = torch.ones(num_steps)
    row = {"rewards": ones, "values": torch.zeros(num_steps), "bootstrap_values": ones, "gamma": ones}
    row |= {"terminated": terminated, "truncated": truncated, "mask": ~masked}
    clean = {name: x.expand(len(places), num_steps).contiguous() for name, x in row.items()}
    dirty = {name: x.clone() for name, x in clean.items()}
    for i, (name, t) in enumerate(places):
        dirty[name][i, t] = torch.nan

    for got, want in zip(run(target, dirty, mask_mode=mask_mode), run(target, clean, mask_mode=mask_mode), strict=True):
        assert want.isfinite().all()
        for i, (name, t) in enumerate(places):
            changed = (got[i] != want[i]).nonzero().flatten().tolist()
            allowed = [s for s in range(t + 1) if episode[s] == episode[t] and not masked[s]]
            if masked[t] or (name == "bootstrap_values" and t not in (4, 7)):
                allowed = []
            assert set(changed) <= set(allowed), (name, t)
            if name == "rewards":
                assert got[i].isnan().nonzero().flatten().tolist() == allowed, (name, t)


def test_compiles_without_a_graph_break(target):
    torch._dynamo.reset()
    arguments = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in rollout().items()}
    rewards = arguments.pop("rewards")

    def function(rewards):
        return upgo.compute_upgo(2 * rewards, **arguments, backend=target.backend).returns + 1

    got = torch.compile(function, fullgraph=True, backend="aot_eager")(rewards)
    assert torch.equal(got, function(rewards))


def test_writes_into_out(target):
    arguments = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in rollout().items()}
    out = tuple(torch.full(SHAPE, torch.nan, device=target.device) for _ in range(2))
    got = upgo.compute_upgo(**arguments, out=out, backend=target.backend)
    want = upgo.compute_upgo(**arguments, backend=target.backend)
    assert all(x is y and torch.equal(x, z) for x, y, z in zip(got, out, want, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bootstrap_values": None}, ValueError, "bootstrap_values"),
        ({"values": torch.zeros(2, 17)}, ValueError, "values: got"),
        ({"values": torch.zeros(SHAPE, dtype=torch.int64)}, TypeError, "values: got"),
        ({"gamma": -1.0}, ValueError, "gamma: got"),
        ({"mask_mode": "drop"}, ValueError, "mask_mode: got"),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        upgo.compute_upgo(**{**rollout(), **changes})
