"""Mutants of _internal/loss/cpu.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/cpu.py"

MUTANTS = [
    Mutant(
        "losses of one name",
        'f"{function.__name__}_{hash_text((SOURCES, variant, float64))}"',
        "function.__name__",
        tests="test_functions_of_different_losses",
        function="bind_constants",
    ),
    Mutant(
        "arithmetic in float64",
        "types[type(x)](x) if type(x) in types else x",
        "x",
        tests="test_exp",
        function="bind_constants",
    ),
    Mutant(
        "the normaliser is forgotten",
        "weight if problem.normalizer is None else problem.normalizer",
        "weight",
        tests="test_aggregations",
        function="find_divisor",
    ),
    Mutant(
        "the normaliser in a tensor is forgotten",
        "problem.streams.normalizer is not None",
        "False",
        tests="test_a_normalizer_as_a_tensor",
        function="find_divisor",
    ),
    Mutant(
        "extremes of the first span",
        "totals[:, kernels.LARGEST].max()",
        "totals[0, kernels.LARGEST]",
        tests="test_spans",
        function="summarize_totals",
    ),
    Mutant(
        "the last span is dropped",
        "range(0, size, SPAN)",
        "range(0, max(size - SPAN, 1), SPAN)",
        tests="test_spans",
        function="fill_results",
    ),
    Mutant(
        "shared log sigma: gradient of the first span",
        "sums_by_y.sum(0)",
        "sums_by_y[0]",
        tests="test_spans",
        function="fill_results",
    ),
    Mutant(
        "gradients of another dtype are not copied back",
        "gradient.copy_(stage)",
        "",
        tests="test_half_precision",
        function="fill_results",
    ),
    Mutant(
        "offsets are checked in the first calls only",
        "problem.streams.cu_seqlens is not None or ...",
        "...",
        tests="losses_fast_path and offsets",
        function="can_repeat",
    ),
    Mutant(
        "coefficients in tensors are repeated",
        "not any(isinstance(x, torch.Tensor) for x in problem.coefficients)",
        "True",
        tests="losses_fast_path and tensors_of_coefficients",
        function="can_repeat",
    ),
    Mutant(
        "tensors of a repeated loss keep their shape",
        "x if x.shape == form[0] else x.as_strided(*form)",
        "x",
        tests="losses_fast_path and repeated_calls",
        function="take_form",
    ),
]
