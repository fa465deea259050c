"""Whole updates of PPO and A2C, and gradient steps of DQN, QR-DQN, SAC, TQC and TD3, in compiled code on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core._internal.arguments.validation import check_choice, check_count, check_number
from rl_triton_core._internal.capture.key import name_context
from rl_triton_core._internal.launch.threads import run_chunks
from rl_triton_core._internal.loss.arguments import CLIP_MODES
from rl_triton_core._internal.mlp import groups, serial
from rl_triton_core._internal.mlp import serial_values as values
from rl_triton_core._internal.mlp.compile import Loss, compile_entry, find_functions
from rl_triton_core._internal.mlp.networks import Unsupported

__all__ = [
    "HEADS",
    "STATISTICS",
    "VALUE_STATISTICS",
    "CompiledNetwork",
    "CompiledUpdate",
    "CompiledValueUpdate",
    "Rollout",
    "Transitions",
    "compile_update",
    "draw_actions",
]

HEADS = ("categorical", "gaussian", "bernoulli")
"""Distributions of actions."""
STATISTICS = (
    *("policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl", "loss", "kl", "grad_norm", "has_stopped"),
)
"""Columns of what `CompiledUpdate.run` returns: `kl` is that of old outputs, `grad_norm` the norm before a clip."""
VALUE_STATISTICS = ("critic_loss", "actor_loss", "entropy_coef", "entropy_coef_loss", "has_stopped")
"""Columns of what `CompiledValueUpdate.run` returns; NaN where a step has none."""
SHARED_PRODUCTS = 2**24
"""Of the critics and a minibatch: from so many on, a gradient step takes milliseconds, and two threads share it."""
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


class Transitions(NamedTuple):
    """The samples of some minibatches, one minibatch after the other."""

    observations: Tensor | np.ndarray
    """What the networks take, float32 [num_samples, num_features]."""
    actions: Tensor | np.ndarray
    """The index of each action, [num_samples, 1], or numbers, which critics take behind the features."""
    next_observations: Tensor | np.ndarray
    """[num_samples, num_features]"""
    rewards: Tensor | np.ndarray
    """[num_samples]"""
    discounts: Tensor | np.ndarray
    """Of the next values: γ, or 0 where an episode has ended. [num_samples]"""
    noise: Tensor | None = None
    """Standard normal, from which a Gaussian's actions at observations are made. [num_samples, num_actions]"""
    next_noise: Tensor | None = None
    """The same at next observations; of other actors what is added to actions there."""


class Compiled:
    """Networks in compiled code, whose tables are kept as long as nothing changes of what they are made from."""

    loss: Any = None

    def __init__(self, tables: Any, parts: dict[int, tuple[Any, ...]], function: Any, described: Any = None) -> None:
        """Tables are made of this, of facts, which `collect_facts` finds of each group's part, and of optimizers.

        They are kept by the optimizer of the first group, as long as what they depend on is described as before.
        """
        self._make_tables, self._parts, self._function, self._described = tables, parts, function, described

    @property
    def _shelf(self) -> Any:
        optimizer = self._parts[0][1]
        return optimizer if isinstance(optimizer, Optimizer) else self

    def compile(self) -> float:
        """Compile, or load what was compiled before; return the seconds that it took."""
        return compile_loss(self.loss, self._function)

    def find_obstacle(self) -> str:
        """Why it cannot be compiled as things are; empty if it can."""
        try:
            KNOWN_TABLES[self._shelf] = self._find_tables()
        except Unsupported as reason:
            return str(reason)
        return ""

    def _find_tables(self) -> Any:
        """Tables of networks and optimizers as they are: those of the last time, where nothing has changed."""
        context = "autocast is on" if torch.is_autocast_enabled("cpu") else name_context()
        if context:
            raise Unsupported(context)
        known = KNOWN_TABLES.pop(self._shelf, None)  # no other thread takes them
        is_own = known is not None and known.owner() is self
        if is_own and known.snapshot is not None and known.snapshot.holds():
            return known
        facts = {group: groups.collect_facts(*part) for group, part in self._parts.items()}
        key = self._described, [(group, own.key) for group, own in facts.items()]
        if known is None or known.key != key:
            optimizers = {group: optimizer for group, (_, optimizer, *_) in self._parts.items()}
            known = self._make_tables(self, facts, optimizers)
        known.key, known.owner = key, ref(self)
        known.snapshot = None  # not for one call
        if is_own:
            known.snapshot = groups.make_snapshot(self._parts.values(), facts.values())
        return known

    def _take_tables(self) -> tuple[Any, tuple[int, ...]]:
        """The same with their addresses, as an epoch begins; raise ValueError if there are none."""
        try:
            tables = self._find_tables()
            addresses = tables.addresses
        except Unsupported as reason:
            raise ValueError(f"this {type(self).__name__} is not compiled: {reason}") from None
        for own in tables.learning.values():
            own.renew()
        return tables, addresses

    def _keep_tables(self, tables: Any) -> None:
        """Use them again the next time, unless optimizers have states since."""
        if not any(own.has_new_states for own in tables.learning.values()):
            KNOWN_TABLES[self._shelf] = tables


class CompiledUpdate(Compiled):
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
        """Check what was chosen."""
        check_choice("head", head, HEADS)
        check_choice("value_clip_mode", value_clip_mode, CLIP_MODES)
        if log_std is not None and head != "gaussian":
            raise ValueError(f"log_std: got {type(log_std).__name__}, expected None with head={head!r}")
        self.nvec = None if nvec is None else [check_count("nvec", x) for x in nvec]
        self.log_std, self.log_std_bound = log_std, log_std_bound
        self.loss = Loss(head, value_clip_mode, has_kl, head == "gaussian" and log_std is None)
        parts = {0: ([actor, critic], optimizer, [] if log_std is None else [log_std])}
        super().__init__(groups.RolloutTables, parts, serial.run_epoch, (self.loss, self.nvec, log_std is None))

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
        wanted = {"old_log_probs": clip is not None, "action_masks": rollout.action_masks is not None}
        wanted["old_values"] = value_clip is not None and self.loss.value_clip_mode != "rllib"
        wanted["old_outputs"], epoch = self.loss.has_old, compile_entry(serial.run_epoch)
        numbers = clip, value_coef, value_clip, entropy_coef, None, kl_coef, self.log_std_bound, None
        bounds = max_grad_norm, GRAD_CLIP_MODES[grad_clip_mode], replace_nan, max_kl, normalize_advantages, clip is None
        options, epochs = np.array([math.inf if x is None else float(x) for x in bounds]), []
        for drawn in orders:
            order = drawn if isinstance(drawn, Tensor) else [*drawn]  # from here on, nothing of the caller's runs
            tables, addresses = self._take_tables()
            arrays = groups.view_samples(rollout, tables.columns, wanted)
            indices, ends = check_order(order, minibatch_size, len(arrays[0]))
            tables.numbers[:] = [math.inf if x is None else x for x in numbers]
            results, totals = np.full((len(ends), len(STATISTICS)), math.nan), np.empty(7)
            try:
                epoch(addresses, options.ctypes.data, arrays, indices, ends, totals, results)
            finally:  # where an interrupt is raised once the call returns
                steps = int((results[:, -1] == 0).sum())
                tables.own[0].leave_steps(steps)
            self._keep_tables(tables)
            epochs.append(torch.from_numpy(results[~np.isnan(results[:, -1])]))
            if steps < len(epochs[-1]):
                break
        return epochs


def compile_update(head: str) -> float:
    """As `CompiledUpdate.compile`, with one of the `HEADS`, before there is an update."""
    return compile_loss(Loss(check_choice("head", head, HEADS)), serial.run_epoch)


def compile_loss(loss: Loss | None, function: Callable[..., Any]) -> float:
    """Compile a function and what it calls; return the seconds that it took."""
    start = time.perf_counter()
    find_functions(loss)
    compile_entry(function)
    return time.perf_counter() - start


KNOWN_TABLES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Those of the last update of each optimizer, and of other networks, while nobody uses them."""


def check_order(order: Tensor | Sequence[Tensor], size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of samples as an array, if all are there, and the ends of the minibatches."""
    is_order = isinstance(order, Tensor)
    if is_order:
        check_count("minibatch_size", size)
    whole: Tensor = order if isinstance(order, Tensor) else torch.cat([*order])
    indices = whole.numpy().copy()  # whatever others write meanwhile
    if indices.dtype != np.int64 or indices.ndim != 1 or not (len(indices) or len(order)):
        raise ValueError(f"orders: got {whole.dtype} of shape {tuple(whole.shape)}, expected int64 numbers of samples")
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        raise ValueError(f"orders: got numbers from {indices.min()} to {indices.max()}, expected 0 to {count - 1}")
    sizes = [len(x) for x in order] if not is_order else [size] * -(-len(indices) // size)
    return indices, np.minimum(np.cumsum(sizes), len(indices))


class CompiledNetwork(Compiled):
    """What MLPs return, on the CPU, in one compiled call, up to rounding in float32: for acting.

    Args:
        networks: Modules as `CompiledUpdate` takes them, which take the same features and may share modules.
    """

    def __init__(self, *networks: nn.Module) -> None:
        """Keep them."""
        super().__init__(groups.GroupTables, {0: (networks, None)}, values.evaluate)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """What they return, side by side.

        Args:
            features: float32 [num_samples, num_features].

        Returns:
            float32 [num_samples, num_outputs].

        Raises:
            ValueError: They cannot be compiled (`find_obstacle`), or there are other features.
        """
        tables, addresses = self._take_tables()
        if features.ndim != 2 or features.shape[1] != tables.width:
            raise ValueError(f"features: got shape {features.shape}, expected [num_samples, {tables.width}]")
        results = np.empty((len(features), sum(tables.sizes[0])), np.float32)
        compile_entry(values.evaluate)(addresses, np.ascontiguousarray(features, np.float32), results)
        self._keep_tables(tables)
        return results


def draw_actions(
    outputs: np.ndarray, head: str, sizes: Sequence[int], log_std: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw actions in one compiled call, as `torch.distributions` do: by the same numbers of PyTorch's generator.

    Args:
        outputs: Logits or means, and anything behind them, float32 [num_samples, num_outputs or more].
        head: One of the `HEADS`.
        sizes: How many outputs each categorical distribution has; else [num_outputs].
        log_std: Logarithms of a Gaussian's standard deviations, float32 [num_outputs].

    Returns:
        Actions, float32 or int64 [num_samples, num_actions], and log-probabilities, [num_samples], up to rounding.
    """
    number, count, width = HEADS.index(check_choice("head", head, HEADS)), len(outputs), sum(sizes)
    deviations = np.empty(0, np.float32) if log_std is None else log_std.detach().numpy().ravel()
    if outputs.shape[1] < width or len(deviations) != width * (number == values.GAUSSIAN):
        raise ValueError(f"sizes: got {sizes}, expected those of {outputs.shape[1]} outputs and of {deviations}")
    draw = (Tensor.exponential_, Tensor.normal_, Tensor.uniform_)[number]
    drawn = [draw(torch.empty(count, x, dtype=torch.float32, device="cpu")) for x in sizes]
    numbers = torch.cat(drawn, dim=1) if len(drawn) > 1 else drawn[0]
    given = np.ascontiguousarray(outputs, np.float32), numbers.numpy(), np.array(sizes), deviations
    actions, log_probs = np.empty((count, width if number else len(sizes)), np.float32), np.empty(count, np.float32)
    compile_entry(values.draw)(number, *given, actions, log_probs)
    chosen = torch.from_numpy(actions)
    return chosen if number else chosen.long(), torch.from_numpy(log_probs)


def run_in_lanes(
    tables: Any, first: Any, samples: Any, size: int, learns: Any, follows: Any, found: Any, results: Any
) -> None:
    """As `run_steps` with two threads, if both have time: gradients of half of a minibatch's tiles are summed apart."""
    learn, finish = map(compile_entry, (values.learn_tiles, values.finish))
    half = serial.TILE * -(-size // (2 * serial.TILE))
    for step, learns_policy in enumerate(learns.tolist()):
        low, high = step * size, (step + 1) * size
        for of_actor in (False, True)[: 1 + learns_policy]:

            def work(lane: int, of_actor: bool = of_actor, low: int = low, high: int = high) -> None:
                addresses = tables.second_lane if lane else first  # of memory that is there as long as this function
                part = (low + half, high) if lane else (low, low + half)
                learn(addresses, samples, *part, of_actor, found, lane)

            run_chunks(work, (0, 1), 2)
            is_last = of_actor == learns_policy
            if finish(first, tables.second_lane[1], size, of_actor, is_last, follows[step], found, results, step):
                return


class CompiledValueUpdate(Compiled):
    """Gradient steps of DQN, QR-DQN, SAC, TQC or TD3 on the CPU, in one compiled call, or in two threads' calls.

    Critics learn r + γ·Q of targets at next observations, minus α·log π there. Then the actor learns the least of the
    critics' values, or their quantiles' mean, and the entropy coefficient α, and targets follow. Parameters and the
    optimizers' states are those of PyTorch, in place, equal to PyTorch's own up to rounding in float32.

        update = CompiledValueUpdate([q_network], [target_network], optimizer)
        if not update.find_obstacle():
            update.run(transitions, batch_size=32, huber_delta=1.0, max_grad_norm=10.0)

    Args:
        critics: Modules as `CompiledUpdate` takes them. Without an actor it is one, with a value of each action; else
            each takes observations and actions side by side, and returns one value.
        targets: Networks of the same shapes, which follow the critics.
        optimizer: Of the critics, as `CompiledUpdate` takes it.
        actor: None; or one network that returns actions (TD3); or two that return means and log-deviations, which are
            bounded by -20 and 2, of a Gaussian whose tanh are actions (SAC).
        actor_optimizer: Of the actor.
        actor_target: Of an actor that returns actions, the network that follows it.
        log_entropy_coef: The logarithm of α, one number, if it is learned.
        entropy_optimizer: Of that.
        quantiles: How many quantiles of each action's value a critic returns, those of all actions one after the
            other, if it does. They learn by the quantile loss of QR-DQN, and their mean is the value that counts.
        dropped_quantiles: Of each target how many of the largest quantiles of all targets are left out (TQC).

    Raises:
        TypeError: A number is no int.
        ValueError: It is too small or too large, or there is an optimizer without what it learns, or the other way.
    """

    def __init__(
        self,
        critics: Sequence[nn.Module],
        targets: Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        actor: Sequence[nn.Module] = (),
        actor_optimizer: Optimizer | None = None,
        actor_target: nn.Module | None = None,
        log_entropy_coef: Tensor | None = None,
        entropy_optimizer: Optimizer | None = None,
        quantiles: int = 0,
        dropped_quantiles: int = 0,
    ) -> None:
        """Check that there is an optimizer of all that learns."""
        for name, x, other in (
            ("actor_optimizer", actor_optimizer, actor),
            ("entropy_optimizer", entropy_optimizer, log_entropy_coef is not None),
        ):
            if (x is not None) != bool(other):
                raise ValueError(f"{name}: got {type(x).__name__}, expected one just for what is learned")
        parts: dict[int, tuple[Any, ...]] = {values.CRITICS: ([*critics], optimizer)}
        parts[values.TARGETS] = [*targets], None
        parts |= {values.ACTOR: ([*actor], actor_optimizer)} if actor else {}
        parts |= {} if actor_target is None else {values.NEXT_ACTOR: ([actor_target], None)}
        parts |= {} if log_entropy_coef is None else {values.ENTROPY: ([], entropy_optimizer, [log_entropy_coef])}
        self.quantiles = quantiles and check_count("quantiles", quantiles)
        self.dropped_quantiles = dropped_quantiles and check_count("dropped_quantiles", dropped_quantiles)
        if dropped_quantiles and not (actor and dropped_quantiles < quantiles):
            raise ValueError(f"dropped_quantiles: got {dropped_quantiles}, expected an actor and less than {quantiles}")
        super().__init__(groups.ValueTables, parts, values.run_steps, (quantiles, dropped_quantiles))

    @staticmethod
    def count_threads(num_weights: int, batch_size: int) -> int:
        """How many threads share a gradient step, by the critics' weights: two if it is large and PyTorch has several.

        Args:
            num_weights: Of all critics together.
            batch_size: Samples of a minibatch.
        """
        is_large = batch_size > serial.TILE and batch_size * num_weights >= SHARED_PRODUCTS
        return 1 + (is_large and torch.get_num_threads() > 1)

    def compile(self, batch_size: int = 0) -> float:
        """As of other updates; with minibatches of a size that two threads share, what they run, too."""
        critics = self._parts[values.CRITICS][0] if batch_size else ()
        weights = {id(x): x.numel() for critic in critics for x in critic.parameters()}
        shares = self.count_threads(sum(weights.values()), batch_size) > 1
        others = (values.learn_tiles, values.finish) if shares else ()
        return sum(compile_loss(self.loss, x) for x in (self._function, *others))

    def run(
        self,
        transitions: Transitions,
        batch_size: int,
        *,
        critic_coef: float = 1.0,
        huber_delta: float | None = None,
        max_grad_norm: float | None = None,
        entropy_coef: float = 0.0,
        target_entropy: float = 0.0,
        updates_actor: Sequence[bool] | None = None,
        updates_targets: Sequence[bool] | None = None,
        tau: float = 0.0,
    ) -> Tensor:
        """Make a gradient step with each minibatch.

        Args:
            transitions: The samples of all minibatches.
            batch_size: Samples of each.
            critic_coef: Factor of the critics' loss, mean(½·error²), which is added up over critics.
            huber_delta: Errors beyond count as in Huber's loss, mean(δ·(|error| − ½·δ)); None for none.
            max_grad_norm: The largest norm of an optimizer's gradients; None for no bound.
            entropy_coef: α where it is not learned.
            target_entropy: The entropy that a learned α is to lead to.
            updates_actor: Of each step, whether the actor learns, and α does; None for all.
            updates_targets: Of each step, whether targets follow; None for none.
            tau: How far: target = (1 − τ)·target + τ·parameter.

        Returns:
            The `VALUE_STATISTICS` of the steps, float64 [num_steps, 5], up to that at which it stopped, since a mean or
            a deviation of the actor is NaN, an observation is not finite, or an action is none of the critic's. Of that
            one, nothing else is there; it has changed no parameter, unless it was the actor's own that became NaN.

        Raises:
            ValueError: The update cannot be compiled (`find_obstacle`), or the samples do not fit the networks.
        """
        numbers = critic_coef, entropy_coef, target_entropy, tau
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"critic_coef, entropy_coef, target_entropy, tau: got {numbers}, expected finite numbers")
        tables, addresses = self._take_tables()
        wanted = {"noise": tables.is_gaussian, "next_noise": transitions.next_noise is not None or tables.is_gaussian}
        samples = groups.view_samples(transitions, tables.columns, wanted)
        count, rest = divmod(len(samples[0]), check_count("batch_size", batch_size))
        if rest or not count:
            raise ValueError(f"batch_size: got {batch_size}, expected a divisor of {len(samples[0])} samples")
        delta = math.inf if huber_delta is None else huber_delta
        tables.numbers[:7] = delta, *numbers, 1.0 - tau, 1.0 / batch_size
        clips = (math.inf, serial.EACH_VALUE) if max_grad_norm is None else (max_grad_norm, serial.GLOBAL_NORM)
        tables.options[:2], has_actor = clips, values.ACTOR in self._parts
        learns = np.array([has_actor] * count if updates_actor is None or not has_actor else updates_actor)
        follows = np.array([False] * count if updates_targets is None else updates_targets)
        if not len(learns) == len(follows) == count:
            raise ValueError(f"updates_actor, updates_targets: expected {count} values, one of each minibatch")
        results = np.full((count, len(VALUE_STATISTICS)), math.nan)
        shares = self.count_threads(tables.num_weights, batch_size) > 1
        run: Any = partial(run_in_lanes, tables) if shares else compile_entry(values.run_steps)
        try:
            run(addresses, samples, batch_size, learns, follows, np.zeros((2, 3)), results)
        finally:
            made = [actor for stop, actor in zip(results[:, -1].tolist(), learns.tolist(), strict=True) if stop == 0]
            for group, own in tables.learning.items():
                own.leave_steps(int((results[:, -1] <= 0).sum()) if group == values.CRITICS else sum(made))
        self._keep_tables(tables)
        return torch.from_numpy(results[~np.isnan(results[:, -1])])
