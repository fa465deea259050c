"""The compiled epoch: functions that call each other by address, of which one depends on the head."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core.ccallback import CFunc

from rl_triton_core._internal.equations import numba as numba_code
from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.disk import DiskCache, hash_file
from rl_triton_core._internal.loss import equations
from rl_triton_core._internal.loss.equations import HEADS, Choices
from rl_triton_core._internal.mlp import memory, serial, serial_values

INLINED = (
    *("add", "get", "choose_action", "find_memory", "load_setting", "tanh"),
    *("find_actions", "find_log_std", "load_sums", "load_kl_sums", "find_end", "find_rest", "bound_log_std"),
)
CALLED = ("add_product", "run_forward", "run_backward", "evaluate_loss", "step_optimizer")
"""The functions that are called by address, in the order of their table. The loss alone depends on the head."""
FASTMATH = {"reassoc", "contract"}
REAL = np.float32
SOURCE = hash_file(str(memory.__file__))


class Loss(NamedTuple):
    """What a loss is compiled for."""

    head: str = "sampled"
    value_clip_mode: str = "sb3"
    has_old: bool = False
    """Whether there are the old policy's outputs, to which there is a divergence."""
    is_wide: bool = False
    """Whether a Gaussian's log σ is in the actor's outputs."""


@cache
def compile_helpers(loss: Loss) -> dict[str, Any]:
    """Helpers by name, with a loss's equations in them."""
    head, language = loss.head, numba_code.numba_language(REAL, contracts=True, parts=True)
    needed = equations.combine_terms, equations.compute_terms, equations.exp_remainder, equations.sigmoid
    choices = Choices(head, clipped_value=loss.value_clip_mode)
    names = equations.compile_equations(choices, language, (*needed, primitives.multiply_or_zero))
    names |= {"exp": language.primitives[primitives.exp], "sqrt": language.primitives[primitives.safe_sqrt]}
    names |= {"IS_BINARY": head == "bernoulli", "IS_GAUSSIAN": head == "gaussian", "IS_INDEXED": HEADS[head].indexed}
    names |= {"HAS_OLD": loss.has_old, "IS_WIDE": loss.is_wide}
    for module in (serial, serial_values):
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                options: Any = {"fastmath": FASTMATH, "forceinline": name in INLINED, "parts": True}
                names[name] = numba_code.compile_inner(function, REAL, names, SOURCE, **options)
    return names


@cache
def compile_callback(name: str, loss: Loss) -> Any:
    """A function that is called by address, kept on disk between processes."""
    function = numba_code.bind_code(getattr(serial, name), REAL, compile_helpers(loss), SOURCE)
    types = (numba.int64,) * function.__code__.co_argcount, numba.void
    options, pipeline = {"error_model": "numpy", "fastmath": FASTMATH}, numba_code.literals_of(REAL, (float,))
    compiled: Any = CFunc(function, types, locals={}, options=options, pipeline_class=pipeline)
    compiled._cache = DiskCache(function)
    compiled.compile()
    return compiled


@cache
def find_functions(loss: Loss | None = None) -> Any:
    """The addresses of these functions, 0 where there is no loss of actors."""
    own = [loss if name == "evaluate_loss" else Loss() for name in CALLED]
    pairs = zip(CALLED, own, strict=True)
    return np.array([0 if x is None else compile_callback(name, x).address for name, x in pairs])


def arrays_of(*ndims: int, dtype: Any = numba.float32, writable: bool = False) -> list[Any]:
    """Types of contiguous arrays with these numbers of dimensions."""
    return [numba.types.Array(dtype, ndim, "C", readonly=not writable) for ndim in ndims]


@cache
def compile_entry(function: Any) -> Any:
    """A function of arrays and addresses, which Python calls."""
    integer, flags, tuples, void = numba.int64, numba.boolean, numba.types.Tuple, numba.void
    written = arrays_of(1, 2, dtype=numba.float64, writable=True)
    rollout = tuples([*arrays_of(2, 2, 1, 1, 1, 1), *arrays_of(2, dtype=flags), *arrays_of(2)])
    samples, choices = tuples(arrays_of(2, 2, 2, 1, 1, 2, 2)), arrays_of(1, 1, dtype=flags)
    tables = tuples([integer] * 5)
    drawn = [*arrays_of(2, 2), *arrays_of(1, dtype=integer), *arrays_of(1), *arrays_of(2, 1, writable=True)]
    signatures = {
        serial.run_epoch: void(tuples([integer] * 7), integer, rollout, *arrays_of(1, 1, dtype=integer), *written),
        serial_values.run_steps: void(tables, samples, integer, *choices, written[1], written[1]),
        serial_values.learn_tiles: void(tables, samples, integer, integer, flags, written[1], integer),
        serial_values.finish: flags(tables, integer, integer, *[flags] * 3, written[1], written[1], integer),
        serial_values.draw: void(integer, *drawn),
        serial_values.evaluate: void(tuples([integer] * 3), *arrays_of(2), *arrays_of(2, writable=True)),
    }
    return numba_code.compile_kernel(function, signatures[function], REAL, compile_helpers(Loss()), SOURCE)
