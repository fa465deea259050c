"""Mutants of _internal/kernels/serial.py."""

from mutation.mutant import Mutant

FILE = "_internal/kernels/serial.py"

MUTANTS = [
    Mutant(
        "carry seeded",
        "at(arguments[10], arguments[15], group, 0, lane)",
        "at(arguments[10], arguments[7], group, 0, lane)",
        tests="test_linear_recurrence",
        function="enter_backward",
    ),
    Mutant(
        "carry of the first lane",
        "at(arguments[10], arguments[15], group, 0, lane)",
        "at(arguments[10], arguments[15], group, 0, 0)",
        tests="test_an_initial_state_of_a_recurrence",
        function="enter_backward",
    ),
    Mutant(
        "backward: gate multiplies",
        "select(beta == zero, zero, beta * state)",
        "beta * state",
        tests="containment and gae",
        function="step_backward",
    ),
    Mutant(
        "backward: masked step not skipped",
        "return after if skip else (state, False, True, next_inputs)",
        "pass",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: masked cells not written",
        "clear(outputs, group, t, lane, zero)",
        "",
        tests="gae and test_every_pattern",
        function="step_backward",
    ),
    Mutant(
        "backward: skip severs",
        "after if skip else (state, False, True, next_inputs)",
        "after if False else (state, False, True, next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: reset skips",
        "after if skip else (state, False, True, next_inputs)",
        "after if True else (state, False, True, next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: a masked end is no seal",
        "(state, False, True, next_inputs)",
        "(state, False, False, next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: a masked end is an end",
        "(state, False, True, next_inputs)",
        "(state, True, True, next_inputs)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: seals stay",
        """
            state, last, sealed, next_inputs = after
            ...
            return result, False, False, as_many(now, next_inputs)
        """,
        """
            state, last, sealed, next_inputs = after
            ...
            return result, False, sealed, as_many(now, next_inputs)
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: ends stay",
        """
            state, last, sealed, next_inputs = after
            ...
            return result, False, False, as_many(now, next_inputs)
        """,
        """
            state, last, sealed, next_inputs = after
            ...
            return result, last, False, as_many(now, next_inputs)
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: terminated a step late",
        """
            params, skip, _, _, _, outputs, _, zero, _, _ = arguments[8:]
            ...
            next_value, continues = apply_boundary_rule(flag(terminated, False, group, t, lane) | ended, ...)
        """,
        """
            params, skip, _, _, _, outputs, _, zero, _, _ = arguments[8:]
            ...
            next_value, continues = apply_boundary_rule(
                flag(terminated, False, group, min(t + 1, arguments[16] - 1), lane) | ended, ...
            )
        """,
        tests="test_literal_numbers",
    ),
    Mutant(
        "backward: truncated a step early",
        "apply_boundary_rule(..., flag(truncated, False, group, t, lane), last, sealed, ...)",
        "apply_boundary_rule(..., flag(truncated, False, group, max(t - 1, 0), lane), last, sealed, ...)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "backward: bootstrap of the neighbour lane",
        "at(bootstrap, zero, group, t, lane)",
        "at(bootstrap, zero, group, t, max(lane - 1, 0))",
        tests="gae and test_every_length",
    ),
    Mutant(
        "backward: the neighbour stays the same",
        "as_many(now, next_inputs)",
        "next_inputs",
        tests="test_literal_numbers",
    ),
    Mutant(
        "backward: the window's end is no end",
        "types.boolean(True)",
        "types.boolean(False)",
        tests="test_literal_numbers",
    ),
    Mutant(
        "backward: neighbour's value leaks",
        "select(continues, state, zero)",
        "state",
        tests="test_vtrace and terminated",
        function="step_backward",
    ),
    Mutant(
        "discount 0 does not end",
        '"return now, now * decay, now == 0"',
        '"return now, now * decay, False"',
        tests="test_a_zero_discount_contains and gae",
    ),
    Mutant(
        "apart: carry kept from the lane before",
        """
            next_carry = enter(arguments, group, next_lane)
            ...
            if left == 0:
                lane, t, left, carry = ..., next_carry
        """,
        """
            next_carry = carry
            ...
            if left == 0:
                lane, t, left, carry = ..., next_carry
        """,
        tests="gae and test_permuting",
    ),
    Mutant(
        "apart: last lane dropped",
        "range(end_lane - first_lane)",
        "range(end_lane - first_lane - 1)",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "apart: last step dropped",
        """
            for i in range(left):
                carry = ...
        """,
        """
            for i in range(left - 1):
                carry = ...
        """,
        tests="test_literal_numbers",
    ),
    Mutant(
        "apart: the next lane's carry dropped",
        "lane, t, left, carry = next_lane, next_t + DIRECTION * both, next_left - both, next_carry",
        "lane, t, left, carry = next_lane, next_t + DIRECTION * both, next_left - both, carry",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "apart: the next lane begun anew",
        "next_lane, next_t + DIRECTION * both, next_left - both, next_carry",
        "next_lane, next_t, next_left - both, next_carry",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "apart: what is left is dropped",
        "left == 0",
        "True",
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "side by side: carry kept from the rows before",
        "state[j] = enter(arguments, group, left + j)[0]",
        "pass",
        tests="test_every_kind_of_features and linear and 33",
    ),
    Mutant(
        "side by side: memory of the rows before",
        '["memory[0][:] = True", "memory[1][:] = False"]',
        '["memory[1][:] = False"]',
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: ends stay",
        '["memory[0][j] = after[1]", "memory[1][j] = after[2]", *next_inputs]',
        '["memory[1][j] = after[2]", *next_inputs]',
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: no seals",
        '["memory[0][j] = after[1]", "memory[1][j] = after[2]", *next_inputs]',
        '["memory[0][j] = after[1]", *next_inputs]',
        tests="lambda and test_wide_layouts_agree and reset",
    ),
    Mutant(
        "side by side: the neighbour is the step itself",
        '"t + (position > 0)"',
        '"t"',
        tests="lambda and test_layouts_agree",
    ),
    Mutant(
        "side by side: the window's end is no end",
        "'return position == 0, False, '",
        "'return False, False, '",
        tests="discounted and test_layouts_agree",
    ),
    Mutant(
        "side by side: following value of the neighbour lane",
        'f"memory[2][{i}][j], "',
        'f"memory[2][{i}][max(j - 1, 0)], "',
        tests="lambda and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: last row of a block dropped",
        "min(BLOCK, end_lane - left)",
        "min(BLOCK, end_lane - left) - 1",
        tests="discounted and test_layouts_agree",
        function="backward_side_by_side",
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
    ),
    Mutant(
        "side by side: forward carry kept from the rows before",
        "state[j], over[j] = enter(arguments, group, left + j)",
        "over[j] = False",
        tests="prefix and test_wide_layouts_agree and skip",
    ),
    Mutant(
        "side by side: forward's last step dropped",
        """
            for t in range(steps):
                for j in range(width):
                    ...
        """,
        """
            for t in range(steps - 1):
                for j in range(width):
                    ...
        """,
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
        '"return offsets[unsigned(lane + 1)]"',
        '"return offsets[unsigned(lane)]"',
        tests="test_every_sequence and discounted",
    ),
    Mutant(
        "packed: forward from 0",
        "first if DIRECTION > 0 else end - 1",
        "0 if DIRECTION > 0 else end - 1",
        tests="test_every_sequence and prefix",
    ),
    Mutant(
        "forward: gate multiplies",
        "select(beta == zero, zero, beta * state)",
        "beta * state",
        tests="test_infinity_minus and traces",
        function="step_forward",
    ),
    Mutant(
        "forward: resets a step early",
        "flagged & starts_at",
        "flagged",
        tests="test_eligibility_traces and truncated",
    ),
    Mutant(
        "forward: starts ignored",
        "over | (flagged & starts_at)",
        "over",
        tests="test_prefix_sums and boundary",
    ),
    Mutant(
        "forward: ends ignored",
        "flagged & (not starts_at)",
        "flagged & False",
        tests="test_eligibility_traces and terminated",
    ),
    Mutant(
        "forward: masks never sever",
        "over | (not skip)",
        "over",
        tests="test_every_pattern_of_four and prefix",
    ),
    Mutant(
        "forward: skipped steps sever",
        "over | (not skip)",
        "over | True",
        tests="test_every_pattern_of_four and prefix",
    ),
    Mutant(
        "forward: the window before forgotten",
        "arguments[11]",
        "None",
        tests="test_two_windows and prefix",
    ),
    Mutant(
        "minimum is no bound",
        "bound if x > bound else x",
        "x if x > bound else x",
        tests="test_vtrace",
    ),
]
