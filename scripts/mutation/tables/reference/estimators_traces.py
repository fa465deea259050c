"""Mutants of estimators/traces.py."""

from mutation.mutant import Mutant

FILE = "estimators/traces.py"

MUTANTS = [
    Mutant(
        "traces: reset dropped",
        "x, select(step.continues, step.decay, 0)",
        "x, step.decay + 0 * x",
        tests="test_eligibility_traces",
    ),
    Mutant(
        "traces: the state's flag forgotten",
        "layout.expand_over_time(done)",
        "None",
        tests="streaming",
    ),
    Mutant(
        "traces: the last flag not handed over",
        "pick(traces, last, layout), pick(done, last, layout), some",
        "pick(traces, last, layout), pick(done, 0 * last, layout), some",
        tests="streaming",
    ),
    Mutant(
        "traces: a masked end severs nothing",
        "over | ~pick(valid, end, layout)",
        "over & ~pick(valid, end, layout)",
        tests="streaming",
    ),
    Mutant(
        "traces: skipped windows end nothing",
        "pick(traces, last, layout), pick(done, last, layout), some",
        "pick(traces, last, layout), pick(done, last, layout), torch.ones_like(some)",
        tests="streaming",
    ),
]
