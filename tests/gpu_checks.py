"""What tests on a GPU have in common: code that must not wait for the device, and graphs of calls."""

from contextlib import contextmanager

import pytest
import torch

GPU = pytest.param("cuda", marks=pytest.mark.gpu)  # a device of a test, beside others


@contextmanager
def forbid_waiting():
    """Inside, whatever waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure_peak(call, kind="allocated"):
    """The bytes that a call takes at the most beyond what there is: allocated, or reserved, which graphs are, too."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = getattr(torch.cuda, f"memory_{kind}")()
    call()
    return getattr(torch.cuda, f"max_memory_{kind}")() - before


def capture_graph(call, warmups=1):
    """A graph of a call and the call's results, after it has run some times on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def assert_replays(call, *changes, warmups=1):
    """A graph of a call gives, after each change of what it reads, what the call gives then; return its last results.

    A call may write to the same memory each time.
    """
    from cases import same_bits  # benchmarks, which measure peaks, need nothing of it

    graph, results = capture_graph(call, warmups)
    found = results
    for change in changes:
        change()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        found = [x.clone() for x in results]
        assert all(same_bits(x, y) for x, y in zip(found, call(), strict=True))
    return found
