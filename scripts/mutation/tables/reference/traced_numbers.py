"""Mutants of _internal/arguments/traced_numbers.py."""

from mutation.mutant import Mutant

FILE = "_internal/arguments/traced_numbers.py"

MUTANTS = [
    Mutant(
        "traced numbers: not checked anew",
        "check(arguments[position])",
        "float(arguments[position])",
        tests="fast_path and passed_on_anew",
    ),
    Mutant(
        "traced numbers: products of one factor",
        "product = product * numbers[position]",
        "pass",
        tests="fast_path and passed_on_anew",
    ),
    Mutant(
        "traced numbers: other uses pass unnoticed",
        "number.trace.escaped.update(number.factors)",
        "pass",
        tests="fast_path and (used_otherwise or other_use)",
    ),
]
