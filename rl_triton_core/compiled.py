"""Whole updates of PPO and A2C in compiled code on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core._internal.arguments.validation import check_choice, check_count, check_number
from rl_triton_core._internal.capture.host import list_parts
from rl_triton_core._internal.capture.key import list_hooks, name_context
from rl_triton_core._internal.loss.arguments import CLIP_MODES
from rl_triton_core._internal.mlp import serial
from rl_triton_core._internal.mlp.compile import Loss, compile_epoch, find_functions
from rl_triton_core._internal.mlp.networks import (
    Layer,
    Unsupported,
    check_parameters,
    count_spare_rows,
    list_layers,
    make_layer_table,
)
from rl_triton_core._internal.mlp.optimizers import Learning, ParameterTables, describe_learning, list_kept

__all__ = ["HEADS", "STATISTICS", "CompiledUpdate", "Rollout", "compile_update"]

HEADS = ("categorical", "gaussian", "bernoulli")
"""Distributions of actions."""
STATISTICS = (
    *("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl", "loss", "kl", "grad_norm", "has_stopped"),
)
"""Columns of what `CompiledUpdate.run` returns: `kl` is that of old outputs, `grad_norm` the norm before a clip."""
GRAD_CLIP_MODES = {"global_norm": serial.GLOBAL_NORM, "norm": serial.EACH_NORM, "value": serial.EACH_VALUE}
"""What of the gradients is clipped: the norm of all of them, that of each, or their elements."""


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
    old_outputs: Tensor | None = None
    """Of the actor before the update, for the exact KL divergence from it: logits, −∞ where actions are not allowed, or
    means and log-deviations side by side. [num_samples, num_outputs]"""


class CompiledUpdate:
    """An update of an actor and a critic on the CPU: all minibatches of an epoch in one compiled call.

    A minibatch is gathered, goes through both networks, the loss of `rl_triton_core.losses`, and back; gradients are
    clipped by their norm, and the optimizer makes its step. Parameters and the optimizer's state are those of PyTorch,
    in place, equal to PyTorch's own update up to rounding in float32. The interpreter's lock is released meanwhile.

        update = CompiledUpdate(actor, critic, optimizer, head="categorical")
        if not update.find_obstacle():
            update.run(rollout, (torch.randperm(2048) for _ in range(10)), 64, clip=0.2, max_grad_norm=0.5)

    With a clip range, the loss is PPO's, without one A2C's: −mean(A·log π) + value_coef·mean((V − R)²) −
    entropy_coef·mean(H). With old outputs, kl_coef·mean(KL(π_old ‖ π)) is added.

    Args:
        actor: `nn.Linear` and the activations Tanh, ReLU, LeakyReLU, ELU, SiLU, GELU in `nn.Sequential`s. It returns
            logits or means.
        critic: The same for one value. It may share its first modules with the actor.
        optimizer: Adam, AdamW, RMSprop or SGD, with any groups, or Stable-Baselines3's RMSpropTFLike.
        head: The distribution of actions: ``"categorical"``, ``"gaussian"`` or ``"bernoulli"``.
        nvec: The numbers of actions of categorical distributions side by side; None for a single one.
        log_std: Logarithms of a Gaussian's standard deviations, [num_actions] or [1, num_actions]; None if the actor
            returns them behind the means.
        log_std_bound: They are at most this, and at least −this.
        value_clip_mode: What a clip range of values bounds, as in `ppo_loss`: ``"sb3"``, ``"cleanrl"`` or ``"rllib"``.
        has_kl: Whether rollouts have old outputs.

    Raises:
        TypeError: `nvec` has something else than whole numbers.
        ValueError: There is no such head or mode, it has a needless `log_std`, or `nvec` has numbers below 1.
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
        log_std_bound: float = math.inf,
        value_clip_mode: str = "sb3",
        has_kl: bool = False,
    ) -> None:
        """Nothing is compiled until `compile`, or the first update."""
        check_choice("head", head, HEADS)
        check_choice("value_clip_mode", value_clip_mode, CLIP_MODES)
        if log_std is not None and head != "gaussian":
            raise ValueError(f"log_std: got {type(log_std).__name__}, expected None with head={head!r}")
        self.actor, self.critic, self.optimizer, self.head = actor, critic, optimizer, head
        self.nvec = None if nvec is None else [check_count("nvec", x) for x in nvec]
        self.log_std, self.log_std_bound = log_std, log_std_bound
        self.loss = Loss(head, value_clip_mode, has_kl, head == "gaussian" and log_std is None)

    def compile(self) -> float:
        """Compile, or load what was compiled before; return the seconds that it took."""
        return compile_loss(self.loss)

    def find_obstacle(self) -> str:
        """Why the update cannot be compiled as things are; empty if it can."""
        try:
            KNOWN_TABLES[self.optimizer] = self._find_tables()
        except Unsupported as reason:
            return str(reason)
        return ""

    def _find_tables(self) -> Tables:
        """Tables of networks and optimizer as they are: those of the last update, where nothing has changed."""
        facts = collect_facts(self)
        known = KNOWN_TABLES.pop(self.optimizer, None)  # no other thread takes them
        return known if known is not None and known.facts.key == facts.key else Tables(self, facts)

    def run(
        self,
        rollout: Rollout,
        orders: Iterable[Tensor | Sequence[Tensor]],
        minibatch_size: int = 0,
        *,
        clip: float | None = None,
        value_clip: float | None = None,
        value_coef: float = 0.5,
        entropy_coef: float = 0.0,
        kl_coef: float = 0.0,
        normalize_advantages: bool = False,
        max_grad_norm: float | None = None,
        grad_clip_mode: str = "global_norm",
        replace_nan: bool = False,
        max_kl: float | None = None,
    ) -> list[Tensor]:
        """Update both networks.

        Networks, optimizer and rollout are looked at again when an epoch begins, after its order is drawn: what a
        generator changes counts, or is refused. Whatever ends the update, it leaves the state after the last epoch.

        Args:
            rollout: The samples.
            orders: Of each epoch the order of the samples, int64, or its minibatches; drawn when the epoch begins.
            minibatch_size: Samples of a minibatch of an order; the last one of an epoch may have fewer.
            clip: PPO's clip range; None for A2C's loss.
            value_clip: How far values may move from the old ones, or another bound (`value_clip_mode`), or None.
            value_coef: Factor of the value loss.
            entropy_coef: Factor of the entropy.
            kl_coef: Factor of the divergence from the old outputs.
            normalize_advantages: Whether those of a minibatch of more than one are standardised.
            max_grad_norm: The largest norm of the gradients, or what else is bounded; None for no bound.
            grad_clip_mode: What is bounded: one of `GRAD_CLIP_MODES`.
            replace_nan: Whether gradients that are not finite are replaced as by `torch.nan_to_num`, and norms of such
                by 0 and 1e9, as in RLlib.
            max_kl: The update stops before the step of a minibatch whose approximate KL divergence is larger or, unless
                NaN is replaced, NaN; None for no bound.

        Returns:
            Of each epoch the `STATISTICS` of its minibatches, float64 [num_minibatches, 9], up to that at which the
            update stopped.

        Raises:
            ValueError: The update cannot be compiled (`find_obstacle`), or the rollout does not fit the networks.
        """
        check_choice("grad_clip_mode", grad_clip_mode, tuple(GRAD_CLIP_MODES))
        factors = {"value_coef": value_coef, "entropy_coef": entropy_coef, "kl_coef": kl_coef}
        limits = {"clip": clip, "value_clip": value_clip, "max_grad_norm": max_grad_norm, "max_kl": max_kl}
        for name, x in (factors | {name: x for name, x in limits.items() if x is not None}).items():
            check_number(name, x, -math.inf, math.inf, or_infinity=True)
        if kl_coef and not self.loss.has_old:
            raise ValueError(f"kl_coef: got {kl_coef!r}, expected 0 without has_kl")
        self.compile()
        epoch, has_old_values = compile_epoch(), value_clip is not None and self.loss.value_clip_mode != "rllib"
        numbers = clip, value_coef, value_clip, entropy_coef, None, kl_coef, self.log_std_bound, None
        bounds = max_grad_norm, GRAD_CLIP_MODES[grad_clip_mode], replace_nan, max_kl, normalize_advantages, clip is None
        options, epochs = np.array([math.inf if x is None else float(x) for x in bounds]), []
        for drawn in orders:
            order = drawn if isinstance(drawn, Tensor) else [*drawn]  # from here on, nothing of the caller's runs
            try:
                tables = self._find_tables()
                addresses, count, settings = tables.list_addresses(self.loss)
            except Unsupported as reason:
                raise ValueError(f"this update is not compiled: {reason}") from None
            arrays = tables.view_rollout(rollout, clip is not None, has_old_values, self.loss.has_old)
            indices, ends = check_order(order, minibatch_size, len(arrays[0]))
            tables.numbers[:] = [math.inf if x is None else x for x in numbers]
            results, totals = np.full((len(ends), len(STATISTICS)), math.nan), np.empty(7)
            try:
                epoch(addresses, count, settings, options.ctypes.data, arrays, indices, ends, totals, results)
            finally:  # where an interrupt is raised once the call returns
                steps = int((results[:, -1] == 0).sum())
                if steps:
                    tables.own.leave_steps(steps)
            if not tables.own.has_new_states:
                KNOWN_TABLES[self.optimizer] = tables
            epochs.append(torch.from_numpy(results[~np.isnan(results[:, -1])]))
            if steps < len(epochs[-1]):
                break
        return epochs


def compile_update(head: str) -> float:
    """As `CompiledUpdate.compile`, with one of the `HEADS`, before there is an update."""
    return compile_loss(Loss(check_choice("head", head, HEADS)))


def compile_loss(loss: Loss) -> float:
    """Compile what updates by a loss call; return the seconds that it took."""
    start = time.perf_counter()
    find_functions(loss)
    compile_epoch()
    return time.perf_counter() - start


KNOWN_TABLES: WeakKeyDictionary[Optimizer, Tables] = WeakKeyDictionary()
"""Those of the last update of each optimizer, while no update uses them."""
TENSOR = attrgetter("shape", "dtype", "requires_grad")


class Facts(NamedTuple):
    """Networks and an optimizer as they are."""

    layers: list[Layer]
    ends: list[int]
    parameters: list[Any]
    learning: list[Learning]
    kept: list[list[Any]]
    key: tuple[Any, ...]
    """Equal where tables would be: of all tensors which they are, where they lie, and what they are like."""


def collect_facts(update: CompiledUpdate) -> Facts:
    """Read what tables are made of, each thing once; raise `Unsupported` if it cannot be compiled."""
    layers, ends = list_layers(update.actor, update.critic)
    weights = [x for layer in layers for x in (layer.linear.weight, layer.linear.bias)]
    parameters = [x for x in (*weights, update.log_std) if x is not None]
    learning = describe_learning(update.optimizer, parameters)
    kept = list_kept(update.optimizer, parameters, learning)
    check_surroundings(update, parameters)
    tensors = [x for x in chain(parameters, *kept) if isinstance(x, Tensor)]
    try:
        described = [f(x) for f in (id, Tensor.data_ptr, Tensor.stride, TENSOR) for x in tensors]
    except RuntimeError as error:
        raise Unsupported(f"a parameter or a state has no memory of its own: {error}") from None
    key = update.loss, update.nvec, update.log_std is None, layers, ends, learning, described
    return Facts(layers, ends, parameters, learning, kept, key)


class Tables:
    """What an update's compiled code reads, as facts say; raises `Unsupported` if it cannot."""

    def __init__(self, update: CompiledUpdate, facts: Facts) -> None:
        check_parameters(facts.layers, facts.parameters)
        self.facts, self.layers, self.ends, self.is_shared = facts, facts.layers, facts.ends, update.log_std is not None
        self.own = ParameterTables(update.optimizer, facts.parameters, facts.learning, facts.kept)
        outputs = [len(self.layers[end].linear.weight) for end in self.ends]
        per_action = 2 if update.loss.is_wide else 1
        self.nvec = [outputs[0] // per_action] if update.nvec is None else update.nvec
        self.num_features, self.num_outputs = self.layers[0].linear.weight.shape[1], outputs[0]
        self.num_actions = len(self.nvec) if update.loss.head == "categorical" else sum(self.nvec)
        self.num_old_outputs = sum(self.nvec) * (2 if update.loss.head == "gaussian" else 1)
        self.numbers = np.empty(serial.NUM_NUMBERS, np.float32)
        self.addresses: tuple[tuple[int, ...], int, int] | None = None
        if per_action * sum(self.nvec) != outputs[0] or outputs[1] != 1:
            raise Unsupported(f"the networks have {outputs} outputs, not {[per_action * sum(self.nvec), 1]}")
        if any(x.source < 0 and x.linear.weight.shape[1] != self.num_features for x in self.layers):
            raise Unsupported("the networks take other features")
        if update.log_std is not None and update.log_std.numel() != outputs[0]:
            raise Unsupported(f"log_std has shape {tuple(update.log_std.shape)}, not one number per action")

    def list_addresses(self, loss: Loss) -> tuple[tuple[int, ...], int, int]:
        """The addresses of all tables, the number of parameters, and the address of their settings, for an epoch."""
        self.addresses = self.addresses or self.make_addresses(loss)
        self.own.renew_gradients()
        return self.addresses

    def make_addresses(self, loss: Loss) -> tuple[tuple[int, ...], int, int]:
        """Make the tables that have addresses."""
        rows = self.num_features + 3 * sum(len(x.linear.weight) for x in self.layers)
        rows += serial.FIRST_SUM + serial.NUM_SUMS * len(self.nvec) + self.num_actions + self.num_old_outputs
        spare = count_spare_rows(self.layers)
        self.scratch = torch.zeros(rows + spare, serial.TILE, dtype=torch.float32, device="cpu")
        widths, functions = np.array(self.nvec), find_functions(loss)
        start = self.scratch.data_ptr()
        table, kinks, free = make_layer_table(self.layers, self.facts.parameters, start, self.num_features)
        own, settings = self.own.make_tables()
        self.kept = functions, table, kinks, own, widths, settings
        shared = len(self.facts.parameters) - 1 if self.is_shared else -1
        places = functions.ctypes.data, table.ctypes.data, len(self.layers), kinks.ctypes.data, own.ctypes.data
        heads = widths.ctypes.data, len(self.nvec), start, start + free * serial.ROW, self.numbers.ctypes.data
        ends = *self.ends, shared, start + rows * serial.ROW
        return (*places, *heads, *ends), len(self.facts.parameters), settings.ctypes.data

    def view_rollout(
        self, rollout: Rollout, has_clip: bool, has_old_values: bool, has_kl: bool
    ) -> tuple[np.ndarray, ...]:
        """The samples as arrays, if their shapes are those that are expected."""
        features, actions, masks = rollout.features, rollout.actions, rollout.action_masks
        count = len(features)
        given = {
            "features": (features, (count, self.num_features)),
            "actions": (actions, (count, self.num_actions)),
            "old_log_probs": (rollout.old_log_probs if has_clip else None, (count,)),
            "advantages": (rollout.advantages, (count,)),
            "returns": (rollout.returns, (count,)),
            "old_values": (rollout.old_values if has_old_values else None, (count,)),
            "old_outputs": (rollout.old_outputs if has_kl else None, (count, self.num_old_outputs)),
            "action_masks": (masks, (count, self.num_outputs)),
        }
        wanted = {"old_log_probs": has_clip, "old_values": has_old_values, "old_outputs": has_kl, "action_masks": False}
        for name, (x, shape) in given.items():
            if x is None and wanted.get(name, True):
                raise ValueError(f"{name}: got None, expected a tensor, with this clip range and loss")
            if x is not None and x.shape != shape:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {shape}")
            if x is not None and (x.requires_grad or not x.is_cpu):
                raise ValueError(f"{name}: got {x.device} and requires_grad={x.requires_grad}, expected cpu and False")
        *arrays, allowed = [features.new_empty([0] * len(s)) if x is None else x for x, s in given.values()]
        views = [x.float() for x in arrays] + [allowed.bool()]
        return tuple([x.contiguous().detach().numpy() for x in views])  # tensors of their own keep the memory


def check_surroundings(update: CompiledUpdate, parameters: list[Tensor]) -> None:
    """Raise `Unsupported` if something listens to what happens in an update."""
    if any(True for _ in list_hooks(list_parts([update.actor, update.critic]), [update.optimizer], parameters)):
        raise Unsupported("a module, parameter or optimizer has hooks")
    context = "autocast is on" if torch.is_autocast_enabled("cpu") else name_context()
    if context:
        raise Unsupported(context)


def check_order(order: Tensor | Sequence[Tensor], size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of samples as an array, if all are there, and the ends of the minibatches."""
    is_order = isinstance(order, Tensor)
    if is_order and size < 1:
        raise ValueError(f"minibatch_size: got {size}, expected 1 or more")
    whole: Tensor = order if isinstance(order, Tensor) else torch.cat([*order])
    indices = whole.numpy().copy()  # whatever others write meanwhile
    if indices.dtype != np.int64 or indices.ndim != 1 or not (len(indices) or len(order)):
        raise ValueError(f"orders: got {whole.dtype} of shape {tuple(whole.shape)}, expected int64 numbers of samples")
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        raise ValueError(f"orders: got numbers from {indices.min()} to {indices.max()}, expected 0 to {count - 1}")
    sizes = [len(x) for x in order] if not is_order else [size] * -(-len(indices) // size)
    return indices, np.minimum(np.cumsum(sizes), len(indices))
