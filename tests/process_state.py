"""What all threads of a process share, and a look at it from another thread."""

import gc
import itertools
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.distributions import Distribution

NUMBERS = {
    "distributions check their arguments": lambda: Distribution._validate_args,
    "dtype": torch.get_default_dtype,
    "device": lambda: torch.empty(0).device,
    "precision of products": torch.get_float32_matmul_precision,
    "TF32 in products": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in convolutions": lambda: torch.backends.cudnn.allow_tf32,
    "convolutions are tried out": lambda: torch.backends.cudnn.benchmark,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "threads of PyTorch": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "waiting for the device": lambda: torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0,
    "warnings": lambda: (warnings.filters[:], warnings.showwarning, warnings.formatwarning),
    "NumPy's errors": np.geterr,
    "NumPy's digits": np.get_printoptions,
    "signals": lambda: {x: signal.getsignal(x) for x in signal.valid_signals()},
    "environment": lambda: dict(os.environ),
    "hooks": lambda: (sys.excepthook, sys.gettrace(), sys.getprofile(), threading.excepthook),
    "limits": lambda: (sys.getrecursionlimit(), sys.getswitchinterval()),
    "garbage": lambda: (gc.isenabled(), gc.get_threshold()),
    "logging": lambda: (logging.root.level, logging.root.handlers[:], logging.root.manager.disable),
    "place": lambda: (os.getcwd(), locale.setlocale(locale.LC_ALL)),
}


def read_state():
    return {name: read() for name, read in NUMBERS.items()}


def read_from_another_thread():
    return run_in_threads(read_state)[0]


def run_in_threads(*calls):
    """The results of calls that are made at the same time; an error of one is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def assert_same(found, before):
    for name, value in before.items():
        assert found[name] == value, name


def assert_unchanged(work):
    """Nothing of it changes while the work is done, nor after it."""
    before, found, is_over = read_state(), [], threading.Event()

    def watch():
        while not is_over.wait(0.001):
            found.append(read_state())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    for state in (*found, read_state()):
        assert_same(state, before)
    return len(found)


def interrupt(*_):
    raise KeyboardInterrupt


@contextmanager
def interrupted(count, *functions):
    """Inside, a call of one of the functions is Ctrl-C: the one of this count. A generator's is where it draws."""
    codes, calls = {x.__code__ for x in functions}, itertools.count(1)

    def profile(frame, event, _):
        begins = event == "call" and frame.f_code in codes and "indices" not in frame.f_locals
        if begins and next(calls) == count:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small lose time to several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
