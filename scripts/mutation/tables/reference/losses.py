"""Mutants of _internal/loss/solve.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/solve.py"

MUTANTS = [
    Mutant(
        "a graph that is kept: its gradients are overwritten",
        "keeps_graph()",
        "False",
        tests="test_a_retained_graph_gives_the_same_gradient_again",
        function="LossFunction.backward",
    ),
    Mutant(
        "the incoming gradient is forgotten",
        "ctx.scale(saved, grad)",
        "",
        tests="test_the_incoming_gradient_scales",
        function="LossFunction.backward",
    ),
    Mutant(
        "a second derivative is 0",
        "torch.is_grad_enabled()",
        "False",
        tests="test_a_second_derivative_is_refused",
        function="LossFunction.backward",
    ),
    Mutant(
        "another tensor is taken for a loss",
        "type(node) is LossFunction._backward_cls",
        "True",
        tests="test_gradients_without_a_backward_pass",
        function="get_gradients",
    ),
    Mutant(
        "no element: explained variance is 0",
        "statistics[...].fill_(math.nan)",
        "",
        tests="test_no_element_that_counts",
        function="run_backend",
    ),
]
