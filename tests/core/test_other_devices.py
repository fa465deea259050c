"""Devices that have no backend, such as mps and xpu: the cpu backend computes on copies in host memory."""

import json
from pathlib import Path

import other_device
import pytest
from processes import run_python
from torch.utils import backend_registration

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch takes no devices from Python",
)
# The process skips Python's end: a thread of autograd that still releases a tensor there aborts it.
PROGRAM = """
    import json, os, sys
    sys.path.insert(0, sys.argv[1])
    import other_device

    library = other_device.provide_device()
    print(json.dumps(getattr(other_device, sys.argv[2])()), flush=True)
    os._exit(0)
"""


def run_with_device(function):
    """Run a function of `other_device` where there is the device, and return its result."""
    return json.loads(run_python(PROGRAM, str(Path(other_device.__file__).parent), function))


@pytest.fixture(scope="module")
def compared():
    return run_with_device("compare_calls")


@pytest.mark.parametrize("name", other_device.CALLS)
def test_copies_in_host_memory_give_the_bits_of_the_cpu_backend(compared, name):
    assert compared["calls"][name] == ""


def test_copies_are_warned_of_once(compared):
    assert compared["warned"] == ["there is no backend for other tensors; calls are computed on copies in host memory"]


def test_checks_and_results_on_other_devices():
    assert run_with_device("check_other_promises") is None
