"""Mutants of _internal/scan/solve.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/solve.py"

MUTANTS = [
    Mutant(
        "backends: none sums expectations",
        "choose_backend(backend, problem.like.device).supports_expectation",
        "False",
        tests="test_an_expectation_is_summed",
    ),
    Mutant(
        "backends: all sum expectations",
        "choose_backend(backend, problem.like.device).supports_expectation",
        "True",
        tests="test_an_expectation_is_summed",
    ),
    Mutant(
        "features: one discount for all",
        "gamma.unsqueeze",
        "gamma[:1].unsqueeze",
        tests="test_a_decay_of_any_form",
    ),
    Mutant(
        "features: initial values transposed",
        "initial.flatten(1)",
        "initial.flip(1).flatten(1)",
        tests="test_every_kind_of_features or streaming",
    ),
]
