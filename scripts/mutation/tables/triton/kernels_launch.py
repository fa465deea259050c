"""Mutants of _internal/launch/table.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/table.py"

MUTANTS = [
    Mutant(
        "segments: some are empty",
        "-(-tiles // -(-tiles // min(tiles, number)))",
        "min(tiles, number)",
        tests="launches and none_is_empty",
    ),
    Mutant(
        "segments: of a GPU that is busy",
        "wanted < 8 or tiles < 8",
        "tiles < 8",
        tests="launches and none_is_empty",
    ),
    Mutant(
        "segments: for an H200 on every GPU",
        "torch.cuda.get_device_properties(index).multi_processor_count",
        "MULTIPROCESSORS",
        tests="launches and multiprocessors",
    ),
]
