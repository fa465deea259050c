"""Mutants of compilation ahead of training."""

from mutation.mutant import Mutant

FILE = "warmup.py"

MUTANTS = [
    Mutant(
        "warm-up: sizes are not checked",
        "len(shape) != 2 or min(shape) < 1",
        "False",
        tests="wrong_usage",
        function="make_tensors",
    ),
    Mutant(
        "warm-up: devices without data are taken",
        "torch.zeros((), device=device).item()",
        "torch.zeros((), device=device)",
        tests="wrong_usage",
        function="check_device",
    ),
]
