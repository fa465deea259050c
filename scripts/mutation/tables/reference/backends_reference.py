"""Mutants of _internal/scan/reference.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/reference.py"

MUTANTS = [
    Mutant(
        "traces: a decay of 0 ends the episode",
        "row.read_flags(problem.terminated)",
        """
            row.read_flags(problem.terminated) | (
                torch.is_tensor(problem.gamma) and row.read_stream(problem.gamma, torch.double) == 0
            )
        """,
        tests="matrix and random and traces",
    ),
    Mutant(
        "packed: sequences run on",
        "torch.where(row.begins, 0, beta)",
        "beta",
        tests="packed and prefix",
    ),
    Mutant(
        "packed: neighbours of the sequence before",
        "self.first",
        "0",
        tests="packed and gae",
        function="Row.find_neighbours",
    ),
    Mutant(
        "packed: edge values in disorder",
        "torch.searchsorted(ends, self.position[0, :, 0].to(ends.dtype), right=True)",
        "torch.searchsorted(ends, self.position[0, :, 0].to(ends.dtype), right=False)",
        tests="packed and test_an_edge",
    ),
    Mutant(
        "gradient: a factor that is NaN",
        "beta.isnan()",
        "beta.isnan() & False",
        tests="test_a_nan_gives_no_gradient",
    ),
    Mutant(
        "windows: one step more",
        "num_steps - 1",
        "num_steps",
        function="evaluate_windows",
        tests="nstep and known_answers",
    ),
    Mutant(
        "windows: parts of other lengths",
        "remaining % 2",
        "True",
        function="evaluate_windows",
        tests="nstep and known_answers",
    ),
    Mutant(
        "windows: products overflow",
        "multiply_gated(product, product.gather(1, after)).clamp(max=largest)",
        "multiply_gated(product, product.gather(1, after))",
        function="evaluate_windows",
        tests="nstep and overflow",
    ),
]
