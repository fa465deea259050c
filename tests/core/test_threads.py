"""How a large call on the CPU is shared by threads."""

import threading
import time
from unittest.mock import Mock

import pytest
import torch

from rl_triton_core import compute_gae, get_num_threads, set_num_threads
from rl_triton_core._internal.launch import threads
from rl_triton_core._internal.launch.threads import run_chunks


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    """Nothing is set, and what a test sets ends with it."""
    monkeypatch.setattr(threads.Setting, "num_threads", None)
    monkeypatch.delenv("RL_TRITON_NUM_THREADS", raising=False)


def test_one_thread_unless_more_are_asked_for(monkeypatch):
    monkeypatch.setenv("RL_TRITON_NUM_THREADS", "")
    assert get_num_threads() == 1
    set_num_threads(3)
    assert get_num_threads() == 3
    monkeypatch.setattr(threads.Setting, "num_threads", None)
    monkeypatch.setenv("RL_TRITON_NUM_THREADS", "2")
    assert get_num_threads() == 2


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", None])
def test_a_number_of_threads_is_a_positive_int(number):
    with pytest.raises((TypeError, ValueError), match="num_threads: got"):
        set_num_threads(number)
    assert get_num_threads() == 1


@pytest.mark.parametrize("text", ["0", "many", "-1", "1.5"])
def test_so_is_one_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("RL_TRITON_NUM_THREADS", text)
    with pytest.raises((TypeError, ValueError), match="RL_TRITON_NUM_THREADS: got"):
        get_num_threads()


def test_every_chunk_is_done_once(monkeypatch):
    set_num_threads(4)
    for _ in range(2):
        done = []
        run_chunks(done.append, range(1000))
        assert sorted(done) == list(range(1000))
        monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError))  # none starts


def test_a_thread_that_is_held_up_holds_up_no_other():
    """The others do all the chunks that it has not begun."""
    set_num_threads(2)
    held_up, done = threading.Event(), {}

    def work(chunk):
        done[chunk] = threading.current_thread()
        if chunk == 0:
            assert held_up.wait(20)
        elif len(done) == 50:
            held_up.set()

    run_chunks(work, range(50))
    assert sum(thread is done[0] for thread in done.values()) == 1


def test_threads_that_have_not_begun_are_not_waited_for(monkeypatch):
    """As where every processor is busy: this thread then does the work alone."""
    set_num_threads(2)
    busy = threading.Event()
    blocker = [threads.start_threads(2).submit(busy.wait, 20) for _ in range(2)]
    start = time.perf_counter()
    done = []
    run_chunks(done.append, range(8))
    assert done == list(range(8)) and time.perf_counter() - start < 10
    busy.set()
    assert all(job.result() for job in blocker)


@pytest.mark.parametrize("is_main", [False, True])
def test_an_error_is_raised_when_the_other_thread_is_done(is_main):
    set_num_threads(2)
    main, done, both = threading.current_thread(), [], threading.Barrier(2, timeout=20)

    def work(chunk):
        both.wait()
        if (threading.current_thread() is main) == is_main:
            raise KeyboardInterrupt
        time.sleep(0.2)
        done.append(chunk)

    with pytest.raises(KeyboardInterrupt):
        run_chunks(work, range(2))
    assert len(done) == 1


def count_chunks(monkeypatch, num_threads, shape, time_dim):
    """Into how many chunks the cpu backend splits a rollout."""
    from rl_triton_core._internal.scan import cpu

    counted = []
    monkeypatch.setattr(cpu, "run_chunks", lambda work, chunks: counted.append(len(chunks)))
    set_num_threads(num_threads)
    zeros = torch.zeros(shape)
    compute_gae(zeros, zeros, bootstrap_values=0.0, time_dim=time_dim, backend="cpu")
    return sum(counted)


@pytest.mark.parametrize(("shape", "time_dim"), [((4096, 128), -1), ((128, 4096), 0)])
def test_a_large_rollout_is_split(monkeypatch, shape, time_dim):
    """In several chunks per thread where several were asked for; not at all otherwise, nor is a small one."""
    pytest.importorskip("numba")
    assert count_chunks(monkeypatch, 1, shape, time_dim) == 0
    assert count_chunks(monkeypatch, 2, shape, time_dim) == 8
    assert count_chunks(monkeypatch, 3, shape, time_dim) == 8, "of some size"
    assert count_chunks(monkeypatch, 8, (128, 64), 0) == 0
