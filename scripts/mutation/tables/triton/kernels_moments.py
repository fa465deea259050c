"""Mutants of _internal/moments/kernel.py."""

from mutation.mutant import Mutant

FILE = "_internal/moments/kernel.py"

MUTANTS = [
    Mutant(
        "normalisation: a large mean cancels",
        "count == 0",
        "count < 0",
        tests="normalization and test_a_large_mean",
    ),
    Mutant(
        "normalisation: masked cells count",
        """
            x = load_elements(values, values_row, values_column, row, column, inside)
            ...
            count += tl.sum(valid.to(tl.int32))
        """,
        """
            x = load_elements(values, values_row, values_column, row, column, inside)
            ...
            count += tl.sum(inside.to(tl.int32))
        """,
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: masked cells in the sums",
        """
            x = load_elements(values, values_row, values_column, row, column, inside)
            ...
            apart = tl.where(valid, x - pivot, 0)
        """,
        """
            x = load_elements(values, values_row, values_column, row, column, inside)
            ...
            apart = tl.where(inside, x - pivot, 0)
        """,
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: masked cells not cleared",
        "tl.where(valid, (x - subtracted) * factor, 0)",
        "(x - subtracted) * factor",
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: parts as if of one mean",
        "m2 += tl.where(count > 0, count * (apart - shift) * (apart - shift), 0)",
        "",
        tests="normalization and test_parts",
    ),
    Mutant(
        "normalisation: tiles of the first columns only",
        "(tile % across).to(tl.int64) * BLOCK_COLUMNS",
        "(tile * 0).to(tl.int64)",
        tests="normalization and test_large",
    ),
]
