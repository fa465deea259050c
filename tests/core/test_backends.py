"""The door to the backends, and what `import rl_triton_core` may and may not do."""

import os
from types import SimpleNamespace

import pytest
import torch
from processes import run_python

import rl_triton_core as ours
from rl_triton_core._internal import backend as backends
from rl_triton_core._internal.scan import reference
from rl_triton_core._internal.scan.recurrence import Expectation
from rl_triton_core.testing import assert_close, random_rollout

OPTIONAL = ("triton", "numba", "gymnasium", "stable_baselines3", "ray", "rl_triton_adapters")


def test_a_backend_that_is_there_is_listed(target):
    assert target.backend in ours.available_backends(torch.device(target.device))


def test_the_list_is_of_usable_backends():
    names = ours.available_backends("cpu")
    assert isinstance(names, tuple) and "reference" in names and set(names) <= {"triton", "cpu", "reference"}
    for device in (None, "cpu", torch.device("cpu")):
        assert [ours.check_backend(name, device) for name in (None, *names)] == [None] * (1 + len(names))
    rollout = random_rollout(3, 5)
    results = [ours.compute_gae(**rollout._asdict(), backend=name) for name in names]
    for result in results:
        assert_close(result.advantages, results[0].advantages)


def test_the_check_of_a_name_and_of_a_device():
    with pytest.raises(ValueError, match="backend: got 'nope', expected one of triton, cpu, reference, or None"):
        ours.check_backend("nope")
    ours.check_backend("cpu")
    with pytest.raises(ours.BackendUnavailableError, match="backend: got 'cpu', which is not available: it runs on"):
        ours.check_backend("cpu", "cuda")


def test_the_automatic_choice(target):
    """It gives what one of the listed backends gives, and takes float64 on the CPU."""
    rollout = random_rollout(3, 5, device=target.device)
    chosen = ours.compute_gae(**rollout._asdict())
    assert_close(chosen.advantages, ours.compute_gae(**rollout._asdict(), backend=target.backend).advantages)
    assert ours.compute_gae(**random_rollout(3, 5, dtype=torch.float64)._asdict()).advantages.dtype == torch.float64


@pytest.fixture
def add_backend(monkeypatch):
    """A function that adds a backend, which leaves the work to the reference and notes the next values that it got."""

    def add(name, seen, supported=False, **topics):
        def run(problem):
            seen.append(problem.next_values)
            if isinstance(problem.next_values, Expectation):
                problem.next_values = problem.next_values.sum_over_actions(problem.dtype)
            reference.run(problem)

        scan = SimpleNamespace(run=run, unavailable=reference.unavailable, SUPPORTS_EXPECTATION=supported)
        load, backend = backends.load_backend, backends.load_backend("reference")._replace(scan=scan, **topics)
        monkeypatch.setattr(backends, "BACKENDS", (*backends.BACKENDS, name))
        monkeypatch.setattr(backends, "load_backend", lambda other: backend if other == name else load(other))
        return name

    return add


def test_a_backend_normalizes_by_its_own_function(add_backend):
    name = add_backend("that_normalizes", [], moments=SimpleNamespace(run=lambda task, exchange: task.out.fill_(7)))
    assert name in ours.available_backends()
    assert ours.normalize_advantages(torch.randn(3, 5), backend=name).eq(7).all()


@pytest.mark.parametrize("supported", [False, True])
def test_an_expectation_is_summed_for_a_backend_that_does_not(add_backend, supported):
    seen = []
    name = add_backend(f"that_sums_{supported}", seen, supported)
    rewards, probs, values = torch.randn(3, 5), torch.rand(3, 5, 2), torch.randn(3, 5, 2)
    inputs = {"log_ratios": rewards, "next_action_probs": probs, "next_q_values": values}
    results = ours.compute_retrace(rewards, rewards, **inputs, backend=name)
    assert_close(results.targets, ours.compute_retrace(rewards, rewards, **inputs, backend="reference").targets)
    (next_values,) = seen
    assert isinstance(next_values, Expectation) is supported
    if not supported:
        assert torch.equal(next_values, (probs * values).sum(-1))


def test_triton_without_interpreter_refuses_cpu_tensors():
    printed = run_python("""
        from rl_triton_core import BackendUnavailableError, available_backends, compute_gae
        from rl_triton_core.testing import random_rollout

        assert "triton" not in available_backends("cpu")
        rollout = random_rollout(3, 5)._asdict()
        compute_gae(**rollout)
        try:
            compute_gae(**rollout, backend="triton")
        except BackendUnavailableError as error:
            print(error)
    """)
    assert "triton" in printed and "cpu" in printed and "TRITON_INTERPRET" in printed


def test_import_costs_little_beyond_torch_and_brings_nothing_optional():
    printed = run_python(f"""
        import sys, time
        import numpy, torch

        before, start = set(sys.modules), time.perf_counter()
        import rl_triton_core
        print(time.perf_counter() - start < 1.0)
        import rl_triton_core.testing
        tops = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(sorted(tops & set({OPTIONAL!r})))
    """)
    assert printed.splitlines() == ["True", "[]"]


def test_without_anything_optional():
    """Only the reference is left, and it works; the others say what they miss."""
    program = """
        import torch
        from rl_triton_core import BackendUnavailableError, available_backends, compute_gae
        from rl_triton_core.testing import random_rollout

        print(available_backends("cpu"))
        rollout = random_rollout(3, 5)._asdict()
        assert torch.equal(compute_gae(**rollout)[0], compute_gae(**rollout, backend="reference")[0])
        for name in ("cpu", "triton"):
            try:
                compute_gae(**rollout, backend=name)
            except BackendUnavailableError as error:
                print(name, error)
    """
    printed = run_python(program, without=OPTIONAL, TRITON_INTERPRET="1")
    names, cpu, triton = printed.strip().splitlines()
    assert names == "('reference',)"
    assert cpu.startswith("cpu") and "numba" in cpu
    assert triton.startswith("triton") and "triton" in triton.removeprefix("triton")


def test_without_the_compiler_of_numba():
    code = "from rl_triton_core.cli import doctor; print(doctor.check_backends())"
    printed = run_python(code, NUMBA_DISABLE_JIT="1")
    assert "its import failed: NUMBA_DISABLE_JIT" in printed and "unset NUMBA_DISABLE_JIT" in printed


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@FORKS
def test_variants_compiled_by_different_processes_work_together(tmp_path):
    """A disk cache that several processes filled: what one left must not be taken for what another means."""
    pytest.importorskip("numba")
    program = """
        import os
        from pathlib import Path
        import torch
        import rl_triton_core._internal.scan.cpu  # with Numba, once for all forks
        from rl_triton_core import compute_gae, compute_lambda_returns, compute_retrace, linear_recurrence
        from rl_triton_core.testing import assert_close

        torch.set_num_threads(1)  # PyTorch's own do not survive a fork
        rewards, values, other = torch.randn(3, 40, 1500)
        done, mask = torch.rand(2, 40, 1500) < torch.tensor([0.1, 0.8])[:, None, None]
        flags = {"terminated": done, "truncated": done, "mask": mask}
        ratios, ends = {"log_ratios": other, "expected_next_q": values}, {"bootstrap_values": other, "time_dim": 0}
        calls = [
            lambda backend: compute_gae(rewards, values, **flags, **ends, backend=backend)[0],
            lambda backend: compute_retrace(rewards, values, **flags, **ratios, backend=backend)[0],
            lambda backend: compute_lambda_returns(rewards, values, **flags, **ends, backend=backend),
            lambda backend: linear_recurrence(rewards, values, reverse=False, backend=backend),
            lambda backend: linear_recurrence(rewards, values, reverse=True, backend=backend),  # of the same types
        ]

        def in_a_fork(calls):
            child = os.fork()
            if child == 0:
                for call in calls:
                    assert_close(call("cpu"), call("reference"))
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        def kept():
            return {path: path.stat().st_mtime_ns for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nb*")}

        for call in calls:
            before = kept()
            in_a_fork([call])
            assert kept().keys() > before.keys(), "what is compiled is kept"
        before = kept()
        in_a_fork(calls)
        assert kept() == before, "and is not compiled again"
    """
    run_python(program, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_OPT="3")


@FORKS
def test_the_cpu_backend_s_threads_survive_a_fork():
    """As in a DataLoader's workers: a forked process has none of its parent's threads, and must start its own."""
    pytest.importorskip("numba")
    printed = run_python("""
        import os
        import signal
        import torch
        from rl_triton_core import compute_gae, set_num_threads
        from rl_triton_core._internal.scan import cpu

        set_num_threads(2)
        cpu.MIN_ELEMENTS_PER_CHUNK = 1 << 10
        rewards, values = torch.randn(2, 64, 64)
        compute = lambda: compute_gae(rewards, values, bootstrap_values=0.0, backend="cpu").advantages.numpy().tobytes()
        before = compute()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(compute() != before)
        print(os.waitpid(child, 0)[1], compute() == before)
    """)
    assert printed.split() == ["0", "True"]
