"""Compilation ahead of training, by the command."""

import textwrap

import pytest
from processes import run_python

COUNT_COMPILATIONS = """
import io
from contextlib import redirect_stdout

import torch
from numba.core import event
import rl_triton_core
from rl_triton_core import compute_gae, compute_vtrace, normalize_advantages
from rl_triton_core.cli import main

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
            compute_gae(zeros, zeros, flags, bootstrap_values=zeros[0], time_dim=0)
            ratios = {"target_log_probs": zeros, "behaviour_log_probs": zeros}
            compute_vtrace(zeros, zeros, flags, **ratios, bootstrap_values=zeros[0], time_dim=0)
            normalize_advantages(zeros)
    """
    first = """
        def prepare():
            names = "gae vtrace normalize_advantages".split()
            with redirect_stdout(io.StringIO()):
                main(["warmup", "--shape", "128", "64", "--time-dim", "0", "--estimator", *names])

        def call_with_a_mask():
            compute_gae(zeros, zeros, flags, mask=flags, bootstrap_values=zeros, time_dim=0)

        print(count_compilations(prepare) > 0, count_compilations(call), count_compilations(call_with_a_mask) > 0)
    """
    printed = run_program(textwrap.dedent(calls) + textwrap.dedent(first), tmp_path)
    assert printed.split() == ["True", "0", "True"]
    printed = run_program(textwrap.dedent(calls) + "print(count_compilations(call))", tmp_path)
    assert printed.split() == ["0"]
