"""Mutants of _internal/launch/fast_path.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/fast_path.py"

MUTANTS = [
    Mutant(
        "fast path: constants do not count",
        'conditions.append(f"({name} is {constant} or type({name}) is {type(x).__name__} and {name} == {constant})")',
        'conditions.count(f"({name} is {constant} or type({name}) is {type(x).__name__} and {name} == {constant})")',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: types do not count",
        'f"({name} is {constant} or type({name}) is {type(x).__name__} and {name} == {constant})"',
        'f"({name} is {constant} or {name} == {constant})"',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: tensors are all alike",
        "Sizes(tensor_guard(tensors), tuple(writer.values))",
        "Sizes(lambda *others: True, tuple(writer.values))",
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: a graph does not count",
        'conditions.append(f"is_grad_enabled() is {torch.is_grad_enabled()}")',
        'conditions.count(f"is_grad_enabled() is {torch.is_grad_enabled()}")',
        tests="fast_path and without_a_graph",
    ),
    Mutant(
        "fast path: strides do not count",
        "(type(x), x.shape, x.stride(), x.dtype, x.device, torch.is_grad_enabled() and x.requires_grad)",
        "(type(x), x.shape, x.dtype, x.device, torch.is_grad_enabled() and x.requires_grad)",
        tests="fast_path and what_is_alike",
    ),
    Mutant(
        "fast path: alignment does not count",
        "f\"({' | '.join(aligned)}) & 15\"",
        '"False"',
        tests="fast_path and not_alike",
    ),
    Mutant(
        "fast path: one place or two",
        "first.setdefault(x.data_ptr(), i) != i",
        "False",
        tests="fast_path and in_place",
    ),
    Mutant(
        "fast path: overlap not looked for",
        "lines += self.overlap_guard(result)",
        "pass",
        tests="fast_path and overlap",
    ),
    Mutant(
        "fast path: the recorded pointers",
        "return self.places[x.data_ptr()]",
        "return str(x.data_ptr())",
        tests="fast_path and made_again",
        function="PlanWriter.address_source",
    ),
    Mutant(
        "fast path: the recorded numbers",
        """
            if type(x) is TracedNumber:
                self.factors.append(x.factors)
                return f"n{len(self.factors) - 1}"
        """,
        "pass",
        tests="fast_path and passed_on_anew",
    ),
    Mutant(
        "fast path: a result that nothing writes",
        "x is not None and x.data_ptr() not in written",
        "False",
        tests="fast_path and no_launch_writes",
    ),
    Mutant(
        "fast path: recorded at the first call",
        "signature not in memory.seen",
        "False",
        tests="fast_path and second_call",
    ),
    Mutant(
        "fast path: sizes of the last call only",
        "plan.sizes[shape] = (sizes, *plan.sizes.get(shape, ())[:3])",
        "plan.sizes.clear(); plan.sizes[shape] = (sizes,)",
        tests="fast_path and one_plan_serves",
    ),
    Mutant(
        "fast path: shapes without bound",
        "len(plan.sizes) >= MAX_SHAPES_PER_PLAN and shape not in plan.sizes",
        "False",
        tests="fast_path and bounded_memory",
    ),
    Mutant(
        "fast path: not to be switched off",
        "Switch.enabled, Switch.reason = bool(enabled), ...",
        "Switch.enabled, Switch.reason = True, ...",
        tests="fast_path and switched_off and not environment",
    ),
    Mutant(
        "fast path: plans outlast the switch",
        "forget_plans()",
        "pass",
        tests="fast_path and switched_off and not environment",
        function="set_fast_path",
    ),
    Mutant(
        "fast path: warned of every time",
        "Switch.reason != str(error)",
        "True",
        tests="fast_path and launcher_that",
    ),
    Mutant(
        "fast path: results of a part of the call",
        "outcome is not None and outcome.results is not results",
        "False",
        tests="losses_fast_path and part_of_a_loss",
    ),
    Mutant(
        "fast path: memory that is too small",
        "y.data_ptr() == at and byte_span(x) > byte_span(y)",
        "False",
        tests="fast_path and reaches_beyond",
    ),
    Mutant(
        "fast path: a view of one of two",
        "len(others) != 1",
        "not others",
        tests="fast_path and view_inside",
    ),
    Mutant(
        "fast path: any tensor of an address",
        "(y.data_ptr(), y.dtype) == (x.data_ptr(), x.dtype) and contains(y, x)",
        "y.data_ptr() == x.data_ptr()",
        tests="fast_path and tensors_themselves",
    ),
    Mutant(
        "fast path: constants are recorded at once",
        "self.fixed[signature] = tuple(positions)",
        "pass",
        tests="fast_path and come_again",
        function="Memory.fix_numbers",
    ),
]
