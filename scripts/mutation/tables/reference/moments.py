"""Mutants of _internal/moments/rule.py."""

from mutation.mutant import Mutant

FILE = "_internal/moments/rule.py"

MUTANTS = [
    Mutant(
        "normalisation: correction dropped",
        "count - correction",
        "count",
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: a floor that is added",
        "at_least(floor, safe_sqrt(variance + inside))",
        "safe_sqrt(variance + inside) + floor",
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: one element is centred",
        "select(enough, mean, 0)",
        "mean",
        tests="normalization and test_no_more",
    ),
    Mutant(
        "normalisation: no spread divides by zero",
        "select(none, 0, 1 / select(none, 1, divisor))",
        "1 / divisor",
        tests="normalization and test_equal",
    ),
    Mutant(
        "normalisation: dimensions merged across gaps",
        "strides[-1] == tuple(shape[dim] * stride for stride in inner)",
        "strides[-1][0] == shape[dim] * inner[0]",
        tests="normalization and test_layouts",
    ),
]
