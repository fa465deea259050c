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


def measure_peak(call):
    """The bytes that a call, which is warm, takes at the most beyond what there is."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


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
