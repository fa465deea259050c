"""Stable-Baselines3: minibatches of a replay buffer, drawn by its own random numbers, copied to the device at once."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import flatdim
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.overrides import find_own, list_stock
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_core.capture import is_input

# isort: split
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples

COPIED_BYTES = 2**26  # so many are drawn before a gradient step is made with the first of them
ALIGNMENT = 16  # bytes: where a tensor may begin


class Form(NamedTuple):
    """How the tensors of a minibatch lie in one row of bytes."""

    structure: Any
    leaves: tuple[Any, ...]
    """Dtype, shape, first byte and the one behind the last, or something that is no tensor."""


def unpack_minibatch(row: Tensor, form: Form) -> Any:
    """A minibatch as the buffer has drawn it: views of a row of bytes."""

    def view(dtype: torch.dtype, shape: tuple[int, ...], start: int, end: int) -> Tensor:
        return row[start:end].view(dtype).view(shape)

    return pytree.tree_unflatten([view(*x) if isinstance(x, tuple) else x for x in form.leaves], form.structure)


def pack_minibatches(samples: Any, count: int, device: torch.device) -> tuple[Form, list[Tensor]]:
    """The form of some minibatches, arrays one behind the other, and their rows of bytes on a device, by one copy."""
    arrays, structure = pytree.tree_flatten(samples)
    leaves, end = [], 0
    for x in arrays:
        if isinstance(x, np.ndarray):
            start, end = end, end + x.nbytes // count
            leaves.append((find_dtype(x.dtype), (len(x) // count, *x.shape[1:]), start, end))
            end += -end % ALIGNMENT
        else:
            leaves.append(x)
    rows = torch.empty(count, end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    own = rows.numpy()
    for x, leaf in zip(arrays, leaves, strict=True):
        if isinstance(x, np.ndarray):
            own[:, leaf[2] : leaf[3]] = x.reshape(count, -1).view(np.uint8)
    return Form(structure, tuple(leaves)), list(rows.to(device, non_blocking=True))


@cache
def find_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """PyTorch's of NumPy's."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def draw_minibatches(algorithm: Any, count: int, size: int, packs: bool) -> Iterator[tuple[Form | None, list[Any]]]:
    """Draw minibatches as the stock algorithm does, several at a time if they are packed; with their form, if so.

    Args:
        algorithm: Whose replay buffer is drawn from.
        count: How many.
        size: Samples of each.
        packs: Whether minibatches are packed. Those of a buffer or normaliser with methods of its own never are, but
            can be the inputs of a graph, too.
    """
    buffer, env = algorithm.replay_buffer, algorithm._vec_normalize_env
    if not packs or find_own([buffer, env], list_stock(type(buffer), "sample", PACKAGES), PACKAGES):
        for _ in range(count):
            samples = buffer.sample(size, env=env)
            yield None, [pick_inputs(samples) if packs else samples]
        return
    for samples, part in draw_samples(algorithm, count, size):
        yield pack_minibatches(samples, part, algorithm.device)


def draw_samples(algorithm: Any, count: int, size: int) -> Iterator[tuple[Any, int]]:
    """Draw minibatches as the stock algorithm does: arrays of those of several, one behind the other, and how many."""
    buffer, env = algorithm.replay_buffer, algorithm._vec_normalize_env
    most = count if count == 1 else max(1, COPIED_BYTES // (8 * size * flatdim(buffer.observation_space)))
    for first in range(0, count, most):
        part = min(count - first, most)
        if is_plain(buffer, env):
            yield draw_rows(buffer, part, size), part
        else:
            batches = [keep_fields(draw_on_host(buffer, size, env)) for _ in range(part)]
            yield pytree.tree_map(join, *batches), part


def join(*parts: Any) -> Any:
    """An array of tensors, one behind the other; what is no tensor is the first one's."""
    return torch.cat(parts).numpy() if isinstance(parts[0], Tensor) else parts[0]


def pick_inputs(samples: Any) -> Any:
    """A minibatch as a graph can take it: of one that has more to it, what the stock algorithms read."""
    if all(map(is_input, pytree.tree_leaves(samples))):
        return samples
    return keep_fields(samples)


def keep_fields(samples: Any) -> ReplayBufferSamples:
    """Of a minibatch in any form, what the stock algorithms read."""
    return ReplayBufferSamples._make(getattr(samples, name, None) for name in ReplayBufferSamples._fields)


def draw_on_host(buffer: Any, size: int, env: Any) -> Any:
    """A minibatch of a replay buffer, in host memory."""
    device, buffer.device = buffer.device, torch.device("cpu")
    try:
        return buffer.sample(size, env=env)
    finally:
        buffer.device = device


def is_plain(buffer: Any, env: Any) -> bool:
    """Whether `draw_rows` draws what the buffer does."""
    is_stock = type(buffer) is ReplayBuffer and not any(map(callable, vars(buffer).values()))
    return is_stock and env is None and not buffer.optimize_memory_usage


def draw_rows(buffer: Any, count: int, size: int) -> ReplayBufferSamples:
    """Arrays of some minibatches of a plain buffer, by its draws, one behind the other; samples alone are copied."""
    upper, draw = buffer.buffer_size if buffer.full else buffer.pos, np.random.randint
    pairs = [(draw(0, upper, size=size), draw(0, high=buffer.n_envs, size=(size,))) for _ in range(count)]
    rows = np.concatenate([steps * buffer.n_envs + envs for steps, envs in pairs])
    flat = [x.reshape(-1, *x.shape[2:]) for x in (buffer.observations, buffer.actions, buffer.next_observations)]
    flat += [x.reshape(-1, 1) for x in (buffer.dones, buffer.timeouts, buffer.rewards)]
    observations, actions, following, dones, timeouts, rewards = (x.take(rows, axis=0) for x in flat)
    return ReplayBufferSamples._make([observations, actions, following, dones * (1 - timeouts), rewards, None])
