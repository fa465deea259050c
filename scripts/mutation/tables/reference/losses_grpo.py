"""Mutants of losses/grpo.py."""

from mutation.mutant import Mutant

FILE = "losses/grpo.py"

MUTANTS = [
    Mutant(
        "sequence-mean is the sum over tokens",
        "factor = float(shape[1])",
        "",
        tests="test_aggregations",
        function="aggregate_tokens",
    ),
    Mutant(
        "sequence-sum is divided by the tokens",
        "aggregation != 'token-mean' and divisor is None",
        "aggregation == 'sequence-mean' and divisor is None",
        tests="test_aggregations",
        function="aggregate_tokens",
    ),
    Mutant(
        "a tensor as normaliser: rows' length forgotten",
        "streams._replace(normalizer=divisor * factor)",
        "streams._replace(normalizer=divisor)",
        tests="test_a_normalizer_as_a_tensor",
        function="aggregate_tokens",
    ),
    Mutant(
        "masked tokens count in their sequence's mean",
        "weights.view(shape).sum(1)",
        "torch.ones_like(weights).view(shape).sum(1)",
        tests="test_aggregations",
        function="count_tokens",
    ),
    Mutant(
        "packed: masked tokens count in their sequence's mean",
        "(mask if mask.is_floating_point() else mask != 0).double()",
        "(mask == mask).double()",
        tests="test_aggregations",
        function="count_tokens",
    ),
    Mutant(
        "advantages per token taken as per sequence",
        "per_token = advantages.shape == elements.shape",
        "per_token = False",
        tests="test_aggregations",
        function="add_sequences",
    ),
]
