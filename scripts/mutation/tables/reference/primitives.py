"""Mutants of _internal/equations/primitives.py."""

from mutation.mutant import Mutant

FILE = "_internal/equations/primitives.py"

MUTANTS = [
    Mutant(
        "gradient: of an infinite ratio",
        "torch.where(over, torch.inf, torch.exp(torch.where(over, 0, x)))",
        "torch.exp(x)",
        tests="overflows_and_is_clipped",
    ),
    Mutant(
        "gradient: none by a factor of 0",
        "factor * torch.where((factor == 0) & ~state.isfinite(), 0, state)",
        "torch.where(factor == 0, 0, factor * state)",
        tests="test_gradients and linear",
    ),
    Mutant(
        "gradient: a product beside NaN",
        "gated_product(grad, y), gated_product(grad, x)",
        "grad * y, grad * x",
        tests="test_a_nan_gives_no_gradient",
    ),
]
