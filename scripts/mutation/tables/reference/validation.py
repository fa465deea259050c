"""Mutants of _internal/arguments/validation.py."""

from mutation.mutant import Mutant

FILE = "_internal/arguments/validation.py"

MUTANTS = [
    Mutant(
        "flags: any number",
        "(tensor != 0) & (tensor != 1)",
        "(tensor != 0) & (tensor != 1) & False",
        tests="arguments and zero_or_one",
    ),
    Mutant(
        "flags: masked ones too",
        "wrong & (mask != 0)",
        "wrong",
        tests="arguments and zero_or_one",
    ),
    Mutant(
        "discounts: below 0",
        "gamma < 0",
        "gamma < -1",
        tests="arguments and negative",
    ),
    Mutant(
        "switches: anything",
        "isinstance(value, bool)",
        "True",
        function="check_bool",
        tests="arguments and switches",
    ),
    Mutant(
        "decay: a guess",
        "per_feature and per_step",
        "False",
        tests="arguments and per_step_or_per_feature",
    ),
    Mutant(
        "tensors: negative views",
        "tensor.is_neg()",
        "False",
        tests="arguments and plain_memory",
    ),
    Mutant(
        "tensors: sparse ones",
        "tensor.layout != torch.strided",
        "False",
        tests="arguments and plain_memory",
    ),
]
