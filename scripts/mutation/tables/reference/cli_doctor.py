"""Mutants of the checks of an installation."""

from mutation.mutant import Mutant

FILE = "cli/doctor.py"

MUTANTS = [
    Mutant(
        "doctor: a GPU that PyTorch cannot use is fine",
        "driver is None",
        "True",
        tests="gpu_that_pytorch_cannot_use",
        function="judge_gpu",
    ),
    Mutant(
        "doctor: the C compiler is not looked for",
        "[name] if name else ['cc', 'gcc', 'clang']",
        "['true']",
        tests="the_c_compiler",
        function="judge_c_compiler",
    ),
]
