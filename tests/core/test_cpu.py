"""What the cpu backend promises beyond what every backend does: which walk takes which layout, and its variants."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from llvmlite.binding import get_host_cpu_features
from processes import run_python

from rl_triton_core import compute_gae, compute_vtrace, set_fast_path
from rl_triton_core.extending import Recurrence, check_layout, solve

cpu = pytest.importorskip("rl_triton_core._internal.scan.cpu")


def make_rollout(num_steps=9, num_envs=33):
    """Arguments of GAE in time-major layout, with enough environments to be walked side by side."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, gamma = torch.rand(3, num_steps, num_envs, generator=generator)
    terminated, truncated, valid = torch.rand(3, num_steps, num_envs, generator=generator) < 0.2
    per_step = {"rewards": rewards, "values": values, "terminated": terminated, "gamma": gamma}
    return {**per_step, "truncated": truncated, "mask": ~valid, "bootstrap_values": torch.rand_like(rewards)}


def spread_rows(x, dim):
    """The same elements, with as many others between them in memory along a dimension."""
    shape = [2 * size if i == dim else size for i, size in enumerate(x.shape)]
    spread_out = torch.ones(shape, dtype=x.dtype)[::2] if dim == 0 else torch.ones(shape, dtype=x.dtype)[:, ::2]
    return spread_out.copy_(x)


@pytest.fixture(autouse=True)
def normal_path():
    """What the fast path repeats has been here before."""
    with set_fast_path(False):
        yield


@pytest.fixture
def variants(monkeypatch):
    seen, original = [], cpu.compile_walk
    monkeypatch.setattr(
        cpu, "compile_walk", lambda recurrence, variant: (seen.append(variant), original(recurrence, variant))[1]
    )
    return seen


@pytest.mark.parametrize("name", make_rollout())
@pytest.mark.parametrize("dim", [0, 1])
def test_one_argument_with_strides_of_its_own(name, dim, variants):
    """Beside contiguous ones. Steps may lie apart; where lanes do, the compiled code has to know."""
    given = make_rollout()
    want = compute_gae(**given, time_dim=0, backend="cpu")
    got = compute_gae(**given | {name: spread_rows(given[name], dim)}, time_dim=0, backend="cpu")
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert [variant.is_contiguous for variant in variants] == [True, dim == 0]


@pytest.mark.parametrize("form", ["strided", "one number", "half precision"])
def test_bootstrap_values_per_environment_leave_lanes_side_by_side(form, variants):
    given = make_rollout()
    del given["truncated"], given["mask"]
    values = torch.arange(66.0)[::2]
    if form == "one number":
        values = torch.tensor(3.0)
    if form == "half precision":
        values = values.bfloat16()
    given["bootstrap_values"] = values
    got = compute_gae(**given, time_dim=0, backend="cpu")
    given["bootstrap_values"] = values.float().expand(33).contiguous()
    want = compute_gae(**given, time_dim=0, backend="cpu")
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert variants[0] == variants[1] and variants[0].is_contiguous


@pytest.mark.parametrize(
    ("num_envs", "time_dim", "is_serial"), [(7, 0, True), (8, 0, False), (33, 0, False), (33, -1, True), (1, 0, True)]
)
def test_lanes_are_walked_side_by_side_where_they_lie_so(num_envs, time_dim, is_serial, variants):
    given = make_rollout(num_envs=num_envs)
    given = given if time_dim == 0 else {name: x.T.contiguous() for name, x in given.items()}
    compute_gae(**given, time_dim=time_dim, backend="cpu")
    assert [variant.is_serial for variant in variants] == [is_serial]


def test_flags_of_different_types_share_variants(variants):
    """Of bytes, or all of float32."""
    given = make_rollout()
    want = compute_gae(**given, time_dim=0, backend="cpu")
    for flag_dtypes in (("uint8", "bool"), ("float32", "bool"), ("bfloat16", "float64"), ("float32", "float32")):
        terminated, truncated = (getattr(torch, name) for name in flag_dtypes)
        others = {"terminated": given["terminated"].to(terminated), "truncated": given["truncated"].to(truncated)}
        if flag_dtypes == ("float32", "float32"):
            others["mask"] = given["mask"].float()
        got = compute_gae(**given | others, time_dim=0, backend="cpu")
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert len(set(variants[:-1])) == 1 and variants[-1] != variants[0]


def test_a_ratio_that_is_nan_stays_nan():
    """A clip does not hide it."""
    ratios = torch.zeros(4, 33).index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(torch.nan))
    rest = {"bootstrap_values": 0.0, "time_dim": 0, "backend": "cpu"}
    targets = compute_vtrace(torch.ones(4, 33), torch.ones(4, 33), log_ratios=ratios, **rest)[0]
    assert targets[2, 5].isnan() and targets[:, :5].isfinite().all()


LOOKAHEAD = Recurrence(
    name="lookahead_of_the_test",
    inputs=("values", "rewards"),
    num_lookahead=2,
    outputs=("states", "next_values", "next_rewards"),
    coefficients=lambda step: (step.inputs[1], step.decay),
    readout=lambda step, state, after: (state, step.next_inputs[0], step.next_inputs[1]),
)


@pytest.mark.parametrize("mask_mode", ["skip", "reset", None])
@pytest.mark.parametrize("time_dim", [0, -1])
def test_equations_see_no_inputs_of_another_episode(mask_mode, time_dim):
    """The next inputs are 0 where the trajectory ends, whether the equation gates what it makes of them or not."""
    given = make_rollout()
    terminated, truncated, mask = (given.pop(name) for name in ("terminated", "truncated", "mask"))
    flags = {"terminated": terminated, "truncated": truncated} | ({"mask": mask} if mask_mode else {})
    options = {"wanted": (True,) * 3, "gamma": 0.5, "mask_mode": mask_mode or "skip", "bootstrap_values": 0.0, **flags}
    if time_dim == -1:
        given, options = ({k: x.T if torch.is_tensor(x) else x for k, x in y.items()} for y in (given, options))
    inputs = {"values": given["values"], "rewards": given["rewards"]}
    layout = check_layout("values", inputs["values"], time_dim)
    got, want = (solve(LOOKAHEAD, inputs, layout, **options, backend=name) for name in ("cpu", "reference"))
    ends = (terminated | truncated).T if time_dim == -1 else terminated | truncated
    assert not got[1][ends].any() and not got[2][ends].any()
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    assert torch.allclose(got[0], want[0], rtol=1e-5)


PRINT_WALK = """
    import sys
    import numba
    import torch
    from rl_triton_core import compute_gae
    from rl_triton_core._internal.scan import cpu

    def print_code(walk, num_addresses, num_numbers):
        signature = numba.void(
            *[numba.int64] * 5,
            numba.types.UniTuple(numba.int64, num_addresses),
            numba.types.UniTuple(numba.float64, num_numbers),
        )
        compiled = numba.njit([signature], error_model="numpy", no_cfunc_wrapper=True)(walk)
        print(compiled.inspect_llvm(signature.args))
        return compiled.overloads[signature.args].entry_point

    cpu.compile_entry = print_code
    x, flags = torch.ones(4, 32), torch.zeros(4, 32, dtype=torch.bool)
    mask = {"mask": ~flags} if sys.argv[1] == "mask" else {}
    compute_gae(x, x, flags, flags, **mask, bootstrap_values=0.0, time_dim=0)
"""


@pytest.mark.parametrize("mask", ["mask", "no mask"])
def test_lanes_side_by_side_go_into_vectors(mask, tmp_path):
    """Unconditionally: no check at run time whether tensors overlap, which a walk back in time would always fail."""
    if mask == "mask" and not get_host_cpu_features().get("avx512bw"):
        pytest.skip("bytes are read and written under a mask with AVX-512 only")
    printed = run_python(PRINT_WALK, mask, NUMBA_OPT="3", NUMBA_CACHE_DIR=str(tmp_path))
    assert re.search(r"fmul <\d+ x float>", printed) and re.search(r"store <\d+ x float>", printed)
    assert "memcheck" not in printed


COMPILE = """
    import sys, torch

    sys.path.insert(0, sys.argv[1])
    import other, rl_triton_core as ours

    x = torch.zeros(3, 4)
    ours.compute_gae(x, x, bootstrap_values=0.0)
    ours.normalize_advantages(x)
"""
OTHER = "import numba\n\n@numba.njit('void()', cache=True)\ndef do_nothing(): pass\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the user's cache folder is elsewhere")
def test_compiled_code_is_kept_in_the_folder_of_the_user(tmp_path):
    """Functions of others are kept where Numba puts them."""
    package, cache = tmp_path / "rl_triton_core", tmp_path / "cache"
    shutil.copytree(Path(cpu.__file__).parents[2], package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other.py").write_text(OTHER)
    run_python(COMPILE, str(tmp_path), XDG_CACHE_HOME=str(cache), NUMBA_CACHE_DIR="", NUMBA_OPT="1")
    found = [{path.name.split(".")[1][:4] for path in folder.rglob("*.nbc")} for folder in (cache, package)]
    assert found[0] >= {"gae_", "find"} and not found[1]
    assert list((tmp_path / "__pycache__").glob("other.do_nothing*.nbi"))
