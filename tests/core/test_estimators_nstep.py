"""n-step returns: known answers, an oracle straight from the definition, and what all estimators have."""

import itertools

import oracles
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import vmap

from rl_triton_core import FinalValues, compute_discounted_returns, compute_lambda_returns, compute_nstep_returns
from rl_triton_core.testing import assert_close, random_rollout

NAN, INF = torch.nan, torch.inf
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 13, 100)
MASKS = pytest.mark.parametrize(("valid", "mask_mode"), [(None, "skip"), (0.7, "skip"), (0.7, "reset")])


def make_rollout(shape=(4, 13), seed=0, dtype=torch.float64, valid=None, gamma=0.9):
    """Arguments with both flags, steps that have both, and perhaps a mask."""
    rollout = random_rollout(*shape, seed=seed, terminated_prob=0.12, truncated_prob=0.12, dtype=dtype)
    arguments = {**rollout._asdict(), "gamma": gamma}
    if valid is not None:
        arguments["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < valid
    return arguments


def compute_oracle(rewards, values, terminated, truncated, bootstrap_values, gamma, n, mask=None, mask_mode="skip"):
    """Reward by reward, for every step of every row by itself."""
    gamma = torch.as_tensor(gamma, dtype=torch.float64).expand(rewards.shape)
    mask = torch.ones_like(terminated) if mask is None else mask
    returns = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, valid in enumerate(mask.tolist()):
        steps = [t for t, is_valid in enumerate(valid) if is_valid]
        for start, first in enumerate(steps):
            total, discount = 0.0, 1.0
            for k, t in enumerate(steps[start : start + n]):
                total += discount * float(rewards[row, t])
                discount *= float(gamma[row, t])
                before_hole = mask_mode == "reset" and t + 1 < len(valid) and not valid[t + 1]
                if terminated[row, t] or discount == 0 or (before_hole and not truncated[row, t]):
                    break
                if truncated[row, t] or t == steps[-1]:
                    total += discount * float(bootstrap_values[row, t])
                    break
                if k == n - 1:
                    total += discount * float(values[row, steps[start + n]])
            returns[row, first] = total
    return returns


@MASKS
def test_the_oracle_of_the_self_test(valid, mask_mode):
    """It is another formulation of the same definition."""
    arguments = make_rollout(valid=valid)
    arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    arrays["bootstrap"] = arrays.pop("bootstrap_values")
    for n in LENGTHS:
        (expected,) = oracles.nstep_returns(**arrays, n=n, mask_mode=mask_mode)
        assert_close(compute_oracle(**arguments, n=n, mask_mode=mask_mode), expected)


def run_on(target, arguments, time_dim=-1, **changes):
    """The result as [num_envs, num_steps] on the CPU."""

    def place_argument(x):
        if not isinstance(x, torch.Tensor):
            return x
        return (x.t().contiguous() if time_dim == 0 and x.ndim == 2 else x).to(target.device)

    given = {name: place_argument(x) for name, x in {**arguments, **changes}.items()}
    result = compute_nstep_returns(**given, time_dim=time_dim, backend=target.backend).cpu()
    return result.t() if time_dim == 0 else result


# --- known answers ----------------------------------------------------------------------------------------------------

MIDDLE = torch.tensor([[False, True, False, False]])


@pytest.mark.parametrize(
    ("n", "changes", "expected"),
    [
        (1, {}, [21, 31, 41, 51]),
        (2, {}, [32, 42, 52, 51]),
        (3, {}, [43, 53, 52, 51]),
        (4, {}, [54, 53, 52, 51]),
        (9, {}, [54, 53, 52, 51]),
        (2, {"gamma": 0.5}, [9, 11.5, 14, 26]),
        (2, {"terminated": MIDDLE}, [2, 1, 52, 51]),
        (2, {"truncated": MIDDLE}, [52, 51, 52, 51]),
        (3, {"terminated": MIDDLE, "truncated": MIDDLE}, [2, 1, 52, 51]),
        (2, {"mask": ~MIDDLE}, [42, 0, 52, 51]),
        (2, {"mask": ~MIDDLE, "mask_mode": "reset"}, [1, 0, 52, 51]),
        (2, {"gamma": torch.tensor([[1.0, 0.0, 1.0, 1.0]])}, [2, 1, 52, 51]),
    ],
)
def test_known_answers(target, n, changes, expected):
    """Rewards 1, values 10 to 40, 50 behind the rollout."""
    arguments = {"rewards": torch.ones(1, 4), "values": torch.tensor([[10.0, 20.0, 30.0, 40.0]])}
    arguments |= {"bootstrap_values": 50.0, "gamma": 1.0, **changes}
    assert run_on(target, arguments, n=n).tolist() == [expected]


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("n", LENGTHS)
@MASKS
def test_equals_the_oracle(target, n, valid, mask_mode, time_dim):
    for dtype, rtol in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        arguments = make_rollout(valid=valid, dtype=dtype, gamma=torch.rand(4, 13, dtype=dtype) + 0.2)
        want = compute_oracle(**arguments, n=n, mask_mode=mask_mode)
        got = run_on(target, arguments, time_dim, n=n, mask_mode=mask_mode)
        assert got.dtype == dtype
        assert_close(got, want, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(target, dtype):
    arguments = make_rollout(dtype=dtype)
    got = run_on(target, arguments, n=3)
    assert got.dtype == torch.float32
    assert_close(got, compute_oracle(**arguments, n=3), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 20])
@MASKS
def test_packed_rows(target, n, valid, mask_mode):
    arguments, ends = make_rollout((1, 23), valid=valid), [0, 0, 7, 8, 8, 20, 23]
    pieces = []
    for start, end in itertools.pairwise(ends):
        piece = {name: x[:, start:end] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        pieces.append(compute_oracle(**piece, n=n, mask_mode=mask_mode))
    flat = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    got = run_on(target, flat, n=n, mask_mode=mask_mode, cu_seqlens=torch.tensor(ends))
    assert_close(got, torch.cat(pieces, dim=1)[0], rtol=1e-13)


def test_forms_of_the_continuation(target):
    arguments = make_rollout()
    bootstrap = arguments["bootstrap_values"]
    want = compute_oracle(**arguments, n=3)
    done = arguments["terminated"] | arguments["truncated"]
    env, time = done.nonzero(as_tuple=True)
    parts = [x.to(target.device) for x in (env, time, bootstrap[env, time], bootstrap[:, -1])]
    assert_close(run_on(target, arguments, n=3, bootstrap_values=FinalValues(*parts)), want)
    ahead = torch.cat([arguments["values"][:, 1:], bootstrap[:, -1:]], dim=1)
    changes = {"next_values": torch.where(done, bootstrap, ahead), "bootstrap_values": None, "values": None}
    assert_close(run_on(target, arguments, n=3, **changes), want)


def test_identities(target):
    """One step is λ = 0; more steps than there are give the discounted return."""
    arguments = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in make_rollout().items()}
    one, every = (compute_nstep_returns(**arguments, n=n, backend=target.backend) for n in (1, 13))
    backend = "reference" if target.backend == "triton" else target.backend
    assert_close(one, compute_lambda_returns(**arguments, lambda_=0.0, backend=backend))
    del arguments["values"]
    assert_close(every, compute_discounted_returns(**arguments, backend=backend))


def test_empty(target):
    for shape in ((0, 0), (0, 5), (5, 0)):
        zero = torch.zeros(shape, device=target.device)
        assert compute_nstep_returns(zero, zero, n=2, bootstrap_values=0.0, backend=target.backend).shape == shape


# --- containment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_bad_reaches_its_episode_and_window_only(target, n, bad):
    """A cell of each input in a row of its own: what changes reads the cell, by the oracle."""
    num_steps = 8
    flags = torch.zeros(3, num_steps, dtype=torch.bool)
    flags[0, 2] = flags[1, 4] = flags[2, 6] = True
    names = ("rewards", "values", "bootstrap_values")
    places = list(itertools.product(names, range(num_steps)))
    shape = (len(places), num_steps)
    clean = {name: torch.ones(shape) for name in names}
    clean |= {name: x.expand(shape) for name, x in zip(("terminated", "truncated"), flags, strict=False)}
    dirty = {name: x.clone() for name, x in clean.items()}
    for i, (name, t) in enumerate(places):
        dirty[name][i, t] = bad
    want = compute_oracle(**dirty, gamma=1.0, n=n)
    got = run_on(target, dirty, gamma=1.0, n=n)
    assert torch.equal(got.isfinite(), want.isfinite())
    masked = {**dirty, "mask": ~flags[2].expand(shape), "gamma": 1.0, "n": n}
    assert torch.equal(run_on(target, masked).isfinite(), compute_oracle(**masked).isfinite())


@pytest.mark.parametrize(("n", "gamma"), [(64, 0.95), (255, 0.99), (1000, 0.997)])
def test_powers_of_the_discount_in_float32(target, n, gamma):
    """Are rounded a few times, and not in proportion to n."""
    rewards, values = torch.zeros(1, 2 * n, device=target.device), torch.ones(1, 2 * n, device=target.device)
    got = compute_nstep_returns(rewards, values, n=n, gamma=gamma, bootstrap_values=1.0, backend=target.backend)
    exact = torch.tensor(gamma).double() ** n if target.backend != "reference" else torch.tensor(gamma**n)
    assert_close(got[0, :n].cpu().double(), exact.double().expand(n), rtol=4 * 2**-24)


def test_products_that_overflow_behind_a_reset(target):
    rewards = torch.zeros(1, 300)
    rewards[0, -1] = 1.0
    terminated = torch.zeros(1, 300, dtype=torch.bool)
    terminated[0, 280] = True
    arguments = {"rewards": rewards, "values": torch.zeros(1, 300), "terminated": terminated, "gamma": 50.0}
    got = run_on(target, arguments, n=299, bootstrap_values=0.0)
    assert not got[0, :281].any()


# --- gradients, compilation, out --------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("n", [1, 3, 9])
@MASKS
def test_gradients(float64_target, n, valid, mask_mode):
    arguments = make_rollout((2, 6), valid=valid, gamma=torch.rand(2, 6, dtype=torch.float64) + 0.2)
    names = ("rewards", "values", "bootstrap_values", "gamma")

    def call_estimator(*tensors):
        given = {**arguments, **dict(zip(names, tensors, strict=True))}
        return compute_nstep_returns(**given, n=n, mask_mode=mask_mode, backend=float64_target.backend)

    leaves = [arguments[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call_estimator, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call_estimator, leaves)


def test_vmap(target):
    arguments = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in make_rollout().items()}
    rewards = arguments.pop("rewards")
    batch = torch.stack([rewards, 2 * rewards, -rewards])

    def call_estimator(rewards):
        return compute_nstep_returns(rewards, **arguments, n=3, backend=target.backend)

    torch.testing.assert_close(vmap(call_estimator)(batch), torch.stack([call_estimator(x) for x in batch]))


def test_compiles_once(target):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call_estimator(arguments, gamma):
        return compute_nstep_returns(**{**arguments, "gamma": gamma}, n=5, backend=target.backend)

    compiled, first = torch.compile(call_estimator, backend=counter, fullgraph=True, dynamic=True), 0
    for i, shape in enumerate(((3, 5), (4, 7), (6, 9))):
        rollout = make_rollout(shape, seed=i)
        arguments = {name: x.to(target.device) for name, x in rollout.items() if isinstance(x, torch.Tensor)}
        gamma = 0.9 + 0.01 * i
        torch.testing.assert_close(compiled(arguments, gamma), call_estimator(arguments, gamma))
        first = counter.frame_count if i == 0 else first
    assert counter.frame_count == first


def test_writes_into_out(target):
    arguments = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in make_rollout().items()}
    out = torch.full((13, 4), NAN, dtype=torch.float64, device=target.device).t()
    got = compute_nstep_returns(**arguments, n=3, out=out, backend=target.backend)
    assert got is out
    assert torch.equal(out, compute_nstep_returns(**arguments, n=3, backend=target.backend))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 0}, ValueError, "n: got 0, expected at least 1"),
        ({"n": 2.0}, TypeError, "n: got 2.0, expected an int"),
        ({"n": True}, TypeError, "n: got True, expected an int"),
        ({"bootstrap_values": None}, ValueError, "bootstrap_values: got None"),
        ({"values": None}, ValueError, "values: got None"),
        ({"next_values": torch.zeros(4, 13)}, ValueError, "values: got both"),
        ({"values": torch.zeros(2, 3)}, ValueError, "values: got shape"),
        ({"gamma": -1.0}, ValueError, "gamma: got -1.0"),
        ({"mask_mode": "drop"}, ValueError, "mask_mode: got"),
        ({"backend": "numpy"}, ValueError, "backend: got"),
        ({"out": torch.zeros(3)}, ValueError, "out"),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        compute_nstep_returns(**{**make_rollout(), "n": 3, **changes})


def test_n_has_no_default():
    with pytest.raises(TypeError, match="'n'"):
        compute_nstep_returns(**make_rollout())
