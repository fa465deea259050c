"""Converters on rollouts recorded from Gymnasium, against GAE computed episode by episode, and by hand."""

import importlib.util
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_triton_core import FinalValues, compute_gae
from rl_triton_core import conventions as conv

if importlib.util.find_spec("gymnasium"):
    import conventions_rollouts as real
    from gymnasium.vector import AutoresetMode

    MODES = {mode.name: mode for mode in AutoresetMode}

GAMMA, LAMBDA = 0.97, 0.9
NAMES = ["cartpole", "pendulum", "both"]
EXAMPLES = re.findall(
    r"```python\n(.*?)```", Path(__file__).parents[2].joinpath("docs", "conventions.md").read_text(), re.DOTALL
)


def skip_without(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@cache
def record_once(name, mode):
    return real.record(name, MODES[mode])


def list_windows(name, mode):
    recorded_windows, recorders = record_once(name, mode)
    return [(window, recorders) for window in recorded_windows]


def t(array, time_dim=0):
    """What a training loop stacked, [num_steps, num_envs] or, on request, [num_envs, num_steps]."""
    tensor = torch.as_tensor(np.asarray(array))
    return tensor.t().contiguous() if tensor.ndim == 2 and time_dim % 2 else tensor


def compute_advantages(rewards, values, boundaries):
    """Advantages as [num_envs, num_steps], in float64."""
    result = compute_gae(
        rewards, values, **boundaries._asdict(), gamma=GAMMA, lambda_=LAMBDA, backend="reference"
    ).advantages
    return result if boundaries.time_dim % 2 else result.t()


def assert_as_walked(got, want, mask=None, rtol=1e-12):
    """Right wherever an environment made a transition, 0 and masked wherever it made none."""
    walked = ~np.isnan(want)
    if mask is None:
        assert walked.all()
    else:
        np.testing.assert_array_equal(mask.numpy(), walked)
    np.testing.assert_allclose(got.numpy(), np.where(walked, want, 0.0), rtol=rtol, atol=rtol)


def make_sparse(window, time_dim):
    """Values of the final observations at truncated steps alone."""
    time, env = np.nonzero(window.truncated)
    return FinalValues(t(env), t(time), t(real.value(window.final_obs[time, env])))


def make_dense(window, time_dim):
    return t(real.value(window.final_obs), time_dim)


@skip_without("gymnasium")
@pytest.mark.parametrize("form", [make_dense, make_sparse], ids=["dense", "sparse"])
@pytest.mark.parametrize("time_dim", [0, -1, 1, -2])
@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_with_final_observations_apart(name, mode, time_dim, form):
    ends_done = 0
    for window, recorders in list_windows(name, mode):
        ends_done += window.truncated[-1].sum()
        boundaries = conv.from_gymnasium_same_step(
            t(window.terminated, time_dim),
            t(window.truncated, time_dim),
            form(window, time_dim),
            t(real.value(window.next_obs)),
            time_dim=time_dim,
        )
        got = compute_advantages(t(window.rewards, time_dim), t(real.value(window.obs), time_dim), boundaries)
        assert boundaries.mask is None
        assert_as_walked(got, real.advantages(recorders, window.start, len(window.obs)))
    assert ends_done, "no window ended with a truncation"


@skip_without("gymnasium")
@pytest.mark.parametrize("name", NAMES)
def test_the_lines_for_gymnasium_next_step(name):
    """Those of the page."""
    lines = {}
    exec(re.search(r"def mark_resets.*?\n\n\n", "".join(EXAMPLES), re.DOTALL)[0], {"torch": torch}, lines)
    begins_with_reset = ends_done = ends_with_reset = 0
    for window, recorders in list_windows(name, "NEXT_STEP"):
        begins_with_reset += window.departed.sum()
        ends_done += window.truncated[-1].sum()
        ends_with_reset += window.done[-2].sum()
        values, ended, cut, final = map(
            t, (real.value(window.obs), window.terminated, window.truncated, window.next_obs)
        )
        found = lines["mark_resets"](values, ended, cut, t(real.value(final.numpy())), t(window.departed))
        boundaries = conv.Boundaries(**found, time_dim=0)
        got = compute_advantages(t(window.rewards), values, boundaries)
        assert_as_walked(got, real.advantages(recorders, window.start, len(window.obs)), boundaries.mask.t())
    assert begins_with_reset and ends_done and ends_with_reset


def flags(*cells):
    return torch.tensor([cells], dtype=torch.bool)


def numbers(*cells):
    return torch.tensor([cells], dtype=torch.float32)


def edge(x):
    return torch.tensor([x])


def assert_is(boundaries, terminated, truncated, bootstrap, mask):
    """Equal to rows written down, NaN to NaN."""
    assert boundaries.time_dim == -1
    want = (flags(*terminated), truncated and flags(*truncated), bootstrap, mask and flags(*mask))
    for name, x in zip(boundaries._fields, want, strict=False):
        got = getattr(boundaries, name)
        if x is None:
            assert got is None, name
        else:
            torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True, msg=name)


def test_same_step_by_hand():
    term, trunc, final = flags(1, 0, 1, 0), flags(0, 1, 1, 0), numbers(10, 11, 12, 13)
    got = conv.from_gymnasium_same_step(term, trunc, final, edge(7.0))
    assert_is(got, (1, 0, 1, 0), (0, 1, 1, 0), numbers(10, 11, 12, 7), None)
    got = conv.from_gymnasium_same_step(flags(0, 0), flags(0, 1), numbers(10, 11), edge(7.0))
    assert_is(got, (0, 0), (0, 1), numbers(10, 11), None)


def test_arrival_flags_by_hand():
    got = conv.from_cleanrl(flags(1, 0, 1, 0), edge(True), edge(9.0), time_dim=-1)
    assert_is(got, (0, 1, 0, 1), None, edge(9.0), None)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_truncated_step_without_a_final_value_is_loud(form):
    """Also at the window's end, where the next value is that of the next episode."""
    nothing = numbers(math.nan, math.nan, math.nan) if form == "dense" else FinalValues([], [], [])
    for trunc, loud in ((flags(1, 0, 0), [True, False, False]), (flags(0, 0, 1), [True] * 3)):
        boundaries = conv.from_gymnasium_same_step(flags(0, 0, 0), trunc, nothing, edge(7.0))
        assert torch.isnan(compute_advantages(numbers(1, 1, 1), numbers(1, 1, 1), boundaries)).tolist() == [loud]


def make_arguments(name, num_envs=3, num_steps=4, time_dim=-1, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shape = (num_steps, num_envs) if time_dim % 2 == 0 else (num_envs, num_steps)
    made = {
        "per_step": lambda: torch.randn(shape, generator=generator),
        "per_env": lambda: torch.randn(num_envs, generator=generator),
        "flag": lambda: torch.rand(shape, generator=generator) < 0.3,
        "flag_per_env": lambda: torch.rand(num_envs, generator=generator) < 0.3,
    }
    return {key: made[kind]().to(device) for key, kind in SIGNATURES[name].items()} | {"time_dim": time_dim}


FINAL = {"terminated": "flag", "truncated": "flag", "final_values": "per_step", "next_value": "per_env"}
SIGNATURES = {
    "from_gymnasium_same_step": FINAL,
    "from_cleanrl": {"dones": "flag", "next_done": "flag_per_env", "next_value": "per_env"},
}
CONVERTERS = pytest.mark.parametrize("name", SIGNATURES)


def run_converter(name, **kwargs):
    return [*getattr(conv, name)(**kwargs)[:4]]


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@CONVERTERS
@pytest.mark.parametrize(("num_envs", "num_steps"), [(0, 0), (0, 4), (3, 0), (3, 1), (1, 1), (2, 2)])
def test_any_size(name, num_envs, num_steps):
    for time_dim in (0, -1):
        kwargs = make_arguments(name, num_envs, num_steps, time_dim)
        boundaries = getattr(conv, name)(**kwargs)
        assert boundaries.time_dim == time_dim
        rewards = torch.zeros(boundaries.terminated.shape)
        result = compute_gae(rewards, rewards, **boundaries._asdict(), backend="reference")
        assert result.advantages.shape == boundaries.terminated.shape == rewards.shape


@CONVERTERS
@pytest.mark.parametrize("shape", [(1, 3), (3, 1)])
def test_entries_per_environment_may_have_a_dimension_more(name, shape):
    kwargs = make_arguments(name)
    want = run_converter(name, **kwargs)
    given = {key: kwargs[key].reshape(shape) for key, kind in SIGNATURES[name].items() if "per_env" in kind}
    assert_same(run_converter(name, **kwargs | given), want)


@CONVERTERS
def test_one_graph_under_torch_compile(name):
    """Which nothing breaks that looks at what a tensor holds, and so would wait for a device."""
    kwargs = make_arguments(name)
    torch.compiler.reset()  # converters are many, and compiled from one place
    compiled = torch.compile(lambda **kwargs: run_converter(name, **kwargs), fullgraph=True, backend="eager")
    assert_same(compiled(**kwargs), run_converter(name, **kwargs))


def test_gradients_flow_into_the_bootstrap():
    kwargs = make_arguments("from_gymnasium_same_step")
    kwargs["final_values"].requires_grad_()
    conv.from_gymnasium_same_step(**kwargs).bootstrap_values.sum().backward()
    assert kwargs["final_values"].grad[:, :-1].eq(1).all()


CELLS = [(name, key, kind) for name, signature in SIGNATURES.items() for key, kind in signature.items()]


@pytest.mark.parametrize(("name", "key", "kind"), CELLS, ids=[f"{name}-{key}" for name, key, _ in CELLS])
def test_errors_name_the_argument(name, key, kind):
    def assert_refused(error, value, *message):
        with pytest.raises(error, match="^" + key) as raised:
            run_converter(name, **make_arguments(name) | {key: value})
        assert all(part in str(raised.value) for part in message), raised.value

    good = make_arguments(name)[key]
    assert_refused(TypeError, good.tolist(), "got list", "Tensor")
    assert_refused(TypeError, good.numpy(), "got ndarray", "Tensor")
    assert_refused(TypeError, good.to(torch.complex64), "got dtype torch.complex64", "float32")
    if "flag" not in kind:
        assert_refused(TypeError, good.to(torch.int64), "got dtype torch.int64", "float32")
        assert_refused(TypeError, good.bool(), "got dtype torch.bool", "float32")
    assert_refused(ValueError, good[None, None], "got shape", "expected")
    first = key == next(iter(SIGNATURES[name]))
    if "per_env" in kind:
        assert_refused(ValueError, good[:2], "got shape (2,)", "expected (3,), [num_envs]")
        assert_refused(ValueError, good[:2, None], "got shape (2,)", "expected (3,), [num_envs]")
        assert_refused(ValueError, torch.stack([good] * 4), "got shape (4, 3)", "expected (3,), [num_envs]")
        assert_refused(ValueError, good[0], "got shape ()", "expected (3,), [num_envs]")
    elif not first:
        assert_refused(
            ValueError, good.t(), "got shape (4, 3)", "expected (3, 4), that of " + next(iter(SIGNATURES[name]))
        )
    if not first:
        assert_refused(ValueError, good.to("meta"), "got device meta", "expected cpu")
    assert_refused(TypeError, None, "got NoneType", "Tensor")


def test_final_values_with_an_edge_are_refused():
    kwargs = make_arguments("from_gymnasium_same_step")
    final = FinalValues([0], [1], [2.0])
    conv.from_gymnasium_same_step(**kwargs | {"final_values": final})
    with pytest.raises(ValueError, match=r"^final_values.last_value: got float, expected None, since next_value"):
        conv.from_gymnasium_same_step(**kwargs | {"final_values": replace(final, last_value=0.0)})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: "+".join(re.findall(r"(?:from|approximate)_\w+", code)))
def test_the_examples_of_the_documentation(example):
    for package in ("gymnasium", "stable_baselines3"):
        if package in example:
            pytest.importorskip(package)
    exec(compile(example, "docs/conventions.md", "exec"), {})
