"""Mutants of _internal/scan/kernel/tiles.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/tiles.py"

MUTANTS = [
    Mutant(
        "chunk in the order of memory",
        "len(steps) - 1 - i if CONFIG.BACKWARD else i",
        "i",
        tests="test_literal_numbers",
    ),
    Mutant(
        "elements mixed up",
        "parts = even + odd",
        "parts = odd + even",
        tests="launches and gae",
        function="split_steps",
    ),
    Mutant(
        "neighbour's value of the chunk itself",
        "place.start + (1 << CONFIG.LOG_UNROLL)",
        "place.start + (1 << CONFIG.LOG_UNROLL) - 1",
        tests="launches and gae",
    ),
    Mutant(
        "lanes and steps swapped",
        "group, step, lane = get_strides(stream, place)",
        "group, lane, step = get_strides(stream, place)",
        tests="test_literal_numbers or test_layouts",
    ),
    Mutant(
        "all strides are the common ones",
        """
            if len(stream) == 1:
                return place.strides
            else:
                return (stream[1], stream[2], stream[3])
        """,
        """
            if len(stream) == 1:
                return place.strides
            else:
                return place.strides
        """,
        tests="test_layouts",
    ),
    Mutant(
        "first step dropped",
        "(t < place.end) & (place.lane < place.lanes)",
        "(t < place.end) & (place.lane < place.lanes) & (t > 0)",
        tests="gae and (test_every or test_literal)",
        function="is_inside",
    ),
    Mutant(
        "packed: sequences start at 0",
        "tl.load(offsets + lane, mask=exists, other=0).to(INDEX)",
        "0 * tl.load(offsets + lane, mask=exists, other=0).to(INDEX)",
        tests="test_every_sequence and prefix",
    ),
    Mutant(
        "packed: all end at the row's end",
        """
            end = tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX)
            rises = (0 <= first) & (first <= end) & (end <= steps)
        """,
        """
            end = 0 * tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX) + steps
            rises = (0 <= first) & (first <= end) & (end <= steps)
        """,
        tests="test_every_sequence and gae",
    ),
]
