"""Mutants of estimators/traces.py."""

from mutation.mutant import Mutant

FILE = "estimators/traces.py"

MUTANTS = [
    Mutant(
        "traces: the state of an empty sequence is its neighbour's",
        "(index >= starts) & (ends > starts)",
        "index >= starts",
        tests="test_the_state_of_an_empty_sequence",
    ),
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
        "take_steps(traces, last, layout), take_steps(done, last, layout), has_value",
        "take_steps(traces, last, layout), take_steps(done, 0 * last, layout), has_value",
        tests="streaming",
    ),
    Mutant(
        "traces: a masked end severs nothing",
        "is_done | ~take_steps(valid, last, layout)",
        "is_done & ~take_steps(valid, last, layout)",
        tests="streaming",
    ),
    Mutant(
        "traces: skipped windows end nothing",
        "take_steps(traces, last, layout), take_steps(done, last, layout), has_value",
        "take_steps(traces, last, layout), take_steps(done, last, layout), torch.ones_like(has_value)",
        tests="streaming",
    ),
]
