"""Mutants of _internal/scan/kernel/segments.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/segments.py"

MUTANTS = [
    Mutant(
        "segments: one too many",
        "earlier < segment.index",
        "earlier <= segment.index",
        tests="launches and gae",
        function="enter_segment",
    ),
    Mutant(
        "segments: none of the serial ones",
        "tl.range(0, segment.index, loop_unroll_factor=8)",
        "tl.range(1, segment.index, loop_unroll_factor=8)",
        tests="launches and gae",
    ),
    Mutant(
        "segments: the last tiles forgotten",
        "tl.cdiv(tiles, tl.num_programs(1))",
        "tiles // tl.num_programs(1)",
        tests="launches and gae",
    ),
]
