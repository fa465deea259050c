"""The compiled epoch: functions that call each other by address, of which one depends on the head."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba.core.ccallback import CFunc

from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.numba import (
    bind_code,
    compile_and_keep,
    compile_inner,
    keep_on_disk,
    literals_of,
    numba_language,
)
from rl_triton_core._internal.loss.equations import (
    HEADS,
    Choices,
    compile_equations,
    compute_terms,
    exp_remainder,
    sigmoid,
)
from rl_triton_core._internal.mlp import memory, serial

INLINED = ("add", "get", "load_four", "add_four", "choose_action", "find_memory", "load_setting", "tanh")
CALLED = ("add_product", "add_dots", "run_forward", "run_backward", "evaluate_loss", "step_optimizer")
"""The functions that are called by address, in the order of their table. The loss alone depends on the head."""
FASTMATH = {"reassoc", "contract"}
REAL = np.float32
SOURCE = [Path(str(file)).read_bytes() for file in (serial.__file__, memory.__file__)]


@cache
def compile_helpers(head: str) -> dict[str, Any]:
    """Helpers by name, with a head's equations in them."""
    language, choices = numba_language(REAL, contracts=True), Choices(head, clipped_value="sb3")
    names = compile_equations(choices, language, (compute_terms, exp_remainder, sigmoid))
    names |= {"exp": language.primitives[primitives.exp], "IS_INDEXED": HEADS[head].indexed}
    names["IS_BINARY"] = head == "bernoulli"
    for name, function in vars(serial).items():
        if isinstance(function, FunctionType) and function.__module__ == serial.__name__:
            options = {"fastmath": FASTMATH, "forceinline": name in INLINED}
            names[name] = compile_inner(function, REAL, names, SOURCE, **options)
    return names


@cache
def compile_callback(name: str, head: str) -> Any:
    """A function that is called by address, kept on disk between processes."""
    function = bind_code(getattr(serial, name), REAL, compile_helpers(head), SOURCE)
    types = (numba.int64,) * function.__code__.co_argcount, numba.void
    options = {"error_model": "numpy", "fastmath": FASTMATH}
    compiled: Any = CFunc(function, types, locals={}, options=options, pipeline_class=literals_of(REAL, (float,)))
    keep_on_disk(compiled, function)
    compiled.compile()
    return compiled


@cache
def find_functions(head: str) -> Any:
    """The addresses of these functions."""
    heads = [head if name == "evaluate_loss" else "none" for name in CALLED]
    return np.array([compile_callback(*pair).address for pair in zip(CALLED, heads, strict=True)])


@cache
def compile_epoch() -> Any:
    """`run_epoch`, a function of arrays and addresses."""
    real, wide, integer = numba.float32, numba.float64, numba.int64

    def array(dtype: Any, ndim: int, writable: bool = False) -> Any:
        return numba.types.Array(dtype, ndim, "C", readonly=not writable)

    rollout = numba.types.Tuple([array(real, 2), array(real, 2), *[array(real, 1)] * 4, array(numba.boolean, 2)])
    tables = numba.types.UniTuple(integer, 13)
    function = bind_code(serial.run_epoch, REAL, compile_helpers("none"), SOURCE)
    signature = integer(
        tables, *[integer] * 3, rollout, array(integer, 1), integer, array(wide, 1, True), array(wide, 2, True)
    )
    return compile_and_keep(function, signature, pipeline_class=literals_of(REAL, (float,)))
