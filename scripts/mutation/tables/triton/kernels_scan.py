"""Mutants of _internal/scan/kernel/scan.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/scan.py"

MUTANTS = [
    Mutant(
        "carry dropped between tiles",
        "state = take_last_chunk(last)",
        "state = 0 * take_last_chunk(last)",
        tests="launches and gae",
    ),
    Mutant(
        "carry seeded",
        "load_numbers(initial, lanes_place, 0, lanes_place.lane < lanes, CONFIG.DTYPE)",
        "load_numbers(initial, lanes_place, 0, lanes_place.lane < lanes, CONFIG.DTYPE) + 1",
        tests="test_linear_recurrence",
    ),
    Mutant(
        "segments: their folds are not used",
        "state = enter_segment(folds, lanes_place, segment, state, CONFIG)",
        "_ = enter_segment(folds, lanes_place, segment, state, CONFIG)",
        tests="launches and gae",
    ),
    Mutant(
        "tile read ahead twice",
        "tl.minimum(number + 1, segment.end - 1)",
        "tl.minimum(number, segment.end - 1)",
        tests="launches and gae",
    ),
    Mutant(
        "masked cells not cleared",
        "tl.where(valid[i], results[i][k], 0)",
        "results[i][k]",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "neighbours not carried between tiles",
        "carried = take_last_neighbor(neighbor)",
        "carried = carried",
        tests="launches and gae",
    ),
    Mutant(
        "forward: the window before forgotten",
        "load_flags(previous_done, lanes_place, 0, lanes_place.lane < lanes)",
        "load_flags(None, lanes_place, 0, lanes_place.lane < lanes)",
        tests="streaming",
    ),
    Mutant(
        "state after: of this step",
        """
            after = tl.where(step.continues, state, 0)
            state = advance_state(alphas[i], betas[i], state)
        """,
        """
            state = advance_state(alphas[i], betas[i], state)
            after = tl.where(step.continues, state, 0)
        """,
        tests="test_vtrace or test_retrace",
    ),
]
