"""What the serial walk needs from Numba: tensors by address and stride, and operations on tuples of different types.

An intrinsic is a function of compiled code that is written as two Python functions: one tells the type of its result
from those of its arguments, `generate` emits its instructions. Numba compiles no loop over a tuple whose elements have
different types; `apply_to_each` emits it element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, lower_getattr_generic, models, register_model

LANES_PER_BLOCK = 1024
"""Lanes walked together where they lie side by side: rows long enough for vector instructions."""
WORD = ir.IntType(64)


class Arguments(NamedTuple):
    """What the walk takes. Each field is a stream, a number, None where it is absent, or a tuple of these."""

    inputs: Any
    next_values: Any
    bootstrap: Any
    terminated: Any
    truncated: Any
    mask: Any
    gamma: Any
    decay: Any
    """γλ, or λ where γ is a stream."""
    params: Any
    skip: Any
    initial: Any
    previous_done: Any
    starts_at: Any
    outputs: Any
    offsets: Any
    """Where sequences start, by lane."""
    zero: Any
    """0 in the type of the arithmetic."""
    zeros: Any
    """As many zeros as there are inputs that are read at t+1 too."""
    steps: Any


class StreamType(types.Type):
    """A tensor in compiled code: an address, and strides in bytes between groups, steps and lanes."""

    def __init__(self, element: types.Type, is_contiguous: bool, output: int = 0) -> None:
        """Elements may lie side by side along the lanes; `output` counts results from 1, and is 0 for what is read."""
        super().__init__(name=f"Stream({element}, {is_contiguous}, {output})")
        self.element, self.is_contiguous, self.output = element, is_contiguous, output


@register_model(StreamType)
class StreamModel(models.StructModel):
    """How compiled code holds a stream."""

    def __init__(self, manager: Any, stream: StreamType) -> None:
        members = [("address", types.voidptr), *((name, types.intp) for name in ("group", "step", "lane"))]
        super().__init__(manager, stream, members)


class ArgumentsType(types.Type):
    """`Arguments` in compiled code: a place on the stack. A field is loaded where it is used."""

    def __init__(self, fields: Arguments) -> None:
        super().__init__(name=f"Arguments({fields})")
        self.fields = [types.BaseTuple.from_types(x) if isinstance(x, tuple) else x for x in fields]


@register_model(ArgumentsType)
class ArgumentsModel(models.PrimitiveModel):
    """How compiled code holds arguments."""

    def __init__(self, manager: Any, arguments: ArgumentsType) -> None:
        self.struct = ir.LiteralStructType([manager[x].get_value_type() for x in arguments.fields])
        super().__init__(manager, arguments, self.struct.as_pointer())


@infer_getattr
class ArgumentsAttributes(AttributeTemplate):
    """The types of the fields."""

    key = ArgumentsType

    def generic_resolve(self, arguments: ArgumentsType, name: str) -> Any:
        """Tell the type of a field."""
        return arguments.fields[Arguments._fields.index(name)]


@lower_getattr_generic(ArgumentsType)
def load_field(context: Any, builder: ir.IRBuilder, arguments: ArgumentsType, value: Any, name: str) -> Any:
    """Load a field."""
    return builder.load(cgutils.gep_inbounds(builder, value, 0, Arguments._fields.index(name)))


def make_loader(field_types: Arguments) -> Any:
    """Make the compiled function that turns what Python passes into `Arguments` of these types.

    Field by field, a stream takes one of the addresses, and its strides from the words that `table` points to; a number
    that is a float takes one of the numbers, any other one of the words.
    """
    arguments_type = ArgumentsType(field_types)

    @intrinsic
    def load_arguments(context: Any, table: Any, addresses: Any, numbers: Any) -> Any:
        """Load the arguments of a walk."""

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
            words = load_words(builder, values[0])
            addresses, numbers = (iter(cgutils.unpack_tuple(builder, x)) for x in values[1:])

            def load(wanted: Any) -> Any:
                if isinstance(wanted, types.BaseTuple):
                    return context.make_tuple(builder, wanted, [load(x) for x in wanted])
                if isinstance(wanted, StreamType):
                    stream = cgutils.create_struct_proxy(wanted)(context, builder)
                    stream.address = builder.inttoptr(next(addresses), cgutils.voidptr_t)
                    stream.group, stream.step, stream.lane = next(words), next(words), next(words)
                    return stream._getvalue()
                if isinstance(wanted, types.NoneType):
                    return context.get_dummy_value()
                if isinstance(wanted, types.Float):
                    return context.cast(builder, next(numbers), types.float64, wanted)
                return context.cast(builder, next(words), types.int64, wanted)

            place = cgutils.alloca_once(builder, context.data_model_manager[arguments_type].struct)
            for i, field in enumerate(arguments_type.fields):
                builder.store(load(field), cgutils.gep_inbounds(builder, place, 0, i))
            return place

        return arguments_type(table, addresses, numbers), generate

    return load_arguments


def load_words(builder: ir.IRBuilder, table: Any) -> Iterator[Any]:
    """Load the words at an address, one after the other."""
    position = builder.inttoptr(table, WORD.as_pointer())
    while True:
        yield builder.load(position)
        position = builder.gep(position, [WORD(1)])


@intrinsic
def apply_to_each(context: Any, function: Any, firsts: Any, columns: Any) -> Any:
    """Return the tuple of ``function(*firsts, columns[0][i], columns[1][i], ...)`` for every i."""
    rows = [list(row) for row in zip(*columns, strict=True)]
    calls = [function.get_call_type(context, (*firsts, *row), {}) for row in rows]
    results = types.BaseTuple.from_types([call.return_type for call in calls])

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        first_values = cgutils.unpack_tuple(builder, values[1])
        unpacked = [cgutils.unpack_tuple(builder, column) for column in cgutils.unpack_tuple(builder, values[2])]
        returned = []
        for row, row_types, call in zip(zip(*unpacked, strict=True), rows, calls, strict=True):
            given = zip((*first_values, *row), (*firsts, *row_types), call.args, strict=True)
            operands = [context.cast(builder, value, has, wants) for value, has, wants in given]
            returned.append(context.get_function(function, call)(builder, operands))
        return context.make_tuple(builder, results, returned)

    return results(function, firsts, columns), generate


# -- elements of streams ----------------------------------------------------------------------------------------------


def locate_element(context: Any, builder: ir.IRBuilder, stream_type: StreamType, stream: Any, place: Any) -> Any:
    """Compute the address of a stream's element at (group, step, lane)."""
    fields = cgutils.create_struct_proxy(stream_type)(context, builder, value=stream)
    group, step, lane = cgutils.unpack_tuple(builder, place)
    element = context.get_data_type(stream_type.element).as_pointer()
    row = builder.gep(fields.address, [builder.add(builder.mul(group, fields.group), builder.mul(step, fields.step))])
    if stream_type.is_contiguous:
        return builder.gep(builder.bitcast(row, element), [lane])
    return builder.bitcast(builder.gep(row, [builder.mul(lane, fields.lane)]), element)


def declare_memory(builder: ir.IRBuilder, stream_type: StreamType, access: Any) -> Any:
    """Declare that a load or store touches no memory of another output, so that lanes go into vectors."""
    module = builder.module
    domain = module.add_metadata(["rl_triton_core"])
    scopes = [module.add_metadata([f"memory {i}", domain]) for i in range(stream_type.output + 1)]
    access.set_metadata("alias.scope", module.add_metadata(scopes[-1:]))
    if stream_type.output:
        access.set_metadata("noalias", module.add_metadata(scopes[:-1]))
    return access


@intrinsic
def read(context: Any, place: Any, absent: Any, stream: Any) -> Any:
    """Read a stream at a place (group, step, lane). A number stands for a stream of it, None for one of `absent`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        if isinstance(stream, StreamType):
            address = locate_element(context, builder, stream, values[2], values[0])
            return declare_memory(builder, stream, builder.load(address))
        return values[1] if isinstance(stream, types.NoneType) else values[2]

    result = absent if isinstance(stream, types.NoneType) else getattr(stream, "element", stream)
    return result(place, absent, stream), generate


@intrinsic
def read_flag(context: Any, place: Any, absent: Any, flags: Any) -> Any:
    """Tell whether a flag is set at a place; `absent` where there are no flags."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        if isinstance(flags, types.NoneType):
            return context.cast(builder, values[1], absent, types.boolean)
        address = locate_element(context, builder, flags, values[2], values[0])
        flag = declare_memory(builder, flags, builder.load(address))
        compare = builder.fcmp_unordered if isinstance(flags.element, types.Float) else builder.icmp_unsigned
        return compare("!=", flag, flag.type(0))

    return types.boolean(place, absent, flags), generate


@intrinsic
def write(context: Any, place: Any, value: Any, output: Any) -> Any:
    """Write a stream at a place; do nothing where there is none."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        if isinstance(output, StreamType):
            number = context.cast(builder, values[1], value, output.element)
            address = locate_element(context, builder, output, values[2], values[0])
            declare_memory(builder, output, builder.store(number, address))
        return context.get_dummy_value()

    return types.none(place, value, output), generate


# -- a number for each lane of a block --------------------------------------------------------------------------------


@intrinsic
def allocate_row(context: Any, like: Any) -> Any:
    """Make room for a number like this one for each lane, on the stack of the function that calls."""
    element = types.unliteral(like)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        return cgutils.alloca_once(builder, context.get_data_type(element), size=WORD(LANES_PER_BLOCK))

    return types.CPointer(element)(like), generate


@intrinsic
def read_row(context: Any, index: Any, row: Any) -> Any:
    """Read an element of a row."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        stored = builder.load(builder.gep(values[1], [values[0]]))
        return context.data_model_manager[row.dtype].from_data(builder, stored)

    return row.dtype(index, row), generate


@intrinsic
def write_row(context: Any, index: Any, value: Any, row: Any) -> Any:
    """Write an element of a row."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        number = context.cast(builder, values[1], value, row.dtype)
        stored = context.data_model_manager[row.dtype].as_data(builder, number)
        builder.store(stored, builder.gep(values[2], [values[0]]))
        return context.get_dummy_value()

    return types.none(index, value, row), generate
