"""Mutants of losses/grpo.py."""

from mutation.mutant import Mutant

FILE = "losses/grpo.py"

MUTANTS = [
    Mutant(
        "sequence-mean: sequences without tokens",
        "torch.where(count == 0, 0, 1 / count)",
        "1 / count",
        tests="test_aggregations",
        function="aggregate_tokens",
    ),
]
