"""Mutants of _internal/solve.py."""

from mutation.mutant import Mutant

FILE = "_internal/solve.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "chosen.run(problem)",
        "pass",
        tests="test_literal_numbers",
    ),
    Mutant(
        "backends: none sums expectations",
        "choose(backend, problem.like.device).supports_expectation",
        "False",
        tests="test_an_expectation_is_summed",
    ),
    Mutant(
        "backends: all sum expectations",
        "choose(backend, problem.like.device).supports_expectation",
        "True",
        tests="test_an_expectation_is_summed",
    ),
    Mutant(
        "features: one discount for all",
        "gamma.unsqueeze",
        "gamma[:1].unsqueeze",
        tests="test_a_decay_of_any_form",
    ),
    Mutant(
        "features: initial values transposed",
        "initial.flatten(1)",
        "initial.flip(1).flatten(1)",
        tests="test_every_kind_of_features or streaming",
    ),
    Mutant(
        "gradients: β of the step itself",
        "torch.cat([beta[:, 1:], torch.zeros_like(beta[:, :1])], dim=1)",
        "beta",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: the state of the step itself",
        "torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], dim=1)",
        "state",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: the scan in the same direction",
        "linear_scan(grad.flip(1), after.flip(1), ctx.backend).flip(1)",
        "linear_scan(grad, after, ctx.backend)",
        tests="autograd and test_gradients and plain and linear",
    ),
    Mutant(
        "gradients: none beyond the step",
        """
            alpha_grad = linear_scan(grad.flip(1), after.flip(1), ctx.backend).flip(1)
            ...
            return alpha_grad, alpha_grad * before, None
        """,
        """
            alpha_grad = linear_scan(grad.flip(1), after.flip(1), ctx.backend).flip(1)
            ...
            return grad, alpha_grad * before, None
        """,
        tests="autograd and test_gradients and plain and linear",
    ),
]
