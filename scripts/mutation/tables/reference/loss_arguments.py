"""Mutants of _internal/loss/arguments.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/arguments.py"

MUTANTS = [
    Mutant(
        "clip_high is 0 where it is not given",
        "clip if clip_high is None else ...",
        "0.0 if clip_high is None else ...",
        tests="test_known_answers",
        function="build_problem",
    ),
    Mutant(
        "a coefficient with a graph is taken",
        "check_detached(name, x)",
        "",
        tests="test_bad_arguments and losses",
        function="check_coefficient",
    ),
    Mutant(
        "a stream with a graph is taken",
        "check_detached(name, x)",
        "",
        tests="test_bad_arguments and losses",
        function="Elements.check_stream",
    ),
    Mutant(
        "two divergences are taken",
        "ref_log_probs is not None and old_inputs",
        "False",
        tests="test_bad_arguments and losses",
        function="check_kl",
    ),
    Mutant(
        "KL with nothing to compare",
        "isinstance(kl_coef, torch.Tensor) or kl_coef",
        "False",
        tests="test_bad_arguments and losses",
        function="check_kl",
    ),
    Mutant(
        "old values are not asked for",
        "value_clip is not None and old_values is None and (mode != 'rllib')",
        "False",
        tests="test_bad_arguments and losses",
        function="check_values",
    ),
    Mutant(
        "values without returns",
        "(values is None) != (returns is None)",
        "False",
        tests="test_bad_arguments and losses",
        function="check_values",
    ),
    Mutant(
        "a mask of the wrong shape",
        "self.check_shape(name, x, self.shape)",
        "",
        tests="test_bad_arguments and losses",
        function="Elements.check_stream",
    ),
]
