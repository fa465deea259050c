"""Mutants of _internal/scan/autograd.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/autograd.py"

MUTANTS = [
    Mutant(
        "gradients: β of the step itself",
        "scan(grad.flip(1), shift_steps(beta, -1).flip(1))",
        "scan(grad.flip(1), beta.flip(1))",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: the state of the step itself",
        "gated_product(alpha_grad, shift_steps(state, 1))",
        "gated_product(alpha_grad, state)",
        function="compute_scan_gradient",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: the scan in the same direction",
        "scan(grad.flip(1), shift_steps(beta, -1).flip(1)).flip(1)",
        "scan(grad, shift_steps(beta, -1))",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: none beyond the step",
        """
            alpha_grad = scan(grad.flip(1), shift_steps(beta, -1).flip(1)).flip(1)
            return alpha_grad, gated_product(alpha_grad, shift_steps(state, 1))
        """,
        """
            alpha_grad = scan(grad.flip(1), shift_steps(beta, -1).flip(1)).flip(1)
            return grad, gated_product(alpha_grad, shift_steps(state, 1))
        """,
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "tangents: those of β forgotten",
        "alpha + gated_product(beta, shift_steps(state, 1))",
        "alpha",
        tests="transforms and linear and forward_mode",
    ),
    Mutant(
        "tangents: not asked for",
        "not torch.compiler.is_compiling() and is_transformed()",
        "False",
        tests="transforms and forward_mode",
    ),
    Mutant(
        "vmap: a dimension where another one was",
        "x.movedim(dim, 0)",
        "x",
        tests="transforms and test_vmap_over",
    ),
]
