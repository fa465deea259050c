"""Mutants of _internal/scan/serial.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/serial.py"

MUTANTS = [
    Mutant(
        "backward: the state that enters is forgotten",
        "read((group, 0, lane), arguments.zero, arguments.initial)",
        "arguments.zero",
        tests="test_linear_recurrence",
        function="enter_backward",
    ),
    Mutant(
        "backward: the state that enters is that of the first lane",
        "read((group, 0, lane), arguments.zero, arguments.initial)",
        "read((group, 0, 0), arguments.zero, arguments.initial)",
        tests="test_an_initial_state_of_a_recurrence",
        function="enter_backward",
    ),
    Mutant(
        "gate multiplies",
        "select(beta == zero, zero, beta * state)",
        "beta * state",
        tests="containment and gae",
    ),
    Mutant(
        "backward: masked step not skipped",
        "return after if arguments.skip else Carry(...)",
        "pass",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: masked cells not written",
        "apply_to_each(write, (place, zero), (arguments.outputs,))",
        "",
        tests="gae and test_every_pattern",
        function="step_backward",
    ),
    Mutant(
        "forward: masked cells not written",
        "apply_to_each(write, (place, zero), (arguments.outputs,))",
        "",
        tests="test_every_pattern_of_four and prefix",
        function="step_forward",
    ),
    Mutant(
        "backward: a skipped step ends the episode",
        "after if arguments.skip else Carry(...)",
        "after if False else Carry(...)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: reset skips",
        "after if arguments.skip else Carry(...)",
        "after if True else Carry(...)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: a masked step does not end the episode",
        "Carry(after.state, False, True, after.next_inputs)",
        "Carry(after.state, False, False, after.next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: a masked step is the end of the rollout",
        "Carry(after.state, False, True, after.next_inputs)",
        "Carry(after.state, True, True, after.next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: a masked step ends all episodes before",
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, False, False, inputs[:NUM_LOOKAHEAD])
        """,
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, False, after.next_is_masked, inputs[:NUM_LOOKAHEAD])
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: all steps are last ones",
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, False, False, inputs[:NUM_LOOKAHEAD])
        """,
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, after.is_last, False, inputs[:NUM_LOOKAHEAD])
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: terminated a step late",
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(read_flag(place, False, arguments.terminated) | ended, ...)
        """,
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(
                read_flag((group, min(t + 1, arguments.steps - 1), lane), False, arguments.terminated) | ended, ...
            )
        """,
        tests="test_literal_numbers",
    ),
    Mutant(
        "backward: truncated a step early",
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(
                ..., read_flag(place, False, arguments.truncated), after.is_last, ...
            )
        """,
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(
                ..., read_flag((group, max(t - 1, 0), lane), False, arguments.truncated), after.is_last, ...
            )
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: bootstrap of the lane before",
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(
                ..., read(place, read(place, zero, arguments.bootstrap), arguments.next_values)
            )
        """,
        """
            place, zero = (group, t, lane), arguments.zero
            ...
            next_value, continues = apply_boundary_rule(
                ..., read(place, read((group, t, max(lane - 1, 0)), zero, arguments.bootstrap), arguments.next_values)
            )
        """,
        tests="gae and test_every_length",
    ),
    Mutant(
        "backward: the next inputs stay the same",
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, False, False, inputs[:NUM_LOOKAHEAD])
        """,
        """
            state = follow_recurrence(arguments, place, here, after.state)
            return Carry(state, False, False, after.next_inputs)
        """,
        tests="test_literal_numbers",
    ),
    Mutant(
        "backward: the last step is not last",
        "types.boolean(True)",
        "types.boolean(False)",
        tests="test_literal_numbers",
    ),
    Mutant(
        "the state of another episode leaks",
        "select(here.continues, state, zero)",
        "state",
        tests="test_vtrace and terminated",
    ),
    Mutant(
        "inputs of another episode leak",
        "apply_to_each(select, (continues,), (after.next_inputs, arguments.zeros))",
        "after.next_inputs",
        tests="test_equations_see_no_inputs",
    ),
    Mutant(
        "discount 0 does not end",
        "GAMMA_VARIES & (gamma == arguments.zero)",
        "False",
        tests="test_a_zero_discount_contains and gae",
    ),
    Mutant(
        "λ is not multiplied with a discount per step",
        "gamma * arguments.decay if GAMMA_VARIES else arguments.decay",
        "arguments.decay",
        tests="gae and gamma",
    ),
    Mutant(
        "serially: the lane before leaves its state",
        """
            next_carry = enter(arguments, group, next_lane)
            ...
            if remaining == 0:
                ...
                carry = next_carry
        """,
        """
            next_carry = carry
            ...
            if remaining == 0:
                ...
                carry = next_carry
        """,
        tests="gae and test_permuting",
    ),
    Mutant(
        "serially: last lane dropped",
        "range(end_lane - first_lane)",
        "range(end_lane - first_lane - 1)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "serially: last step dropped",
        """
            for i in range(remaining):
                carry = ...
        """,
        """
            for i in range(remaining - 1):
                carry = ...
        """,
        tests="test_literal_numbers",
    ),
    Mutant(
        "serially: the next lane's state dropped",
        """
            lane, t, remaining = next_lane, ...
            carry = next_carry
        """,
        """
            lane, t, remaining = next_lane, ...
        """,
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "serially: the next lane begins anew",
        "next_lane, next_t + DIRECTION * both, next_remaining - both",
        "next_lane, next_t, next_remaining - both",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "serially: what remains is dropped",
        """
            if remaining == 0:
                lane, t, remaining = ...
                ...
        """,
        """
            if True:
                lane, t, remaining = ...
                ...
        """,
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "side by side: no state enters",
        "write_row(j, enter(arguments, group, start + j).state, state)",
        "",
        tests="test_every_kind_of_features and linear and 33",
    ),
    Mutant(
        "side by side: the last step is that of the block before",
        "write_row(j, True, is_last)",
        "",
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: all steps are last ones",
        "write_row(j, after.is_last, is_last)",
        "",
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: a masked step does not end the episode",
        "write_row(j, after.next_is_masked, next_is_masked)",
        "",
        tests="lambda and test_wide_layouts_agree and reset",
    ),
    Mutant(
        "side by side: the next step is the step itself",
        "t + (position > 0)",
        "t",
        tests="lambda and test_layouts_agree",
    ),
    Mutant(
        "side by side: the last step is not last",
        "Carry(read_row(j, state), position == 0, ...)",
        "Carry(read_row(j, state), types.boolean(False), ...)",
        tests="discounted and test_layouts_agree",
    ),
    Mutant(
        "side by side: next inputs of the lane before",
        "apply_to_each(read_row, (j,), (next_inputs,))",
        "apply_to_each(read_row, (max(j - 1, 0),), (next_inputs,))",
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: last lane of a block dropped",
        "min(LANES_PER_BLOCK, end_lane - start)",
        "min(LANES_PER_BLOCK, end_lane - start) - 1",
        tests="discounted and test_layouts_agree",
        function="walk_backward_side_by_side",
    ),
    Mutant(
        "side by side: first step dropped",
        """
            for position in range(steps):
                t = ...
                for j in range(width):
                    ...
        """,
        """
            for position in range(steps - 1):
                t = ...
                for j in range(width):
                    ...
        """,
        tests="discounted and test_layouts_agree",
        function="walk_backward_side_by_side",
    ),
    Mutant(
        "side by side: forward state of the block before",
        """
            before = enter(arguments, group, start + j)
            write_row(j, before.state, state)
        """,
        """
            before = enter(arguments, group, start + j)
        """,
        tests="prefix and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: forward's last step dropped",
        "range(arguments.steps)",
        "range(arguments.steps - 1)",
        tests="prefix and test_layouts_agree",
    ),
    Mutant(
        "packed: the first steps dropped",
        "first if DIRECTION > 0 else end - 1, end - first",
        "first if DIRECTION > 0 else end - 1, max(end - first - 1, 0)",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "packed: ends of the sequence before",
        "read((0, 0, next_lane + 1), steps, offsets)",
        "read((0, 0, next_lane), steps, offsets)",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "packed: forward from 0",
        "first if DIRECTION > 0 else end - 1",
        "0 if DIRECTION > 0 else end - 1",
        tests="test_every_sequence and prefix",
    ),
    Mutant(
        "forward: resets a step early",
        "done & arguments.starts_at",
        "done",
        tests="test_eligibility_traces and truncated",
    ),
    Mutant(
        "forward: starts ignored",
        "before.previous_done | (done & arguments.starts_at)",
        "before.previous_done",
        tests="test_prefix_sums and boundary",
    ),
    Mutant(
        "forward: ends ignored",
        "done & (not arguments.starts_at)",
        "done & False",
        tests="test_eligibility_traces and terminated",
    ),
    Mutant(
        "forward: masks never sever",
        "before.previous_done | (not arguments.skip)",
        "before.previous_done",
        tests="test_every_pattern_of_four and prefix",
    ),
    Mutant(
        "forward: skipped steps sever",
        "before.previous_done | (not arguments.skip)",
        "before.previous_done | True",
        tests="test_every_pattern_of_four and prefix",
    ),
    Mutant(
        "forward: the rollout before forgotten",
        "read_flag(place, False, arguments.previous_done)",
        "read_flag(place, False, None)",
        tests="test_two_windows and prefix",
    ),
]
