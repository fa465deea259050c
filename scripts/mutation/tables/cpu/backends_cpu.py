"""Mutants of _internal/backends/cpu.py."""

from mutation.mutant import Mutant

FILE = "_internal/backends/cpu.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "together(partial(kernel, tuple(arguments)), spans)",
        "pass",
        tests="test_literal_numbers",
    ),
    Mutant(
        "time and lanes swapped",
        "problem.time_dim == 0",
        "problem.time_dim == 1",
        tests="test_every_length and discounted",
    ),
    Mutant(
        "strides ignored",
        '"C" if not apart and contiguous(arguments) else "A"',
        '"C"',
        tests="test_layouts and discounted",
    ),
    Mutant(
        "last span dropped",
        "[(0, groups, low, high) for low, high in pairwise(edges) if low < high]",
        "[(0, groups, low, high) for low, high in list(pairwise(edges))[:-1] if low < high]",
        tests="several_threads and prefix",
    ),
    Mutant(
        "parts but the first not done",
        "parts[1:]",
        "parts[2:]",
        tests="several_threads and prefix",
    ),
    Mutant(
        "one name for all in the disk cache",
        'f"{recurrence.name}_{fingerprint(recurrence, wanted)}"',
        '"loop"',
        tests="different_processes",
    ),
]
