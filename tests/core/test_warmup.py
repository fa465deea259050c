"""Compilation ahead of training."""

import textwrap

import pytest
import torch
from processes import run_python

import rl_triton_core
from rl_triton_core import BackendUnavailableError, warm_up
from rl_triton_core.warmup import FUNCTIONS

COUNT_COMPILATIONS = """
import torch
from numba.core import event
import rl_triton_core
from rl_triton_core import compute_gae, compute_vtrace, normalize_advantages, warm_up

def count_compilations(call):
    with event.install_recorder("numba:compile") as recorder:
        call()
    return len(recorder.buffer)

zeros, flags = torch.zeros(128, 64), torch.zeros(128, 64, dtype=torch.bool)
"""


def run_program(program, cache):
    """Run a program in a process of its own, with a disk cache, and return what it printed."""
    return run_python(COUNT_COMPILATIONS + textwrap.dedent(program), NUMBA_CACHE_DIR=str(cache))


def test_after_warming_up_nothing_is_compiled(tmp_path):
    """In this process, and in later ones. Arguments that were not announced are compiled when they come."""
    pytest.importorskip("numba")
    calls = """
        def call():
            compute_gae(zeros, zeros, flags, flags, bootstrap_values=zeros, time_dim=0)
            compute_vtrace(zeros, zeros, flags, log_ratios=zeros, bootstrap_values=zeros[0], time_dim=0)
            normalize_advantages(zeros)
    """
    first = """
        def prepare():
            tensors = ("terminated", "truncated", "bootstrap_values")
            warm_up("compute_gae", (128, 64), tensors=tensors, time_dim=0)
            warm_up("compute_vtrace", (128, 64), tensors=("terminated", "log_ratios", "bootstrap_values"), time_dim=0)
            warm_up("normalize_advantages", (128, 64))

        def call_with_a_mask():
            compute_gae(zeros, zeros, flags, mask=flags, bootstrap_values=zeros, time_dim=0)

        print(count_compilations(prepare) > 0, count_compilations(call), count_compilations(call_with_a_mask) > 0)
    """
    printed = run_program(textwrap.dedent(calls) + textwrap.dedent(first), tmp_path)
    assert printed.split() == ["True", "0", "True"]
    printed = run_program(textwrap.dedent(calls) + "print(count_compilations(call))", tmp_path)
    assert printed.split() == ["0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="left to machines without a GPU")
def test_the_first_call_is_quick(tmp_path):
    """A bound far above the aim, for machines that are busy: processor time, without the import of Numba."""
    pytest.importorskip("numba")
    program = """
        import time
        start = time.process_time()
        compute_gae(zeros, zeros, flags, flags, bootstrap_values=zeros)
        print(time.process_time() - start)
    """
    import_time = "import rl_triton_core._internal.scan.cpu\ntorch.set_num_threads(1)\n"
    cold, warm = (float(run_program(import_time + textwrap.dedent(program), tmp_path)) for _ in range(2))
    assert cold < 4 and warm < 1.5


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("time_dim", [0, -1])
def test_every_function_can_be_warmed_up(name, time_dim):
    required = {"linear_recurrence": {"reverse": True}}
    assert warm_up(name, (3, 5), time_dim=time_dim, backend="reference", **required.get(name, {})) > 0


def test_there_is_one_for_every_public_function():
    assert {name for name in rl_triton_core.__all__ if name.startswith("compute_")} <= set(FUNCTIONS)


def capture_call(monkeypatch, name):
    """Let a function keep its arguments in the dictionary that is returned."""
    captured = {}
    original = FUNCTIONS[name]

    def capture(**arguments):
        captured.update(arguments)
        return original(**arguments)

    capture.__signature__ = __import__("inspect").signature(original)
    monkeypatch.setitem(FUNCTIONS, name, capture)
    return captured


def test_the_call_is_the_one_that_is_described(monkeypatch):
    call = capture_call(monkeypatch, "compute_gae")
    options = {"dtype": torch.float64, "flag_dtype": torch.uint8, "time_dim": 0, "backend": "reference"}
    names = ("terminated", "truncated", "mask", "bootstrap_values")
    warm_up("compute_gae", (7, 3), tensors=names, compute_returns=False, **options)
    shapes = {name: tuple(x.shape) for name, x in call.items() if isinstance(x, torch.Tensor)}
    assert shapes == dict.fromkeys(("rewards", "values", *names), (7, 3))
    assert {call[name].dtype for name in ("rewards", "values", "bootstrap_values")} == {torch.float64}
    assert {call[name].dtype for name in ("terminated", "truncated", "mask")} == {torch.uint8}
    assert (call["time_dim"], call["compute_returns"], call["backend"]) == (0, False, "reference")
    assert call["mask"].all() and not call["terminated"].any()


@pytest.mark.parametrize(("time_dim", "num_envs"), [(0, 3), (-2, 3), (1, 7), (-1, 7)])
def test_bootstrap_values_are_per_environment_without_truncations(monkeypatch, time_dim, num_envs):
    call = capture_call(monkeypatch, "compute_lambda_returns")
    warm_up("compute_lambda_returns", (7, 3), time_dim=time_dim, backend="reference")
    assert call["bootstrap_values"].shape == (num_envs,)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"function: got 'gae', expected one of .*compute_gae"):
        warm_up("gae", (3, 5))
    with pytest.raises(ValueError, match=r"tensors: got 'dones', expected names of arguments: rewards, values"):
        warm_up("compute_gae", (3, 5), tensors=("dones",))
    with pytest.raises(BackendUnavailableError):
        warm_up("compute_gae", (3, 5), backend="cpu", device="meta")
