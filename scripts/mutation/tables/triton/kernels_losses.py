"""Mutants of _internal/loss/kernel.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/kernel.py"

MUTANTS = [
    Mutant(
        "losses: columns beside the last count",
        "x if (chunk + 1) * CHUNK <= width else ...",
        "x",
        tests="losses and test_heads",
        function="keep_columns",
    ),
    Mutant(
        "losses: sums of the last chunk alone",
        "sums[0] + a, sums[1] + b, sums[2] + c",
        "(a, b, c)",
        tests="losses and test_heads",
        function="sum_terms",
    ),
    Mutant(
        "losses: the KL of the last chunk alone",
        "sums[0] + d, sums[1] + e",
        "(d, e)",
        tests="losses and test_tiles",
        function="sum_kl",
    ),
    Mutant(
        "losses: the peak of the first chunk",
        "tl.maximum(peak, chunks[chunk][0])",
        "peak",
        tests="losses",
        function="find_peak",
    ),
    Mutant(
        "losses: actions among the first chunk's",
        "locate_columns(chunk, CONFIG.CHUNK)",
        "locate_columns(0, CONFIG.CHUNK)",
        tests="losses and test_heads",
        function="read_actions",
    ),
    Mutant(
        "losses: an action that there is not",
        "(chosen >= 0) & (chosen < CONFIG.WIDTHS[part])",
        "chosen >= 0",
        tests="losses",
        function="read_actions",
    ),
]
