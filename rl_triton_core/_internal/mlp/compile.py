"""The compiled epoch: functions that call each other by address, of which one depends on the head."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core.ccallback import CFunc

from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.disk import DiskCache, hash_file
from rl_triton_core._internal.equations.numba import (
    bind_code,
    compile_inner,
    compile_kernel,
    literals_of,
    numba_language,
)
from rl_triton_core._internal.loss.equations import (
    HEADS,
    Choices,
    combine_terms,
    compile_equations,
    compute_terms,
    exp_remainder,
    sigmoid,
)
from rl_triton_core._internal.mlp import memory, serial

INLINED = (
    *("add", "get", "choose_action", "find_memory", "load_setting", "tanh"),
    *("find_actions", "find_log_std", "load_sums", "load_kl_sums"),
)
CALLED = ("add_product", "add_gradient", "run_forward", "run_backward", "evaluate_loss", "step_optimizer")
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
    head, language = loss.head, numba_language(REAL, contracts=True)
    equations = combine_terms, compute_terms, exp_remainder, sigmoid, primitives.multiply_or_zero
    names = compile_equations(Choices(head, clipped_value=loss.value_clip_mode), language, equations)
    names |= {"exp": language.primitives[primitives.exp], "IS_INDEXED": HEADS[head].indexed}
    names |= {"IS_BINARY": head == "bernoulli", "IS_GAUSSIAN": head == "gaussian"}
    names |= {"HAS_OLD": loss.has_old, "IS_WIDE": loss.is_wide}
    for name, function in vars(serial).items():
        if isinstance(function, FunctionType) and function.__module__ == serial.__name__:
            options = {"fastmath": FASTMATH, "forceinline": name in INLINED}
            names[name] = compile_inner(function, REAL, names, SOURCE, **options)
    return names


@cache
def compile_callback(name: str, loss: Loss) -> Any:
    """A function that is called by address, kept on disk between processes."""
    function = bind_code(getattr(serial, name), REAL, compile_helpers(loss), SOURCE)
    types = (numba.int64,) * function.__code__.co_argcount, numba.void
    options = {"error_model": "numpy", "fastmath": FASTMATH}
    compiled: Any = CFunc(function, types, locals={}, options=options, pipeline_class=literals_of(REAL, (float,)))
    compiled._cache = DiskCache(function)
    compiled.compile()
    return compiled


@cache
def find_functions(loss: Loss) -> Any:
    """The addresses of these functions."""
    own = [loss if name == "evaluate_loss" else Loss() for name in CALLED]
    return np.array([compile_callback(*pair).address for pair in zip(CALLED, own, strict=True)])


@cache
def compile_epoch() -> Any:
    """`run_epoch`, a function of arrays and addresses."""
    real, wide, integer = numba.float32, numba.float64, numba.int64

    def array(dtype: Any, ndim: int, writable: bool = False) -> Any:
        return numba.types.Array(dtype, ndim, "C", readonly=not writable)

    arrays = [array(real, ndim) for ndim in (2, 2, 1, 1, 1, 1, 2)]
    rollout = numba.types.Tuple([*arrays, array(numba.boolean, 2)])
    tables = numba.types.UniTuple(integer, 14)
    indices, written = [array(integer, 1)] * 2, [array(wide, ndim, True) for ndim in (1, 2)]
    signature = integer(tables, *[integer] * 3, rollout, *indices, *written)
    return compile_kernel(serial.run_epoch, signature, REAL, compile_helpers(Loss()), SOURCE)
