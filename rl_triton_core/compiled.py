"""Whole updates of PPO and A2C in compiled code on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core._internal.capture.key import list_hooks, list_parts, name_context
from rl_triton_core._internal.mlp import serial
from rl_triton_core._internal.mlp.compile import compile_epoch, find_functions
from rl_triton_core._internal.mlp.networks import Unsupported, list_layers, list_parameters, make_layer_table
from rl_triton_core._internal.mlp.optimizers import ParameterTables, find_groups

__all__ = ["HEADS", "STATISTICS", "CompiledUpdate", "Rollout", "compile_update"]

HEADS = ("categorical", "gaussian", "bernoulli")
"""Distributions of actions."""
STATISTICS = ("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl", "loss", "has_stopped")
"""Columns of what `CompiledUpdate.run` returns."""
NOTHING = np.empty(0, np.float32)


class Rollout(NamedTuple):
    """The samples of a rollout, in any order."""

    features: Tensor
    """What both networks take, float32 [num_samples, num_features]."""
    actions: Tensor
    """Of each categorical distribution the index of an action; else the numbers. [num_samples, num_actions]."""
    advantages: Tensor
    """[num_samples]"""
    returns: Tensor
    """[num_samples]"""
    old_log_probs: Tensor | None = None
    """[num_samples]; not needed without a clip range."""
    old_values: Tensor | None = None
    """[num_samples]; not needed without a clip range of values."""
    action_masks: Tensor | None = None
    """Which actions are allowed, bool [num_samples, outputs of the actor]."""


class CompiledUpdate:
    """An update of an actor and a critic on the CPU: all minibatches of an epoch in one compiled call.

    A minibatch is gathered, goes through both networks, the loss of `rl_triton_core.losses`, and back; gradients are
    clipped by their norm, and the optimizer makes its step. Parameters and the optimizer's state are those of PyTorch,
    in place, equal to PyTorch's own update up to rounding in float32. The interpreter's lock is released meanwhile.

        update = CompiledUpdate(actor, critic, optimizer, head="categorical")
        if not update.find_obstacle():
            update.run(rollout, (torch.randperm(2048) for _ in range(10)), 64, clip=0.2, max_grad_norm=0.5)

    With a clip range, the loss is PPO's, without one A2C's: −mean(A·log π) + value_coef·mean((V − R)²) −
    entropy_coef·mean(H).

    Args:
        actor: `nn.Linear` and the activations Tanh, ReLU, LeakyReLU, ELU, SiLU, GELU in `nn.Sequential`s. It returns
            logits or means.
        critic: The same for one value. It may share its first modules with the actor.
        optimizer: Adam, AdamW, RMSprop or SGD, with any groups, or Stable-Baselines3's RMSpropTFLike.
        head: The distribution of actions: ``"categorical"``, ``"gaussian"`` or ``"bernoulli"``.
        nvec: The numbers of actions of categorical distributions side by side; None for a single one.
        log_std: Logarithms of a Gaussian's standard deviations, [num_actions] or [1, num_actions].

    Raises:
        ValueError: There is no such head, or it has no or needless `log_std`.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        optimizer: Optimizer,
        *,
        head: str,
        nvec: Sequence[int] | None = None,
        log_std: nn.Parameter | None = None,
    ) -> None:
        """Nothing is compiled until `compile`, or the first update."""
        check_head(head)
        if (log_std is None) == (head == "gaussian"):
            expected = "a parameter" if head == "gaussian" else f"None with head={head!r}"
            raise ValueError(f"log_std: got {type(log_std).__name__}, expected {expected}")
        self.actor, self.critic, self.optimizer, self.head = actor, critic, optimizer, head
        self.nvec, self.log_std = nvec, log_std
        self._tables: Tables | None = None

    def compile(self) -> float:
        """Compile, or load what was compiled before; return the seconds that it took."""
        return compile_update(self.head)

    def find_obstacle(self) -> str:
        """Why the update cannot be compiled as things are; empty if it can."""
        try:
            Tables(self)
        except Unsupported as reason:
            return str(reason)
        return ""

    def prepare(self) -> Tables:
        """Inspect networks and optimizer for the next `run`, which inspects nothing then. Nothing may change between.

        Raises:
            ValueError: The update cannot be compiled (`find_obstacle`).
        """
        try:
            self._tables = Tables(self)
        except Unsupported as reason:
            raise ValueError(f"this update is not compiled: {reason}") from None
        return self._tables

    def run(
        self,
        rollout: Rollout,
        orders: Iterable[Tensor],
        minibatch_size: int,
        *,
        clip: float | None = None,
        value_clip: float | None = None,
        value_coef: float = 0.5,
        entropy_coef: float = 0.0,
        normalize_advantages: bool = False,
        max_grad_norm: float = math.inf,
        max_kl: float = math.inf,
    ) -> list[Tensor]:
        """Update both networks.

        Args:
            rollout: The samples.
            orders: Of each epoch the order of the samples, int64; drawn when the epoch begins.
            minibatch_size: Samples of a minibatch; the last one of an epoch may have fewer.
            clip: PPO's clip range; None for A2C's loss.
            value_clip: How far values may move away from the old ones, as in Stable-Baselines3; None for any distance.
            value_coef: Factor of the value loss.
            entropy_coef: Factor of the entropy.
            normalize_advantages: Whether those of a minibatch of more than one are standardised.
            max_grad_norm: The largest norm of the gradients.
            max_kl: The update stops before the step of a minibatch whose approximate KL divergence is larger or NaN.

        Returns:
            Of each epoch the `STATISTICS` of its minibatches, float64 [num_minibatches, 7], up to that at which the
            update stopped.

        Raises:
            ValueError: The update cannot be compiled (`find_obstacle`), or the rollout does not fit the networks.
        """
        tables, self._tables = self._tables or self.prepare(), None
        arrays = tables.view_rollout(rollout, clip is not None, value_clip is not None)
        numbers = clip, value_coef, value_clip, entropy_coef, None
        tables.numbers[:] = [math.inf if x is None else x for x in numbers]
        options = np.array([max_grad_norm, max_kl, normalize_advantages, clip is None], np.float64)
        addresses, epoch, totals, epochs = tables.list_addresses(self.head), compile_epoch(), np.empty(5), []
        for order in orders:
            indices = check_order(order, len(arrays[0]))
            results = np.empty((-(-len(indices) // minibatch_size), len(STATISTICS)))
            seen = epoch(*addresses, options.ctypes.data, arrays, indices, minibatch_size, totals, results)
            epochs.append(torch.from_numpy(results[:seen]))
            num_steps = seen - int(results[seen - 1, -1])
            if num_steps:
                tables.own.leave_gradients()
                tables.own.count_steps(num_steps)
            if results[seen - 1, -1]:
                break
        return epochs


def check_head(head: str) -> None:
    """Raise ValueError unless there is such a distribution."""
    if head not in HEADS:
        raise ValueError(f"head: got {head!r}, expected one of {', '.join(HEADS)}")


def compile_update(head: str) -> float:
    """As `CompiledUpdate.compile`, with one of the `HEADS`, before there is an update."""
    start = time.perf_counter()
    check_head(head)
    find_functions(head)
    compile_epoch()
    return time.perf_counter() - start


class Tables:
    """What an update's compiled code reads as networks and optimizer are; raises `Unsupported` if it cannot."""

    def __init__(self, update: CompiledUpdate) -> None:
        layers, ends = list_layers(update.actor, update.critic)
        self.parameters = list_parameters(layers, update.log_std)
        self.own = ParameterTables(update.optimizer, self.parameters, find_groups(update.optimizer, self.parameters))
        check_surroundings(update, self.parameters)
        outputs = [layers[end].linear.out_features for end in ends]
        self.nvec = [outputs[0]] if update.nvec is None else list(update.nvec)
        self.num_features, self.num_outputs = layers[0].linear.in_features, outputs[0]
        self.num_actions = len(self.nvec) if update.head == "categorical" else outputs[0]
        self.layers, self.ends, self.is_shared = layers, ends, update.log_std is not None
        self.numbers = np.empty(5, np.float32)
        if sum(self.nvec) != outputs[0] or outputs[1] != 1:
            raise Unsupported(f"the networks have {outputs} outputs, not {[sum(self.nvec), 1]}")
        if any(x.source < 0 and x.linear.in_features != self.num_features for x in layers):
            raise Unsupported("the networks take other features")
        if update.log_std is not None and update.log_std.numel() != outputs[0]:
            raise Unsupported(f"log_std has shape {tuple(update.log_std.shape)}, not one number per action")

    def list_addresses(self, head: str) -> tuple[tuple[int, ...], int, int]:
        """The addresses of all tables, the number of parameters, and the address of their settings."""
        rows = self.num_features + 3 * sum(x.linear.out_features for x in self.layers)
        rows += serial.FIRST_SUM + 4 * len(self.nvec) + self.num_actions
        self.scratch, widths, functions = torch.empty(rows, serial.TILE), np.array(self.nvec), find_functions(head)
        start = self.scratch.data_ptr()
        table, kinks, free = make_layer_table(self.layers, self.parameters, start, self.num_features)
        own, settings = self.own.make_tables()
        self.kept = functions, table, kinks, own, widths, settings
        shared = len(self.parameters) - 1 if self.is_shared else -1
        places = functions.ctypes.data, table.ctypes.data, len(self.layers), kinks.ctypes.data, own.ctypes.data
        heads = widths.ctypes.data, len(self.nvec), start, start + free * serial.ROW, self.numbers.ctypes.data
        return (*places, *heads, *self.ends, shared), len(self.parameters), settings.ctypes.data

    def view_rollout(self, rollout: Rollout, has_clip: bool, has_value_clip: bool) -> tuple[np.ndarray, ...]:
        """The samples as arrays, if their shapes are those that are expected."""
        features, actions, masks = rollout.features, rollout.actions, rollout.action_masks
        count = len(features)
        given = {
            "features": (features, (count, self.num_features)),
            "actions": (actions, (count, self.num_actions)),
            "old_log_probs": (rollout.old_log_probs if has_clip else None, (count,)),
            "advantages": (rollout.advantages, (count,)),
            "returns": (rollout.returns, (count,)),
            "old_values": (rollout.old_values if has_value_clip else None, (count,)),
            "action_masks": (masks, (count, self.num_outputs)),
        }
        for name, (x, shape) in given.items():
            if x is not None and x.shape != shape:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {shape}")
        missing = [name for name, wanted in (("old_log_probs", has_clip), ("old_values", has_value_clip)) if wanted]
        for name in missing:
            if getattr(rollout, name) is None:
                raise ValueError(f"{name}: got None, expected a tensor where there is a clip range")
        arrays = [NOTHING if x is None else x.float().contiguous().numpy() for x, _ in [*given.values()][:-1]]
        allowed = np.empty((0, 0), np.bool_) if masks is None else masks.bool().contiguous().numpy()
        return *arrays, allowed


def check_surroundings(update: CompiledUpdate, parameters: list[Tensor]) -> None:
    """Raise `Unsupported` if something listens to what happens in an update."""
    if any(True for _ in list_hooks(list_parts([update.actor, update.critic]), [update.optimizer], parameters)):
        raise Unsupported("a module, parameter or optimizer has hooks")
    context = "autocast is on" if torch.is_autocast_enabled("cpu") else name_context()
    if context:
        raise Unsupported(context)


def check_order(order: Tensor, count: int) -> np.ndarray:
    """The numbers of samples as an array, if all are there."""
    indices = order.contiguous().numpy()
    if indices.dtype != np.int64 or indices.ndim != 1 or not len(indices):
        raise ValueError(f"orders: got {order.dtype} of shape {tuple(order.shape)}, expected int64 numbers of samples")
    if indices.min() < 0 or indices.max() >= count:
        raise ValueError(f"orders: got numbers from {indices.min()} to {indices.max()}, expected 0 to {count - 1}")
    return indices
