"""Mutants of _internal/launch/variants.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/variants.py"

MUTANTS = [
    Mutant(
        "variants: every shape is a first one",
        "self.num_first == 0 or self.num_first + num_kernels <= MAX_FIRST_KERNELS",
        "True",
        tests="variants and are_few",
    ),
    Mutant(
        "variants: room for ever more",
        "settings != universal and settings.num_kernels > room",
        "False",
        tests="variants and room",
    ),
    Mutant(
        "variants: one for all",
        "settings != universal and settings.num_kernels > room",
        "settings != universal",
        tests="variants and many_shapes",
    ),
    Mutant(
        "variants: own launches forgotten",
        "self.own[sizes] = launches",
        "pass",
        tests="variants and first_shapes",
    ),
    Mutant(
        "variants: a general kernel knows the address",
        "return 8",
        "return 0",
        tests="variants and unaligned",
    ),
]
