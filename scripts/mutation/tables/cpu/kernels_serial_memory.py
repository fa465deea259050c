"""Mutants of _internal/scan/serial_memory.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/serial_memory.py"

MUTANTS = [
    Mutant(
        "the compiler knows nothing of memory",
        "access.set_metadata('alias.scope', module.add_metadata(scopes[-1:]))",
        "pass",
        tests="test_lanes_side_by_side_go_into_vectors",
    ),
    Mutant(
        "minimum is no bound",
        "builder.select(builder.fcmp_ordered('>', values[0], number), number, values[0])",
        "values[0]",
        tests="test_vtrace",
    ),
    Mutant(
        "minimum hides NaN",
        "builder.fcmp_ordered('>', values[0], number)",
        "builder.fcmp_unordered('>', values[0], number)",
        tests="test_a_ratio_that_is_nan",
    ),
    Mutant(
        "groups share their rows",
        "builder.add(builder.mul(group, fields.group), builder.mul(step, fields.step))",
        "builder.mul(step, fields.step)",
        tests="test_every_kind_of_features and linear",
    ),
    Mutant(
        "an absent stream is 0",
        "values[1] if isinstance(stream, types.NoneType) else values[2]",
        "values[0] if isinstance(stream, types.NoneType) else values[2]",
        tests="test_literal_numbers",
    ),
    Mutant(
        "absent flags are not set",
        "context.cast(builder, values[1], absent, types.boolean)",
        "context.get_constant(types.boolean, False)",
        tests="test_literal_numbers",
    ),
    Mutant(
        "literals widen",
        "min(floats, key=lambda kind: kind.bitwidth, default=types.int64)",
        "max(floats, key=lambda kind: kind.bitwidth, default=types.int64)",
        tests="precision or test_the_cpu_backend_is_a_serial_loop",
    ),
]
