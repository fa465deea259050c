"""Equations as functions that Numba compiles; the options and names of compiled code."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir as llvm
from numba import types
from numba.core import ir
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.untyped_passes import IRProcessing
from numba.extending import intrinsic

from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.compile import Language, bind_names
from rl_triton_core._internal.equations.disk import DiskCache, hash_file, hash_text

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set in the environment, expected it unset")

INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled code calls."""
SCALARS: dict[Any, Any] = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
"""Of each dtype of the arithmetic the type of its numbers."""


def compile_and_keep(function: Any, signature: Any = None, **options: Any) -> Any:
    """Compile a function for a signature, or for each that comes, and keep it on disk."""
    compiled = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    compiled._cache = DiskCache(function)
    if signature is None:
        return compiled
    compiled.compile(signature)
    return compiled.overloads[signature.args].entry_point


# -- compilation ------------------------------------------------------------------------------------------------------


class Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that other code is linked with: only there it is optimised, and becomes machine code."""

    codegen = SimpleNamespace(set_env=lambda *_: None)  # it has no Python objects
    _optimize_functions = _optimize_final_module = lambda *_: None

    def _finalize_final_module(self) -> None:
        self._finalized = True


@cache
def literals_of(kind: type, wanted: tuple[type, ...] = (int, float), parts: bool = False) -> type[CompilerBase]:
    """Numba's compiler with literals of a type: Python's own would widen the arithmetic. Indices stay as they are.

    With `parts`, what only compiled code calls is a `Part`.
    """

    @register_pass(mutates_CFG=False, analysis_only=False)
    class TypeLiterals(FunctionPass):  # type: ignore[misc]
        """Replace literals before types are inferred."""

        _name = f"type_literals_{kind.__name__}_{len(wanted)}"

        def __init__(self) -> None:  # abstract in Numba
            """Do nothing else."""

        def run_pass(self, state: Any) -> bool:
            """Tell whether something was replaced."""
            statements = [x for block in state.func_ir.blocks.values() for x in block.find_insts(ir.Assign)]
            items = [x.value for x in statements if getattr(x.value, "op", "") in ("getitem", "static_getitem")]
            indices = {getattr(item.index, "name", None) for item in items}
            for x in statements:
                if isinstance(x.value, ir.Const) and type(x.value.value) in wanted and x.target.name not in indices:
                    x.value = ir.Const(kind(x.value.value), x.value.loc)
            return True

    class Compiler(CompilerBase):  # type: ignore[misc]
        """Numba's own passes and that one."""

        def define_pipelines(self) -> list[Any]:
            """List the pipelines to try."""
            if parts and all(getattr(self.state.flags, name) for name in INNER):
                self.state.library = Part(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
            passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
            passes.add_pass_after(TypeLiterals, IRProcessing)
            passes.finalize()
            return [passes]

    return Compiler


# -- primitives -------------------------------------------------------------------------------------------------------


@intrinsic
def select(context: Any, condition: Any, chosen: Any, otherwise: Any) -> Any:
    """Select a number."""
    result = context.unify_types(types.unliteral(chosen), types.unliteral(otherwise))

    def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        given = zip(values, signature.args, (types.boolean, result, result), strict=True)
        return builder.select(*(context.cast(builder, x, has, wants) for x, has, wants in given))

    return result(condition, chosen, otherwise), generate


def llvm_function(name: str) -> Any:
    """A primitive that LLVM has."""

    @intrinsic
    def call(context: Any, x: Any) -> Any:

        def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
            return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", [values[0].type]), values)

        return x(x), generate

    return call


@intrinsic
def reinterpret(context: Any, x: Any) -> Any:
    """The float32 that has the bits of an int32, or the other way."""
    result = types.float32 if x == types.int32 else types.int32

    def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
        return builder.bitcast(values[0], context.get_value_type(result))

    return result(x), generate


def make_load(kind: Any) -> Any:
    """A function of an address and an index that reads a number there."""

    @intrinsic
    def load(context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
            pointer = builder.inttoptr(values[0], context.get_data_type(kind).as_pointer())
            return builder.load(builder.gep(pointer, values[1:]))

        return kind(types.int64, types.int64), generate

    return load


def make_store(kind: Any) -> Any:
    """A function of an address, an index and a number that writes it there."""

    @intrinsic
    def store(context: Any, address: Any, index: Any, number: Any) -> Any:
        def generate(context: Any, builder: llvm.IRBuilder, signature: Any, values: Sequence[Any]) -> Any:
            pointer = builder.inttoptr(values[0], context.get_data_type(kind).as_pointer())
            builder.store(values[2], builder.gep(pointer, values[1:2]))

        return types.void(types.int64, types.int64, kind), generate

    return store


def exp_in_vectors(x: Any) -> Any:
    """The primitive for float32, in operations that vector instructions have (Cephes, expf)."""
    bounded = 89.0 if x > 89.0 else (x if x > -104.0 else -104.0)
    n = (bounded * 1.44269504 + 12582912.0) - 12582912.0
    r = (bounded - n * 0.693359375) + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    whole = np.int32(n)
    half = whole >> 1
    result = p * reinterpret(np.int32((half + 127) << 23)) * reinterpret(np.int32((whole - half + 127) << 23))
    return x if np.isnan(x) else result


def log_in_vectors(x: Any) -> Any:
    """The primitive for float32 numbers of at least 1, from Cephes too (logf)."""
    bits = reinterpret(x)
    above = np.int32((bits & 0x7FFFFF) > 0x3504F3)  # the mantissa is more than √2
    n = np.float32((bits >> 23) - 127 + above)
    f = reinterpret(np.int32((bits & 0x7FFFFF) + ((127 - above) << 23))) - 1.0
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    result = f + (p * f * square + (n * -2.12194440e-4 - 0.5 * square)) + n * 0.693359375
    return result if x < 3.4e38 else x


# -- languages --------------------------------------------------------------------------------------------------------


def bind_code(function: Any, kind: type, names: dict[str, Any], key: Any = ()) -> Any:
    """A copy of a function with some of its names bound, and with a name of its own: that of its code.

    What is loaded from disk is linked by name with what this process compiled.
    """
    bound = [(name, getattr(x, "__name__", x)) for name, x in names.items()]
    code = [(x.opname, x.argrepr) for x in dis.get_instructions(function)]
    own = hash_text((SOURCE, hash_file(function.__code__.co_filename), code, bound, kind.__name__, key))
    return bind_names(function, f"{function.__name__}_{own}", **names)


def compile_kernel(
    function: Any, signature: Any, kind: type, names: dict[str, Any], key: Any = (), **options: Any
) -> Any:
    """A function that Python calls, in which floats have this type, kept on disk between processes."""
    bound = bind_code(function, kind, names, key)
    return compile_and_keep(bound, signature, pipeline_class=literals_of(kind, (float,)), **options)


def compile_inner(
    function: Any, kind: type, names: dict[str, Any], key: Any = (), parts: bool = False, **options: Any
) -> Any:
    """A function that compiled functions call, in which floats have this type."""
    options = {**INNER, "pipeline_class": literals_of(kind, (float,), parts), **options}
    compiled: Any = numba.njit(**options)(bind_code(function, kind, names, key))
    find = compiled.get_call_template
    compiled.get_call_template = lambda args, kws: find([*map(types.unliteral, args)], kws)  # not for each literal
    return compiled


EXACT = {
    primitives.select: select,
    primitives.exp: llvm_function("exp"),
    primitives.log: llvm_function("log"),
    primitives.safe_sqrt: llvm_function("sqrt"),
}
"""Primitives that round once."""
SOURCE = hash_file(__file__)


@cache
def numba_language(kind: type, contracts: bool = False, parts: bool = False) -> Language:
    """Numbers of a type of NumPy's, one at a time; each operation is rounded once, unless it contracts them.

    Then a product and a sum may be one operation, and primitives are those of vector instructions.
    """
    known = EXACT
    options: dict[str, Any] = {"forceinline": True, "fastmath": {"contract"}} if contracts else {}
    if contracts and kind is np.float32:
        compile_primitive = partial(compile_inner, kind=kind, names={}, parts=parts, **options)
        exp, log = map(compile_primitive, (exp_in_vectors, log_in_vectors))
        known = known | {primitives.exp: exp, primitives.log: log}
    if kind is not np.int64:
        options["pipeline_class"] = literals_of(kind, parts=parts)

    def make(function: Any, names: dict[str, Any]) -> Any:
        return compile_inner(function, kind, names, contracts, **options)

    return Language(known, make)
