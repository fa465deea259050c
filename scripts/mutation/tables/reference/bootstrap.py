"""Mutants of _internal/scan/bootstrap.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/bootstrap.py"

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
    Mutant(
        "packed: a guess",
        "bootstrap.shape == (steps,) and sequences == steps > 1 and truncated is None",
        "False",
        tests="arguments and as_many_sequences",
    ),
    Mutant(
        "sparse: the last of two values",
        "(written != value) & ~(written.isnan() & value.isnan())",
        "(written != value) & False",
        tests="arguments and one_value_for_each",
    ),
    Mutant(
        "sparse: lists by the default dtype",
        "torch.promote_types(layout.dtype, torch.float32)",
        "torch.get_default_dtype()",
        tests="arguments and defaults",
    ),
]
