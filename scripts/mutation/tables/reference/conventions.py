"""Mutants of conventions.py."""

from mutation.mutant import Mutant

FILE = "conventions.py"

MUTANTS = [
    Mutant(
        "conventions: arrivals taken for departures",
        "tensor.narrow(dim, 1, layout.num_steps - 1)",
        "tensor.narrow(dim, 0, layout.num_steps - 1)",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: the step itself is filler",
        "tensor.narrow(dim, 0, layout.num_steps - 1)",
        "tensor.narrow(dim, 1, layout.num_steps - 1)",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: no filler after a truncation",
        "ended | cut",
        "ended",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: the window before forgotten",
        "shift_right(ended | cut, first, layout)",
        "shift_right(ended | cut, 0 * first, layout)",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: the edge wins over a final value",
        "at_end & ~truncated",
        "at_end",
        tests="conventions and by_hand",
        function="merge_cut_values",
    ),
    Mutant(
        "conventions: the edge for a final value left out",
        "torch.where((at_end & truncated).any(dim), math.nan, last_value)",
        "last_value",
        tests="conventions and loud",
    ),
    Mutant(
        "conventions: PufferLib's rewards stay",
        'shift_left(rewards, check_per_env("next_reward", next_reward, layout), layout)',
        "rewards",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: RLlib's extra slots are steps",
        "shift_left(~mask, torch.ones_like(nothing, dtype=torch.bool), layout)",
        "shift_left(mask, torch.ones_like(nothing, dtype=torch.bool), layout)",
        tests="conventions and by_hand",
    ),
    Mutant(
        "conventions: RSL-RL's time-outs terminate",
        "done & ~cut",
        "done",
        tests="conventions and by_hand",
        function="approximate_rsl_rl",
    ),
    Mutant(
        "conventions: RSL-RL's time-outs end by themselves",
        'done & convert_flags("time_outs", time_outs, layout)',
        'convert_flags("time_outs", time_outs, layout)',
        tests="conventions and by_hand",
    ),
]
