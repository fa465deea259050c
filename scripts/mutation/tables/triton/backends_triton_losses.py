"""Mutants of _internal/loss/triton.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/triton.py"

KEY = "call.kernel.__name__, call.choices, constants, call.num_warps, device, described"
MUTANTS = [
    *(
        Mutant(
            f"losses: one kernel for all {what}",
            KEY,
            f"{KEY.replace(left_out, '0')}",
            tests="losses_launches",
            function="launch_kernel",
        )
        for what, left_out in (
            ("names", "call.kernel.__name__"),
            ("equations", "call.choices"),
            ("constants", "constants"),
            ("warps", "call.num_warps"),
            ("devices", "device"),
            ("arguments", "described"),
        )
    ),
    Mutant(
        "losses: one kernel for all alignments",
        "x.data_ptr() % 16 == 0",
        "True",
        tests="losses_launches",
        function="describe_argument",
    ),
    Mutant(
        "losses: one kernel for all numbers",
        "x == 1, x % 16 == 0, ...",
        "int",
        tests="losses_launches",
        function="describe_argument",
    ),
    Mutant(
        "losses: a launch of as many programs as the first",
        "compiled[(call.programs, 1, 1)]",
        "compiled[(3, 1, 1)]",
        tests="losses_launches",
        function="launch_kernel",
    ),
    Mutant(
        "losses: compiled kernels without the fast path",
        "Switch.enabled and ...",
        "...",
        tests="losses_launches",
        function="launch_kernel",
    ),
    Mutant(
        "losses: a kernel of another Triton is kept",
        'hasattr(compiled, "__getitem__")',
        "compiled is not None",
        tests="losses_launches",
        function="launch_kernel",
    ),
    Mutant(
        "losses: numbers of host memory in a plan",
        "forbid_plan()",
        "pass",
        tests="losses_fast_path and host_memory",
        function="read_elsewhere",
    ),
    Mutant(
        "losses: launches without their constants are repeated",
        "(*call.arguments, *options)",
        "call.arguments",
        tests="losses_fast_path and launches_are_repeated",
        function="launch_kernel",
    ),
]
