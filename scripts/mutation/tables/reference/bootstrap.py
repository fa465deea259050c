"""Mutants of _internal/bootstrap.py."""

from mutation.mutant import Mutant

FILE = "_internal/bootstrap.py"

MUTANTS = [
    Mutant(
        "sparse: missing values are 0",
        "torch.full(layout.shape, math.nan, dtype=value.dtype, device=layout.device)",
        "torch.full(layout.shape, 0.0, dtype=value.dtype, device=layout.device)",
        tests="test_final_values and gae",
    ),
    Mutant(
        "sparse: edge misplaced",
        "torch.full(size, layout.num_steps - 1, device=layout.device)",
        "torch.full(size, 0, device=layout.device)",
        tests="test_forms_of_final_values",
    ),
]
