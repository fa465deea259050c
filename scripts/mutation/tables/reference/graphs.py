"""Mutants of _internal/graphs.py."""

from mutation.mutant import Mutant

FILE = "_internal/graphs.py"

MUTANTS = [
    Mutant(
        "graphs: other threads may not wait for the device",
        "current is thread or isinstance(current, threading._DummyThread)",
        "True",
        tests="capture_faults and other_threads",
    ),
    Mutant(
        "graphs: autograd's threads may wait for the device",
        "current is thread or isinstance(current, threading._DummyThread)",
        "current is thread",
        tests="capture_faults and other_threads",
    ),
    Mutant(
        "graphs: a step may wait for the device",
        'raise RuntimeError(f"the step waits for the device in {places[0]}")',
        "pass",
        tests="capture_faults and other_threads",
    ),
    Mutant(
        "graphs: warnings are lost after a look",
        "is_over or not is_of_waiting",
        "not is_of_waiting",
        tests="capture_faults and warnings_after",
    ),
]
