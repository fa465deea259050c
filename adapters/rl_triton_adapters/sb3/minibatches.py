"""Stable-Baselines3: minibatches of a replay buffer, drawn by its own random numbers, copied to the device at once."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from gymnasium.spaces import flatdim
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.overrides import find_own, list_stock
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_core.capture import is_input

COPIED_BYTES = 2**26  # so many are drawn before a gradient step is made with the first of them
PINNED_BYTES = 2**34  # so many, at most, of a buffer's arrays are pinned, in blocks of powers of two: Atari's take half
ALIGNMENT = 16  # bytes: where a tensor may begin


class Form(NamedTuple):
    """How the tensors of a minibatch lie in one row of bytes."""

    structure: Any
    leaves: tuple[Any, ...]
    """Dtype, shape, first byte and the one behind the last, or something that is no tensor."""

    def unpack(self, row: Tensor) -> Any:
        """A minibatch as the buffer has drawn it: views of a row of bytes."""
        parts = [row[x[2] : x[3]].view(x[0]).view(x[1]) if isinstance(x, tuple) else x for x in self.leaves]
        return pytree.tree_unflatten(parts, self.structure)


def pack_minibatches(samples: Any, count: int, device: torch.device) -> tuple[Form, list[Tensor]]:
    """The form of some minibatches, arrays one behind the other, and their rows of bytes on a device, by one copy."""
    arrays, structure = pytree.tree_flatten(samples)
    leaves, end = [], 0
    for x in arrays:
        if isinstance(x, np.ndarray):
            start, end = end, end + x.nbytes // count
            leaves.append((getattr(torch, str(x.dtype)), (len(x) // count, *x.shape[1:]), start, end))
            end += -end % ALIGNMENT
        else:
            leaves.append(x)
    rows = torch.empty(count, end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    own = rows.numpy()
    for x, leaf in zip(arrays, leaves, strict=True):
        if isinstance(x, np.ndarray):
            own[:, leaf[2] : leaf[3]] = x.reshape(count, -1).view(np.uint8)
    return Form(structure, tuple(leaves)), list(rows.to(device, non_blocking=True))


class Stored:
    """The arrays of a plain replay buffer, from which a graph gathers its minibatches: on a GPU, where they are.

    They are in pinned host memory then, so that a minibatch has what is written to an array before, by whomever.

    Attributes:
        views: Tensors over the arrays, as of `list_fields`. None if minibatches are to be drawn on the host, since
            somebody else has hold of an array, which is not replaced then, or an array cannot be pinned or gathered.
    """

    def __init__(self, buffer: Any, device: torch.device) -> None:
        """Let the buffer have arrays that the device can read."""
        own = [vars(buffer), *(x for x in list_fields(buffer) if isinstance(x, dict))]
        fields = {id(x) for x in pytree.tree_leaves(list_fields(buffer))}
        places = [(x, key) for x in own for key, y in x.items() if id(y) in fields]
        fits = all(can_pin(x[key]) and (getrefcount(x[key]) < 3 or is_pinned(x[key])) for x, key in places)
        size = sum(1 << x[key].nbytes.bit_length() for x, key in places)  # of blocks of pinned memory
        self.views: Any = None
        with suppress(RuntimeError, TypeError, ValueError):  # there is no more memory to be pinned, or no such tensor
            if fits and size <= PINNED_BYTES and buffer.timeouts.dtype != bool:
                for x, key in places:
                    x[key] = pin_array(x[key], device)
                self.views = pytree.tree_map(lambda x: view_array(x, device), list_fields(buffer))
        self.arrays = [ref(x) for x in pytree.tree_leaves(list_fields(buffer))]

    def __reduce__(self) -> Any:
        """A copy of a model has arrays of its own."""
        return type(None), ()

    def is_of(self, buffer: Any) -> bool:
        """Whether the buffer has these arrays."""
        return all(known() is x for known, x in zip(self.arrays, pytree.tree_leaves(list_fields(buffer)), strict=True))

    def unpack(self, rows: Tensor) -> ReplayBufferSamples:
        """A minibatch, by rows as of `draw_indices`."""
        return gather_samples(self.views, rows, lambda x, index: x.index_select(0, index))


def draw_minibatches(algorithm: Any, count: int, size: int) -> Iterator[tuple[Form | Stored | None, list[Any]]]:
    """Draw minibatches as the stock algorithm does, several at a time if they are packed; with their form, if so.

    Those of a buffer or normaliser with methods of its own never are, but can be the inputs of a graph, too.
    """
    buffer, env = algorithm.replay_buffer, algorithm._vec_normalize_env
    stored = find_stored(algorithm)
    if stored is not None:
        rows = torch.from_numpy(draw_indices(buffer, count, size))
        yield stored, list(rows.to(algorithm.device, non_blocking=True))
    elif find_own([buffer, env], list_stock(type(buffer), "sample", PACKAGES), PACKAGES):
        for _ in range(count):
            samples = buffer.sample(size, env=env)  # which may have more than what the stock algorithms read
            yield None, [samples if all(map(is_input, pytree.tree_leaves(samples))) else keep_fields(samples)]
    else:
        for samples, part in draw_samples(algorithm, count, size):
            yield pack_minibatches(samples, part, algorithm.device)


def draw_samples(algorithm: Any, count: int, size: int) -> Iterator[tuple[Any, int]]:
    """Draw minibatches as the stock algorithm does: arrays of those of several, one behind the other, and how many."""
    buffer, env = algorithm.replay_buffer, algorithm._vec_normalize_env
    most = count if count == 1 else max(1, COPIED_BYTES // (8 * size * flatdim(buffer.observation_space)))
    for first in range(0, count, most):
        part = min(count - first, most)
        if is_plain(buffer, env):
            rows = draw_indices(buffer, part, size).swapaxes(0, 1)
            yield gather_samples(list_fields(buffer), rows.reshape(len(rows), -1), lambda x, i: x.take(i, axis=0)), part
        else:
            device, buffer.device = buffer.device, torch.device("cpu")
            try:
                batches = [keep_fields(buffer.sample(size, env=env)) for _ in range(part)]
            finally:
                buffer.device = device
            is_even = len({len(x.rewards) for x in batches}) == 1
            for some in [batches] if is_even else [[x] for x in batches]:  # what is no tensor is the first one's
                joined = pytree.tree_map(lambda *x: torch.cat(x).numpy() if isinstance(x[0], Tensor) else x[0], *some)
                yield joined, len(some)


def keep_fields(samples: Any) -> ReplayBufferSamples:
    """Of a minibatch in any form, what the stock algorithms read."""
    return ReplayBufferSamples._make(getattr(samples, name, None) for name in ReplayBufferSamples._fields)


def is_plain(buffer: Any, env: Any) -> bool:
    """Whether minibatches are rows of a buffer's arrays, as `gather_samples` gathers them."""
    is_stock = type(buffer) in (ReplayBuffer, DictReplayBuffer) and not any(map(callable, vars(buffer).values()))
    return is_stock and env is None


def list_fields(buffer: Any) -> list[Any]:
    """Arrays of a plain buffer, [buffer_size, num_envs, ...]: those of `gather_samples`."""
    following = buffer.observations if buffer.optimize_memory_usage else buffer.next_observations
    return [buffer.observations, buffer.actions, following, buffer.dones, buffer.timeouts, buffer.rewards]


def draw_indices(buffer: Any, count: int, size: int) -> np.ndarray:
    """Which transitions some minibatches of a plain buffer have, by its draws.

    Returns:
        Rows of arrays over all steps and environments: of transitions, [count, 1, size]; in a buffer that has the
        observations once, of those that follow, too, [count, 2, size].
    """
    draw, last, is_short = np.random.randint, buffer.buffer_size, buffer.optimize_memory_usage
    rows = np.empty((count, 1 + is_short, size), np.int64)
    for x in rows:
        if buffer.full and is_short:
            steps = (draw(1, last, size=size) + buffer.pos) % last
        else:
            steps = draw(0, last if buffer.full else buffer.pos, size=size)
        envs = draw(0, high=buffer.n_envs, size=(size,)) if buffer.n_envs > 1 else 0  # of one, NumPy draws nothing
        x[0] = steps * buffer.n_envs + envs if buffer.n_envs > 1 else steps
        if is_short:
            x[1] = (steps + 1) % last * buffer.n_envs + envs
    return rows


def gather_samples(fields: list[Any], rows: Any, take: Callable[[Any, Any], Any]) -> ReplayBufferSamples:
    """Samples of `list_fields`, as the stock buffers make them: arrays or tensors, by a function that takes rows."""

    def pick(x: Any, index: int) -> Any:
        if isinstance(x, dict):
            return {key: pick(y, index) for key, y in x.items()}
        return take(x.reshape(-1, *(x.shape[2:] or (1,))), rows[index])

    observations, actions, following, dones, timeouts, rewards = map(pick, fields, (0, 0, -1, 0, 0, 0))
    return ReplayBufferSamples(observations, actions, following, dones * (1 - timeouts), rewards, None)


def can_pin(array: np.ndarray) -> bool:
    """Whether an array may be replaced by a pinned one, and graphs gather its rows; one that is pinned is not replaced.

    Nobody else holds its memory, which is dense, and PyTorch gathers such numbers.
    """
    is_free = type(array) is np.ndarray and (array.base is None or is_pinned(array))
    return is_free and array.flags.c_contiguous and (array.dtype.kind != "u" or array.itemsize == 1)


def is_pinned(array: Any) -> bool:
    """Whether an array is that of a tensor in pinned memory."""
    return isinstance(array.base, Tensor) and array.base.is_pinned()


def pin_array(array: np.ndarray, device: torch.device) -> np.ndarray:
    """An array in memory that a device can read: on a CPU, itself."""
    if device.type == "cpu" or is_pinned(array):
        return array
    with torch.cuda.device(device):
        return torch.from_numpy(array).pin_memory().numpy()


def view_array(array: np.ndarray, device: torch.device) -> Tensor:
    """An array in pinned memory as a tensor of a device."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    about = {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 3}
    view = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=about, owner=array), device=device)
    if view.data_ptr() != array.ctypes.data:
        raise RuntimeError("the array is that of another device")
    return view


def find_stored(algorithm: Any) -> Stored | None:
    """The arrays of an algorithm's buffer as a graph reads them; None if minibatches are drawn on the host."""
    buffer = algorithm.replay_buffer
    if not is_plain(buffer, algorithm._vec_normalize_env):
        return None
    if algorithm._stored is None or not algorithm._stored.is_of(buffer):
        algorithm._stored = Stored(buffer, algorithm.device)
    return None if algorithm._stored.views is None else algorithm._stored
