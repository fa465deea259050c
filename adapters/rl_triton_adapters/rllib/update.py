"""A learner's update that takes less time than RLlib's: captured in CUDA graphs, or compiled for the CPU.

Minibatches and their order, metrics and checkpoints are RLlib's; weights and losses are RLlib's up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import lru_cache, partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from ray.rllib.core.rl_module.apis import SelfSupervisedLossAPI
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.check import State, count_update, is_asked_for
from rl_triton_adapters.common.optimizers import clip_by_norm, fuse_optimizer, release_optimizer
from rl_triton_adapters.common.overrides import describe_own, find_own, list_modules, list_stock, reach
from rl_triton_adapters.common.update import CapturedUpdate, find_reason
from rl_triton_adapters.rllib.compiled import PACKAGES, find_compiled, run_compiled
from rl_triton_adapters.rllib.loss import DISTRIBUTIONS, FusedLoss, find_distributions, name_distribution
from rl_triton_adapters.rllib.metrics import LateMetrics
from rl_triton_adapters.rllib.minibatches import can_slice_minibatches, draw_rows, map_columns, slice_minibatches
from rl_triton_core.capture import CapturedStep, is_input
from rl_triton_core.compiled import CompiledUpdate
from rl_triton_core.reach import Reach, list_called, list_names

logger = logging.getLogger("ray.rllib.rl_triton")  # follows the log level that RLlib sets for itself
BEHIND = MetricsLogger.log_value, MetricsLogger.log_dict, MiniBatchCyclicIterator.__iter__, clip_gradients
"""What ours are in the place of, besides methods of learners."""
KINDS = MiniBatchCyclicIterator, SampleBatch, MultiAgentBatch, *DISTRIBUTIONS  # whose methods are called there
PLAIN = bool, int, float, str, type(None)
"""What a step may read of a configuration; where it changes, steps are captured again."""
ENTROPY, KL = "entropy_coeff_schedulers_per_module", "curr_kl_coeffs_per_module"
"""Where learners keep the coefficients of entropy and, if they have one, KL divergence."""
replace_infinity = partial(torch.nan_to_num, neginf=-10e8, posinf=10e8)  # as RLlib does


class Update:
    """The steps that a learner, not built yet, makes with the minibatches of an update, if the flags ask for it."""

    def __init__(self, learner: Any, is_wanted: bool, loss: FusedLoss | None) -> None:
        self.learner, self.is_wanted, self.loss = learner, is_wanted, loss
        self.captured = CapturedUpdate(self.make_captured_step, max_graphs=32)  # of shapes of batches
        self.num_not_finite = torch.zeros(())
        self.last_batch: dict[str, Any] = {}
        self.is_stock_apply = self.logs_every_batch = False
        self.known: Any = None
        self.replaced = self.own_iterator = ""
        """What of all that RLlib's update runs is somebody's own, and what may change settings before each step."""

    def find_step(self, again: bool = False) -> CapturedStep:
        """The step of the modules and optimizers as they are now; it says why it is not captured.

        Methods, functions of libraries, distributions of actions and numbers are looked at again if that is asked for.
        """
        learner, update = self.learner, self.captured
        modules = [x for _, x in learner.module.items() if isinstance(x, nn.Module)]
        optimizers = list(learner._named_optimizers.values())
        if again or not update.is_of(modules, optimizers):
            self.num_not_finite = self.num_not_finite.to(learner._device)
            self.find_replaced(modules, optimizers)
            stock, obstacle = self.find_obstacles()
            update.find_step(modules, optimizers, stock=stock, obstacle=obstacle, state=[self.num_not_finite])
            configs = [vars(learner.config.get_config_for_module(name)) for name, _ in learner.module.items()]
            update.keep_settings([self.known, *(x for own in configs for x in own.values() if isinstance(x, PLAIN))])
        return update.step

    def find_replaced(self, modules: list[nn.Module], optimizers: list[Any]) -> None:
        """Find out what of libraries, of RLlib's minibatches and of its loss is somebody's own."""
        learner, parts = self.learner, [part for x in modules for part in list_modules(x)]
        metrics = learner.metrics.metrics if isinstance(learner.metrics, LateMetrics) else learner.metrics
        logs = [metrics, *metrics.stats_cls_lookup.values()]
        things = [learner.module, *parts, *optimizers, *KINDS, *logs]
        self.known, replaced = find_replaced_of(learner, "_update", functions=BEHIND, things=things)
        self.replaced = replaced or find_own(logs, BEHIND, PACKAGES)
        self.own_iterator = describe_own(learner, {"_create_iterator_if_necessary"}, PACKAGES)
        if self.loss is not None:
            self.loss.heads, self.loss.obstacle = {}, self.replaced or learner._find_own_loss()

    def find_compiled(self, names: Iterable[str] | None = None) -> tuple[dict[str, CompiledUpdate], str]:
        """The compiled updates of some modules, or of all with optimizers, and why there are none beside captures."""
        if not self.find_step().reason:
            return {}, ""
        learner, optimizers = self.learner, self.learner._module_optimizers  # in which RLlib leaves empty lists
        clip = "" if learner._get_clip_function() is clip_gradients_at_once else "clip_gradients is not RLlib's"
        skipped = "_uncompiled_update", "_log_metrics", "_log_steps_trained_metrics", "_set_slicing_by_batch_id"
        own = find_own_of(learner, *skipped) or find_replaced_of(learner, *skipped)[1] or self.own_iterator
        reason = self.captured.stock or self.captured.obstacle or own or clip
        names = filter(optimizers.get, optimizers) if names is None else names
        return ({}, reason) if reason else find_compiled(self.learner, self.loss, names)

    def find_obstacles(self) -> tuple[str, str]:
        """Why steps are RLlib's own, and why they are not captured, besides what `CapturedStep` says."""
        learner, modules = self.learner, [*self.learner.module.items()]
        ours = Update.make_step, Update.update_modules, Update.apply_gradients
        own_update = self.replaced or find_own_of(learner, "_update", ours=ours)
        own_step = find_own_of(learner, "_uncompiled_update", ours=(Update.iterate,))
        scaled, scheduled = learner._grad_scalers is not None, learner._lr_scheduler_classes is not None
        actors = [(name, x.unwrapped()) for name, x in modules if find_distributions(x.unwrapped())]
        reasons_for_stock = {
            "switched off": not self.is_wanted,
            own_update: own_update,
            "the update is compiled": learner._torch_compile_complete_update,
            "several learners have batches of different shapes": learner.has_varying_batches
            and learner.config.num_learners > 1,
        }
        obstacles = {
            own_step: own_step,
            "modules are compiled": learner._torch_compile_forward_train,
            "gradients are scaled": scaled,
            "learning rates have schedulers of PyTorch": scheduled,
            "stateful modules have minibatches of several shapes": any(x.is_stateful() for _, x in actors),
            "a module has a loss of its own": any(isinstance(x.unwrapped(), SelfSupervisedLossAPI) for _, x in modules),
            "the loss is RLlib's": self.loss and any(self.loss.find_head(name) is None for name, _ in actors),
        }
        self.is_stock_apply = scaled or scheduled or bool(find_own_of(learner, "apply_gradients"))
        self.logs_every_batch = bool(find_own_of(learner, "_compute_off_policyness"))
        return find_reason(reasons_for_stock), find_reason(obstacles)

    def describe(self) -> str:
        """Say what computes the losses, and whether updates are captured, eager, or RLlib's."""
        self.find_step(again=True)
        own, losses = find_own_of(self.learner, "compute_losses"), []
        for name, module in self.learner.module.items():
            kinds = find_distributions(module.unwrapped())
            if isinstance(module.unwrapped(), SelfSupervisedLossAPI):
                losses.append(f"the loss of the module {name} ({type(module.unwrapped()).__name__})")
            elif self.loss is not None and self.loss.find_head(name) is not None:
                losses.append(f"the fused loss of {name}")
            elif kinds:
                losses.append(f"RLlib's loss of {name} ({name_distribution(kinds[0])})")
        what = f"{own}, which may call " * bool(own) + ", ".join(losses)
        updates, reason = self.find_compiled()
        if updates:
            return f"{what}; updates are compiled"
        is_asked = self.learner._device.type == "cpu" and reason not in (self.captured.stock, self.captured.obstacle)
        return f"{what}; {self.captured.describe('those of RLlib')}" + f"; not compiled: {reason}" * is_asked

    def iterate(self, iterator: Any, make_stock_step: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        """Yield the minibatches of RLlib's iterator, and log at their end what was logged meanwhile."""
        learner = self.learner
        count_update(self)
        if not self.is_wanted or (self.find_step(again=True) and self.replaced):
            yield from iterator
            return
        compare = self.check(iterator, make_stock_step) if is_asked_for(learner) and not self.captured.stock else None
        self.last_batch, is_sliced = {}, can_slice_minibatches(iterator)
        compiled, _ = self.find_compiled(iterator._batch.policy_batches if is_sliced else None)
        updates = compiled if is_sliced else {}
        with self.putting_back():
            learner.metrics = metrics = LateMetrics(learner.metrics)
            if updates:
                yield self.make_most_steps(updates, iterator, metrics)
            else:
                for optimizer in () if compiled else learner._named_optimizers.values():
                    fuse_optimizer(optimizer)
                sliced = slice_minibatches(iterator, lambda: self.captured.is_captured and not self.own_iterator)
                yield from sliced if is_sliced else iterator
        self.put_back()
        if self.last_batch:
            learner._compute_off_policyness(self.last_batch)
            self.last_batch = {}
        if (updates or self.captured.is_captured) and self.num_not_finite.item():
            logger.warning("gradients of %d minibatches were not finite", self.num_not_finite.item())
            self.num_not_finite.zero_()
        if compare is not None:
            compare()

    def check(self, iterator: Any, make_stock_step: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
        """Make RLlib's steps with these minibatches, and take them back; what says, after ours, how far these are."""
        learner = self.learner  # which holds this object: all that is set here is put back with what it holds
        state = State(learner, *(x for _, x in learner.module.items()), *learner._named_optimizers.values())
        try:
            learner.metrics, learner._flags = copy(learner.metrics), learner._flags._replace(rl_triton=False)
            learner.metrics.stats, self.is_wanted, self.loss = deepcopy(learner.metrics.stats), False, None
            for batch in deepcopy(iterator):
                make_stock_step(batch.policy_batches)
            wanted = state.read(None)
        finally:
            state.put_back()
        return lambda: state.compare("update", None, wanted)

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """If what happens inside fails, nothing of the learner stays replaced. Iterators may be kept with the error."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # of a device that has failed
                self.put_back()
            raise

    def put_back(self) -> None:
        """Leave the learner its own optimizers and metrics, with what was logged meanwhile."""
        learner, metrics = self.learner, self.learner.metrics
        for optimizer in () if self.captured.is_captured else learner._named_optimizers.values():
            release_optimizer(optimizer)  # compiled updates refuse its hooks, and graphs new ones
        if isinstance(metrics, LateMetrics):
            learner.metrics = metrics.metrics
            metrics.flush()

    def make_most_steps(self, updates: dict[str, CompiledUpdate], iterator: Any, metrics: LateMetrics) -> Any:
        """Make all steps but the last one; return its minibatch, of which RLlib logs what it logs of an update."""
        rows, batches = draw_rows(iterator), iterator._batch.policy_batches
        count = metrics.times = len(next(iter(rows.values())))
        for name, update in updates.items() if count > 1 else ():
            self.num_not_finite += run_compiled(self.learner, name, update, batches[name], rows[name][:-1])
        minibatch = {name: SampleBatch(map_columns(itemgetter(rows[name][-1]), dict(x))) for name, x in batches.items()}
        others = {name: range((count - 1) * len(x)) for name, x in minibatch.items()}  # whose steps are counted too
        if count > 1:
            env_steps = partial(int, (count - 1) * len(iterator._batch))
            self.learner._log_metrics(SimpleNamespace(env_steps=env_steps, policy_batches=others))
        return MultiAgentBatch(minibatch, len(iterator._batch))

    def make_step(self, batch: dict[str, Any], make_stock_step: Callable[[dict[str, Any]], Any]) -> Any:
        """Update the modules with one minibatch, with arguments and results of RLlib's `_update`."""
        step, learner = self.find_step(again=bool(self.own_iterator)), self.learner
        if self.captured.stock:
            return make_stock_step(batch)
        note_batch = learner._compute_off_policyness if self.logs_every_batch else self.last_batch.update
        note_batch(batch)
        columns = [column for each in batch.values() for column in each.items() if not step.reason]
        other = [name for name, x in columns if not all(map(is_input, pytree.tree_leaves(x)))]
        if other:
            step.warn_once(f"the batch has columns that are no tensors: {', '.join(other)}")
        if step.reason or other:
            return {}, self.update_modules(batch), {}
        coefficients = {ENTROPY: {x: getattr(learner, ENTROPY)[x].get_current_value() for x in batch}}
        coefficients |= {KL: {x: getattr(learner, KL)[x] for x in batch}} if hasattr(learner, KL) else {}
        losses, logged = step({name: dict(columns) for name, columns in batch.items()}, coefficients)
        metrics = learner.metrics if isinstance(learner.metrics, LateMetrics) else LateMetrics(learner.metrics)
        for key, value in logged.items():
            metrics.keep(key, value)
        if metrics is not learner.metrics:
            metrics.flush()
        # RLlib may keep losses until after other updates, whose graphs share the memory
        return {}, {name: x.clone() if learner.has_varying_batches else x for name, x in losses.items()}, {}

    def make_captured_step(self, batch: dict[str, Any], coefficients: dict[str, dict[str, Any]]) -> tuple[Any, Any]:
        """Update the modules with one minibatch, of coefficients that are given; return losses and what was logged."""
        attributes = vars(self.learner)
        metrics = LateMetrics(attributes["metrics"], is_captured=True)
        schedulers = {
            name: SimpleNamespace(get_current_value=lambda x=x: x) for name, x in coefficients[ENTROPY].items()
        }
        given = {**coefficients, ENTROPY: schedulers, "metrics": metrics}
        kept = {name: attributes[name] for name in given}
        attributes.update(given)
        try:
            losses = self.update_modules({name: SampleBatch(columns) for name, columns in batch.items()}, True)
        finally:
            attributes.update(kept)
        return losses, metrics.last

    def update_modules(self, batch: dict[str, Any], is_captured: bool = False) -> dict[str, Tensor]:
        """Update the modules with one minibatch, and return its losses."""
        learner = self.learner
        losses = learner.compute_losses(fwd_out=learner.module.forward_train(batch), batch=batch)
        self.apply_gradients(learner.postprocess_gradients(learner.compute_gradients(losses)), is_captured)
        return {name: loss.detach() for name, loss in losses.items()}

    def apply_gradients(self, gradients: dict[Any, Tensor | None], is_captured: bool) -> None:
        """Step the optimizers, if all gradients are finite; otherwise RLlib decides.

        A captured step does not read whether they are, and does what RLlib does with those that are not.
        """
        learner, found = self.learner, [x for x in gradients.values() if x is not None]
        skips = learner.config.torch_skip_nan_gradients
        if is_captured and not skips:
            self.num_not_finite += ~are_finite(found)
            for x in found:
                x.nan_to_num_()
        elif self.is_stock_apply or not (skips or are_finite(found)):
            learner.apply_gradients(gradients)
            return
        for reference, gradient in gradients.items():
            learner._params[reference].grad = gradient
        for module_id, names in learner._module_optimizers.items():
            for name in names:
                learner.get_optimizer(module_id, name).step()


def are_finite(gradients: list[Tensor]) -> Tensor:
    """Whether all gradients are finite, on their device; False too if their norm overflows."""
    if not gradients:
        return torch.tensor(True)
    return torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum())


def clip_gradients_at_once(
    gradients_dict: dict[Any, Tensor | None], *, grad_clip: float | None = None, grad_clip_by: str = "value"
) -> Tensor | None:
    """Clip gradients in place, with the arguments and results of RLlib's `clip_gradients`.

    By norms, that takes few operations and no read from the device.
    """
    gradients = [gradient.detach() for gradient in gradients_dict.values() if gradient is not None]
    if grad_clip is None or grad_clip_by not in ("norm", "global_norm") or not gradients:
        return clip_gradients(gradients_dict, grad_clip=grad_clip, grad_clip_by=grad_clip_by)  # type: ignore[no-any-return]
    if grad_clip_by == "norm":
        norms = replace_infinity(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, list(torch.where(norms > grad_clip, grad_clip / norms, 1.0)))
        return None
    return clip_by_norm(gradients, grad_clip, replace_infinity)


def find_own_of(learner: Any, *names: str, ours: tuple[Any, ...] = ()) -> str:
    """Which method, of those that RLlib's of some names are and call and ours do not, a learner has of its own."""
    return describe_own(learner, follow(learner.__class__, names, ours)[1], PACKAGES)


def find_replaced_of(learner: Any, *names: str, functions: Any = (), things: Any = ()) -> tuple[Reach, str]:
    """All of libraries that these methods of a learner, and functions, can run, and which of it was replaced there."""
    called, _ = follow(learner.__class__, names)
    known, why = reach((*called, *functions), things, PACKAGES, (type(learner), type(learner.config)))
    if why:
        follow.cache_clear()  # it may be a method, which was not followed
    return known, why


@lru_cache(maxsize=256)
def follow(kind: type, names: tuple[str, ...], ours: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], set[str]]:
    """The methods of RLlib's learners that those of some names are and call; and all they read that ours do not."""
    kind = getattr(kind, "__ray_actor_class__", kind)  # without what Ray wraps methods of its actors in
    stock, without = tuple(x for name in names for x in list_stock(kind, name, PACKAGES)), ("update",)
    called = [list_called(kind, x, PACKAGES, without) for x in (stock, ours)]  # dictionaries have an `update`, too
    read, known = ({y for x in functions for y in list_names(x.__code__)} for functions in called)
    return called[0], read.union(names).difference(known, without)
