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
        "doctor: any Triton is the one for PyTorch",
        "not SpecifierSet(wanted).contains(requirements.parse_version(installed), prereleases=True)",
        "False",
        tests="triton_of_pytorch",
        function="check_triton",
    ),
    Mutant(
        "doctor: Triton is to be installed where there is none",
        "platform.system() == 'Linux'",
        "True",
        tests="no_triton_is_advised",
        function="has_triton",
    ),
    Mutant(
        "doctor: the C compiler is not looked for",
        "[name] if name else ['cc', 'gcc', 'clang']",
        "['true']",
        tests="the_c_compiler",
        function="judge_c_compiler",
    ),
]
