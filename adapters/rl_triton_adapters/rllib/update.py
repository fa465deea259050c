"""A learner's update that takes less time than RLlib's: captured in CUDA graphs, or compiled for the CPU.

Minibatches and their order, metrics and checkpoints are RLlib's; weights and losses are RLlib's up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from ray.rllib.core.rl_module.apis import SelfSupervisedLossAPI
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rl_triton_adapters._optimizers import clip_by_norm, fuse_optimizer, release_optimizer
from rl_triton_adapters._overrides import find_replaced
from rl_triton_adapters.rllib.compiled import find_compiled, run_compiled
from rl_triton_adapters.rllib.loss import FusedLoss, find_distributions, name_distribution
from rl_triton_adapters.rllib.metrics import LateMetrics
from rl_triton_adapters.rllib.minibatches import can_slice_minibatches, draw_rows, map_columns, slice_minibatches
from rl_triton_adapters.updates import CapturedUpdate, find_reason
from rl_triton_core.capture import CapturedStep, is_input, is_written_in, list_functions
from rl_triton_core.compiled import CompiledUpdate

logger = logging.getLogger("ray.rllib.rl_triton")  # follows the log level that RLlib sets for itself
UPDATE = ("_update", "_uncompiled_update")
"""What makes a step. A learner with one of its own makes its own steps."""
LOSS = ("compute_loss_for_module",)
LOSSES = ("compute_losses", *LOSS)
APPLY = ("apply_gradients", "get_optimizer", "get_optimizers_for_module", "filter_param_dict_for_optimizer")
STEP = (*LOSSES, "compute_gradients", "postprocess_gradients", "postprocess_gradients_for_module", *APPLY)
"""What a step calls. A learner with one of its own may do there what no graph can repeat."""
CHECK, ITERATOR = ("_compute_off_policyness",), ("_create_iterator_if_necessary",)
LOGS = ("_log_metrics", "_log_steps_trained_metrics", "_get_clip_function", *CHECK, *ITERATOR)
"""What RLlib has for every minibatch besides, and a compiled update does not."""
PACKAGES = ("ray", "rl_triton_adapters", "rl_triton_core")
"""Where the methods come from that are not the user's."""
PLAIN = bool, int, float, str, type(None)
"""What a step may read of a configuration; where it changes, steps are captured again."""
ENTROPY, KL = "entropy_coeff_schedulers_per_module", "curr_kl_coeffs_per_module"
"""Where learners keep the coefficients of entropy and, if they have one, KL divergence."""


class Update:
    """The steps that a learner makes with the minibatches of an update.

    Args:
        learner: A learner, which is not built yet.
        is_wanted: Whether the flags ask for it.
        loss: Computes the losses of those modules that it can in one pass over the minibatch.
    """

    def __init__(self, learner: Any, is_wanted: bool, loss: FusedLoss | None) -> None:
        self.learner, self.is_wanted, self.loss = learner, is_wanted, loss
        self.captured = CapturedUpdate(self.make_captured_step, max_graphs=learner.max_graphs)
        self.num_not_finite = torch.zeros(())
        self.last_batch: dict[str, Any] = {}
        self.own: list[Any] = []
        """Methods that were set on the learner itself, and the losses' heads."""
        self.is_stock_apply = self.logs_every_batch = False
        self.own_iterator = ""
        """What may change minibatches and settings before each step."""

    def find_step(self) -> CapturedStep:
        """The step of the modules and optimizers as they are now; it says why it is not captured."""
        learner, update = self.learner, self.captured
        modules = [x for _, x in learner.module.items() if isinstance(x, nn.Module)]
        optimizers = list(learner._named_optimizers.values())
        own: list[Any] = [name for name in (*STEP, *CHECK) if name in vars(learner)]
        own += [self.loss.find_head(name) for name, _ in learner.module.items()] if self.loss else []
        if not update.is_of(modules, optimizers) or own != self.own:  # else nothing else has changed
            self.own = own
            self.num_not_finite = torch.zeros((), device=learner._device)
            stock, obstacle = self.find_obstacles()
            update.find_step(modules, optimizers, stock=stock, obstacle=obstacle, state=[self.num_not_finite])
        assert update.step is not None
        return update.step

    def forget_heads(self) -> None:
        """Look at distributions of actions again, which may have been changed since."""
        if self.loss is not None:
            self.loss.heads = {}

    def keep_settings(self) -> None:
        """Capture again where a number of the configuration, or of a module's, is another than before."""
        configs = [self.learner.config.get_config_for_module(name) for name, _ in self.learner.module.items()]
        self.captured.keep_settings([x for each in configs for x in vars(each).values() if isinstance(x, PLAIN)])

    def find_compiled(self, names: Iterable[str] | None = None) -> tuple[dict[str, CompiledUpdate], str]:
        """The compiled updates of some modules, or of all with optimizers, and why there are none beside captures."""
        if not self.find_step().reason:
            return {}, ""
        clip = "" if self.learner._get_clip_function() is clip_gradients_at_once else "clip_gradients is not RLlib's"
        reason = self.captured.stock or self.captured.obstacle or find_own_method(self.learner, LOGS) or clip
        optimizers = self.learner._module_optimizers  # in which RLlib leaves empty lists
        names = filter(optimizers.get, optimizers) if names is None else names
        return ({}, reason) if reason else find_compiled(self.learner, self.loss, names)

    def find_obstacles(self) -> tuple[str, str]:
        """Why steps are RLlib's own, and why they are not captured, besides what `CapturedStep` says."""
        learner, modules = self.learner, [*self.learner.module.items()]
        own_update, own_step, own_apply = (find_own_method(learner, names) for names in (UPDATE, STEP, APPLY))
        scaled, scheduled = learner._grad_scalers is not None, learner._lr_scheduler_classes is not None
        actors = [(name, x.unwrapped()) for name, x in modules if find_distributions(x.unwrapped())]
        reasons_for_stock = {
            "switched off": not self.is_wanted,
            f"{own_update} is not RLlib's": own_update,
            "the update is compiled": learner._torch_compile_complete_update,
            "several learners have batches of different shapes": learner.has_varying_batches
            and learner.config.num_learners > 1,
        }
        obstacles = {
            f"{own_step} is not RLlib's": own_step,
            "modules are compiled": learner._torch_compile_forward_train,
            "gradients are scaled": scaled,
            "learning rates have schedulers of PyTorch": scheduled,
            "stateful modules have minibatches of several shapes": any(x.is_stateful() for _, x in actors),
            "a module has a loss of its own": any(isinstance(x.unwrapped(), SelfSupervisedLossAPI) for _, x in modules),
            "the loss is RLlib's": self.loss and any(self.loss.find_head(name) is None for name, _ in actors),
        }
        self.is_stock_apply = scaled or scheduled or bool(own_apply)
        self.logs_every_batch = bool(find_own_method(learner, CHECK))
        return find_reason(reasons_for_stock), find_reason(obstacles)

    def describe(self) -> str:
        """Say what computes the losses, and whether updates are captured, accelerated without a graph, or RLlib's."""
        self.forget_heads()
        self.find_step()
        own, losses = find_own_method(self.learner, LOSSES), []
        for name, module in self.learner.module.items():
            kinds = find_distributions(module.unwrapped())
            if isinstance(module.unwrapped(), SelfSupervisedLossAPI):
                losses.append(f"the loss of the module {name} ({type(module.unwrapped()).__name__})")
            elif self.loss is not None and self.loss.find_head(name) is not None:
                losses.append(f"the fused loss of {name}")
            elif kinds:
                losses.append(f"RLlib's loss of {name} ({name_distribution(kinds[0])})")
        is_method = own and not own.startswith("ray.")  # rather than a function that RLlib's calls
        what = f"{own}, which may call " * bool(is_method) + ", ".join(losses)
        updates, reason = self.find_compiled()
        if updates:
            return f"{what}; updates are compiled"
        is_asked = self.learner._device.type == "cpu" and reason not in (self.captured.stock, self.captured.obstacle)
        return f"{what}; {self.captured.describe('those of RLlib')}" + f"; not compiled: {reason}" * is_asked

    def iterate(self, iterator: Any) -> Iterator[Any]:
        """Yield the minibatches of RLlib's iterator, and log at their end what was logged meanwhile."""
        learner = self.learner
        if not self.is_wanted:
            yield from iterator
            return
        self.forget_heads()
        self.last_batch, self.own_iterator = {}, find_own_method(learner, ITERATOR)
        is_sliced = can_slice_minibatches(iterator)
        compiled, _ = self.find_compiled(iterator._batch.policy_batches if is_sliced else None)
        updates = compiled if is_sliced else {}
        if self.captured.is_captured:
            self.keep_settings()
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
        step, learner = self.find_step(), self.learner
        if self.captured.stock:
            return make_stock_step(batch)
        note_batch = learner._compute_off_policyness if self.logs_every_batch else self.last_batch.update
        note_batch(batch)
        if step.reason or not is_capturable(batch, step):
            return {}, self.update_modules(batch), {}
        if self.own_iterator:
            self.keep_settings()
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
        norm: Tensor | None = clip_gradients(gradients_dict, grad_clip=grad_clip, grad_clip_by=grad_clip_by)
        return norm
    if grad_clip_by == "norm":
        norms = replace_infinity(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, list(torch.where(norms > grad_clip, grad_clip / norms, 1.0)))
        return None
    return clip_by_norm(gradients, grad_clip, replace_infinity)


def replace_infinity(norm: Tensor) -> Tensor:
    """Replace what is not finite, as RLlib does."""
    return norm.nan_to_num(neginf=-10e8, posinf=10e8)


def find_own_method(learner: Any, names: Iterable[str], behind: type | None = None) -> str:
    """Find a method that is the user's: of the learner itself, of a class of theirs, or put into one of RLlib's.

    Args:
        learner: The learner.
        names: Names of methods of RLlib's learner.
        behind: Look at classes behind this one alone, whose methods it goes around.

    Returns:
        The names of the class and the method, or of a function that RLlib's calls; empty if there is none.
    """
    mro = type(learner).__mro__
    stock = next(base for base in mro if base.__module__.startswith("ray.rllib.algorithms.")).__mro__
    known = [base for base in mro if base in stock or base.__module__.startswith("rl_triton_adapters.")]
    for name in names:
        if name in vars(learner) and name not in UPDATE:  # where ours is called, if at all
            return f"{name} of this {mro[0].__name__}"
        methods = [vars(base)[name] for base in known if name in vars(base)]
        if behind_it := find_replaced(methods, (), PACKAGES):
            return behind_it
        for base in mro if behind is None else mro[mro.index(behind) :]:
            method = vars(base).get(name, methods[0])
            *_, innermost = method, *list_functions(method)  # Ray wraps those of remote learners
            if not (base in known or innermost in methods) or not is_written_in(PACKAGES, method):
                return f"{base.__name__}.{name}"
    return ""


def is_capturable(batch: dict[str, Any], step: CapturedStep) -> bool:
    """Whether a batch has only what a graph can take; a warning names columns of objects or text, if not."""
    columns = [column for each in batch.values() for column in each.items()]
    other = [name for name, x in columns if not all(map(is_input, pytree.tree_leaves(x)))]
    if other:
        step.warn_once(f"the batch has columns that are no tensors: {', '.join(other)}")
    return not other
