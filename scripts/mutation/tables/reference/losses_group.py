"""Mutants of losses/group.py."""

from mutation.mutant import Mutant

FILE = "losses/group.py"

MUTANTS = [
    Mutant(
        "mean-std: without epsilon",
        "std + epsilon",
        "std",
        tests="test_groups",
        function="group_normalize",
    ),
    Mutant(
        "mean-std: without correction",
        "torch.where(enough, count - correction, 1)",
        "count",
        tests="test_groups",
        function="group_normalize",
    ),
    Mutant(
        "mean-std: 0/0",
        "torch.where(divisor == 0, 0, (r - mean) / divisor)",
        "(r - mean) / divisor",
        tests="test_groups",
        function="group_normalize",
    ),
    Mutant(
        "leave-one-out: its own reward counts",
        "(r - mean) * (count / (count - 1).clamp(min=1))",
        "r - mean",
        tests="test_groups",
        function="group_normalize",
    ),
    Mutant(
        "a group of one has no others",
        "torch.where(count > 1, (r - mean) * (count / (count - 1).clamp(min=1)), r)",
        "(r - mean) * (count / (count - 1).clamp(min=1))",
        tests="test_groups",
        function="group_normalize",
    ),
    Mutant(
        "ids: groups are where they lie side by side",
        "ids.sort(stable=True)",
        "ids, torch.arange(len(ids))",
        tests="test_groups",
        function="moments_by_id",
    ),
    Mutant(
        "ids: order is not put back",
        "count[back], mean[back], m2[back]",
        "count, mean, m2",
        tests="test_groups",
        function="moments_by_id",
    ),
]
