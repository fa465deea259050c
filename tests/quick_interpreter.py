"""Triton's interpreter in less time, for the tests: it computes the same, but rounds a multiply-add once as a GPU does.

What it makes anew for every value or launch (types of blocks, shapes, patches of the language) is made once; a scan
combines all elements at once, over doubling distances; sums of offsets are not computed again to look for overflow.
"""

import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter

from rl_triton_core._internal.kernels import launch
from rl_triton_core._internal.kernels.launch import Launch, Limits

SMALL = {
    "env-major": ((Limits(steps=4), Launch(64, 2, 2, 4)), (Limits(), Launch(16, 8, 4, 4))),
    "time-major": ((Limits(steps=4), Launch(64, 2, 2, 4)), (Limits(), Launch(32, 4, 4, 4))),
}
"""Launches for the interpreter, whose time goes with the number of programs; `test_launches` makes others."""


def hasten():
    """Replace parts of the interpreter, and the table of launches by `SMALL`, in this process."""
    launch.settings = partial(launch.settings, table=SMALL)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter.InterpreterBuilder.create_fma = fma
    interpreter.ScanOps.generic_scan = scan
    share_types()
    patch_once()


def fma(self, x, y, z):
    with np.errstate(invalid="ignore"):
        exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def scan(self, tensors):
    def as_tensors(arrays):
        return [self.to_tensor(y, x.dtype) for x, y in zip(tensors, arrays, strict=True)]

    states = [np.moveaxis(x.handle.data, self.axis, 0) for x in tensors]
    distance = 1
    while distance < len(states[0]):
        earlier = as_tensors(np.roll(x, distance, 0) for x in states)
        combined = [x.handle.data for x in self.combine_fn.fn(*earlier, *as_tensors(states))]
        states = [np.concatenate([x[:distance], y[distance:]]) for x, y in zip(states, combined, strict=True)]
        distance *= 2
    return as_tensors(np.moveaxis(x, 0, self.axis) for x in states)


def share_types():
    """One type for all blocks of an element and a shape, one shape for its values, and how types broadcast."""
    blocks, pairs, numpy_types = {}, {}, {}
    semantic = type(interpreter.interpreter_semantic)
    broadcast, numpy_type = semantic.broadcast_impl_value, interpreter._get_np_dtype
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__

    def known_numpy_type(dtype):
        name = dtype.scalar.name
        return numpy_types.get(name) or numpy_types.setdefault(name, numpy_type(dtype.scalar))

    def known_block(cls, element_ty, shape):
        key = element_ty.name, tuple(core._unwrap_if_constexpr(size) for size in shape)
        return blocks.get(key) or blocks.setdefault(key, object.__new__(cls))

    def fill_block(self, element_ty, shape):
        if "shape" not in vars(self):
            init_block(self, element_ty, shape)

    def fill_tensor(self, handle, type):
        if "of_tensors" not in vars(type):
            init_tensor(self, handle, type)
            type.of_tensors = {name: x for name, x in vars(self).items() if name != "handle"}
        self.handle = handle
        vars(self).update(type.of_tensors)

    def known_broadcast(self, x, y):
        key = x.type.name, y.type.name
        if key not in pairs:
            pairs[key] = [None if z is old else z.type for z, old in zip(broadcast(self, x, y), (x, y), strict=True)]
        to_x, to_y = pairs[key]
        return (spread(x, to_x) if to_x else x), (spread(y, to_y) if to_y else y)

    def spread(x, to):
        data = np.empty(to.shape.values, x.handle.data.dtype)
        data[...] = x.handle.data
        return core.tensor(interpreter.TensorHandle(data, x.handle.dtype), to)

    interpreter._get_np_dtype = known_numpy_type
    core.block_type.__new__, core.block_type.__init__ = known_block, fill_block
    core.tensor.__init__ = fill_tensor
    semantic.broadcast_impl_value = known_broadcast


def patch_once():
    """Triton's language is patched for good: not at every launch, and again at every call of a function."""

    def patch(where, name, function, *_):
        inner = inspect.unwrap(function)

        def call(*args, **kwargs):
            return inner(*args, **kwargs | {"_semantic": interpreter.interpreter_semantic})

        setattr(where, name, call)

    interpreter._patch_attr = patch
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": core}))
    if scope is not None:  # Triton 3.4 has none
        scope._changes.clear()  # nothing is to be restored
    interpreter._patch_lang = lambda _: scope
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
