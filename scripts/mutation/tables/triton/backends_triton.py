"""Mutants of _internal/scan/triton.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/triton.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "kernel[(*grid, 1)](*(untrace(given) if is_recording() else given))",
        "pass",
        tests="test_literal_numbers",
    ),
    Mutant(
        "launches: flags of every dtype are alike",
        "sum(x.itemsize for x in per_step_flags(problem))",
        "len([*per_step_flags(problem)])",
        tests="judge_counts",
    ),
    Mutant(
        "launches: results are not counted",
        "[*per_step_numbers(problem), *wanted_outputs(problem)]",
        "[*per_step_numbers(problem)]",
        tests="judge_counts",
    ),
    Mutant(
        "alignment of the lanes assumed",
        "4 if math.gcd(4, *strides) == 4 else 1",
        "4",
        tests="matrix and gae",
    ),
    Mutant(
        "variants: strides of 1 are like others",
        "strides[1 if is_env_major else 2] == 1",
        "True",
        tests="variants and strided",
    ),
    Mutant(
        "variants: outputs do not count",
        "presence_bits(problem.outputs)",
        "0",
        tests="variants and not_wanted",
        function="describe_arguments",
    ),
    Mutant(
        "variants: every row has one tile",
        "length <= SHORT <= row.steps and problem.cu_seqlens is None",
        "problem.cu_seqlens is None",
        tests="variants and general",
    ),
    Mutant(
        "variants: packed rows have one tile",
        "length <= SHORT <= row.steps and problem.cu_seqlens is None",
        "length <= SHORT <= row.steps",
        tests="variants and general",
    ),
    Mutant(
        "variants: compiled while a graph is captured",
        "variants.count_call(sizes) >= CALLS_BEFORE_OWN_KERNEL and not is_capturing(problem.like)",
        "variants.count_call(sizes) >= CALLS_BEFORE_OWN_KERNEL",
        tests="variants and captured",
    ),
    Mutant(
        "variants: launches that are not final are recorded",
        "postpone_recording()",
        "pass",
        tests="variants and called_often",
    ),
]
