"""TorchRL: `ClipPPOLoss` whose terms and gradients `rl_triton_core.losses` computes in one pass over the minibatch.

    loss = TritonClipPPOLoss(actor, critic)

Networks, keys, value estimators and schedules are TorchRL's own, and so is the whole loss where an option asks for what
the pass does not compute.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal

from rl_triton_adapters.common.overrides import find_override, find_own, find_replaced
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.common.versions import explain_import
from rl_triton_core.losses import (
    Gaussian,
    LogProbs,
    MultiCategorical,
    Normalization,
    Policy,
    PPOLoss,
    get_gradients,
    ppo_loss,
)

try:
    from tensordict import TensorDict, TensorDictBase, is_tensor_collection
    from tensordict.nn import dispatch
    from torchrl.modules import IndependentNormal, MaskedCategorical, OneHotCategorical
    from torchrl.objectives import ClipPPOLoss
except ImportError as error:
    raise explain_import(__name__, error, "torchrl", "0.14") from error

__all__ = ["TritonClipPPOLoss"]

DISTANCES = {"smooth_l1": 1.0, "l2": None}
"""Where the error of a value becomes linear, if it does, by TorchRL's `loss_critic_type`."""
KNOWN = (Categorical, OneHotCategorical, MaskedCategorical, Normal, Independent, IndependentNormal)
"""The distributions whose parameters the pass takes."""
PACKAGES = ("torchrl",)
ASKED_EVERY = 64  # calls of a loss, whether functions of libraries were replaced
PRECISIONS = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
"""What the pass computes in, by the type of the device."""

EPSILON = torch.finfo(torch.float32).resolution
"""Of TorchRL's standard deviations, at least."""

# -- terms -------------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """How the loss is computed from a distribution of actions."""

    kind: Callable[..., Policy]
    inputs: tuple[Tensor, ...]
    """What the actor's gradient flows through, and what the policy is made of."""
    options: dict[str, Any]
    """Other arguments of `ppo_loss`."""

    def compute_loss(self, inputs: Sequence[Tensor], **more: Any) -> PPOLoss:
        """The loss of other inputs, with more arguments."""
        return ppo_loss(self.kind(*inputs), **{**self.options, **more})


def choose_head(distribution: Any, actions: Tensor, shape: torch.Size) -> Head | None:
    """Choose how the loss is computed from a distribution's parameters, for log-probabilities of a shape, if known."""
    kind = type(distribution)
    if kind in KNOWN[:2] or (kind is MaskedCategorical and not distribution._sparse_mask):
        indices = actions.argmax(dim=-1) if kind is OneHotCategorical else actions.long()
        if distribution.logits.shape[:-1] == indices.shape == shape:
            return Head(MultiCategorical, (distribution.logits,), {"actions": indices})
    if kind in (Independent, IndependentNormal) and type(distribution.base_dist) is Normal:
        mean, scale = distribution.base_dist.loc, distribution.base_dist.scale
        if mean.shape == scale.shape == actions.shape and mean.shape[:-1] == shape:
            actions = actions if actions.is_floating_point() else actions.to(mean.dtype)
            return Head(Gaussian, (mean, scale.log()), {"actions": actions})
    return None


def differentiate_loss(
    head: Head, values: Tensor | None, options: dict[str, Any]
) -> tuple[PPOLoss, Sequence[Tensor | None]]:
    """Compute a loss, and its gradients by the head's inputs and by values, if there are any, that require one."""
    given = head.inputs if values is None else (*head.inputs, values)
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        leaves = [x.detach().requires_grad_(torch.is_grad_enabled() and x.requires_grad) for x in given]
        inputs, column = leaves[: len(head.inputs)], (None if values is None else leaves[-1])
        result = head.compute_loss(inputs, values=column, **options)
    return result, get_gradients(result.loss) if result.loss.requires_grad else [None] * len(leaves)


class KnownGradient(torch.autograd.Function):
    """Terms of a loss, with the gradient of their sum by the inputs.

    A backward pass that brings all terms one and the same gradient, as that of their sum does, multiplies by it. Any
    other one computes the terms again, each alone.
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head | None, terms: dict[str, Tensor], gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the terms. Nothing is kept that a backward pass frees."""
        ctx.set_materialize_grads(False)
        ctx.head, ctx.names, ctx.gradients = head, tuple(terms), gradients
        ctx.inputs = [x.detach() for x in inputs]
        return tuple(terms.values())

    @staticmethod
    def backward(ctx: Any, *by_terms: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since the losses have no second derivative")
        if all(x is by_terms[0] for x in by_terms):
            return None, None, None, *(None if x is None else x * by_terms[0] for x in ctx.gradients)
        given = [(name, x) for name, x in zip(ctx.names, by_terms, strict=True) if x is not None]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.inputs]
            alone: dict[str, dict[str, Any]] = {  # with the other term at zero
                "loss_entropy": {"advantages": torch.zeros_like(ctx.head.options["advantages"])},
                "loss_objective": {"entropy_coef": 0.0},
            }
            terms = [ctx.head.compute_loss(inputs, **alone[name]).loss for name, _ in given]
        found = torch.autograd.grad(terms, inputs, [x for _, x in given], allow_unused=True)
        return None, None, None, *found


# -- the loss ----------------------------------------------------------------------------------------------------------


class NotFusedError(Exception):
    """The pass cannot take a minibatch, or what the networks make of it; the message says why."""


class Minibatch(NamedTuple):
    """What the loss reads of a minibatch beside what networks and policy read."""

    advantages: Tensor
    """One number per step, in a last dimension, as all but the mask are."""
    targets: Tensor | None = None
    old_values: Tensor | None = None
    mask: Tensor | None = None
    """Which steps count, without that dimension; None for all."""


class ActorOutputs(NamedTuple):
    """What the actor makes of a minibatch."""

    head: Head
    log_ratios: Tensor
    """One per step, without a graph."""
    distribution: Any
    entropies: TensorDictBase | None = None
    """Those of several kinds of actions."""


class TritonClipPPOLoss(ClipPPOLoss):
    """`ClipPPOLoss` of TorchRL, with its arguments, keys, results and gradients, computed in one pass.

    The pass takes the parameters of a categorical distribution, also a masked or a one-hot one, and of independent
    normal ones; of any other it takes log-probabilities and entropies. Nothing is read from a GPU, unless such another
    distribution has an entropy in closed form: TorchRL looks whether that is finite.

    TorchRL's own operations compute the loss under torch.compile; with dtypes other than float32, or float64 on a CPU;
    with shapes other than one number per step; with gradients that flow to advantages or targets; with methods of a
    subclass; and with these arguments: a `reduction` other than "mean", `loss_critic_type="l1"`, `advantage_norm`,
    `delay_actor`, `max_importance_ratio`, a mapping as `entropy_coeff`. `reason` says it.

    Attributes:
        reason: Why TorchRL's operations computed the last loss; empty if the pass did.
    """

    reason: str = ""
    _asked = -1, ""

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What `ClipPPOLoss` returns of a minibatch, in which advantages and value targets are estimated if missing."""
        self.reason = self._find_obstacle()
        if not self.reason:
            try:
                return self._compute_losses(tensordict.clone(False))
            except NotFusedError as error:
                self.reason = str(error)
        return super().forward(tensordict)

    def _find_obstacle(self) -> str:
        """Why the pass does not compute what the arguments of the loss ask for; empty if it does."""
        numbers = (self.entropy_coeff, self.critic_coeff, self.clip_value, *self._get_clip_range())
        obstacles = {
            "torch.compile traces the loss": torch.compiler.is_compiling(),
            "reduction is not mean": self.reduction != "mean",
            "loss_critic_type is l1": self._has_critic and self.loss_critic_type not in DISTANCES,
            "there is an advantage_norm": self.advantage_norm is not None,
            "there is a max_importance_ratio": self.max_importance_ratio is not None,
            "entropy_coeff is a mapping": self._entropy_coeff_map is not None,
            "delay_actor is set": self.delay_actor,
            "a coefficient or clip has dimensions or a gradient": any(
                x is not None and (x.ndim or x.requires_grad) for x in numbers
            ),
            "torch.autocast is on": any(map(torch.is_autocast_enabled, PRECISIONS)),
        }
        return find_off_switch() or find_reason(obstacles) or self._find_own()

    def _find_own(self) -> str:
        """What of TorchRL's forward is somebody's own; empty if nothing is."""
        calls, replaced = self._asked
        if (calls + 1) % ASKED_EVERY == 0:
            replaced = find_replaced([ClipPPOLoss.forward], [self, *KNOWN], PACKAGES)
        self._asked = calls + 1, replaced
        own = find_override(self, ["forward"], (*PACKAGES, "tensordict"), behind=TritonClipPPOLoss)
        return replaced or own or find_own([self], [ClipPPOLoss.forward], PACKAGES, *SHARED)

    def _get_clip_range(self) -> tuple[Tensor, Tensor]:
        """How far the ratio may fall below 1, and rise above it."""
        if self._asymmetric_clip:
            return self.clip_epsilon_low, self.clip_epsilon_high
        return self.clip_epsilon, self.clip_epsilon

    def _compute_losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the results, or raise NotFusedError."""
        batch = self._read_minibatch(tensordict)
        policy = self._evaluate_actor(tensordict, batch.advantages)
        values = None
        if self._has_critic:
            values = self._evaluate_critic(tensordict)
            require(is_like(values, batch.advantages), "values have another shape or dtype than advantages")
            targets, values, old_values = self._critic_loss_inputs(batch.targets, values, batch.old_values)
            batch = batch._replace(targets=targets, old_values=old_values)
        options = policy.head.options | self._describe_objective(tensordict, batch)
        policy = policy._replace(head=policy.head._replace(options=options))
        return self._assemble_results(policy, batch, values)

    def _read_minibatch(self, tensordict: TensorDictBase) -> Minibatch:
        """Read a minibatch, to which advantages are added if it has none."""
        keys = self.tensor_keys
        if tensordict.get(keys.advantage, None) is None and self.critic_network is not None:
            self.value_estimator(
                tensordict,
                params=self._cached_critic_network_params_detached,
                target_params=self.target_critic_network_params,
            )
        names = [keys.advantage]
        if self._has_critic:
            names += [keys.value_target, *([] if self.clip_value is None else [keys.value])]
        found = [tensordict.get(name, None) for name in names]
        for name, x in zip(names, found, strict=True):
            require(isinstance(x, Tensor), f"there is no {name}")
            require(not x.requires_grad, f"a gradient flows to {name}")
            require(x.dtype in PRECISIONS.get(x.device.type, ()), f"{name} is {x.dtype} on {x.device.type}")
            require(x.shape[-1:] == (1,) and is_like(x, found[0]), f"{name} has another shape or dtype than advantages")
        before = None if isinstance(keys.sample_log_prob, list) else tensordict.get(keys.sample_log_prob, None)
        tensors = [x for x in (before, next(self.parameters(), None)) if isinstance(x, Tensor)]
        require(all(x.dtype == found[0].dtype for x in tensors), "advantages have a dtype of their own")
        return Minibatch(*found)._replace(mask=self._read_mask(tensordict, found[0]))

    def _read_mask(self, tensordict: TensorDictBase, advantages: Tensor) -> Tensor | None:
        """Read which steps count, by all masks of a minibatch."""
        masks = [tensordict.get(key, None) for key in self._loss_mask_keys()]
        columns = [self._expand_loss_mask(mask, advantages) for mask in masks if mask is not None]
        require(all(mask.dtype == torch.bool for mask in columns), "a mask is not bool")
        return reduce(torch.logical_and, columns).squeeze(-1) if columns else None

    def _evaluate_actor(self, tensordict: TensorDictBase, advantages: Tensor) -> ActorOutputs:
        """Compute the inputs of the loss as TorchRL computes ratios: from a distribution's parameters if possible."""
        shape, keys = advantages.shape[:-1], self.tensor_keys
        log_weights, distribution, *_ = self._log_weight(tensordict, adv_shape=shape)
        require(is_like(log_weights, advantages), "log-probabilities have another shape or dtype than advantages")
        log_ratios = log_weights.squeeze(-1)
        if not isinstance(keys.action, list):
            head = choose_head(distribution, tensordict.get(keys.action), shape)
            if head is not None:
                old = {"old_log_probs": tensordict.get(keys.sample_log_prob)}
                return ActorOutputs(head._replace(options=head.options | old), log_ratios.detach(), distribution)
        inputs, entropies = [log_ratios], None
        if self.entropy_bonus:
            entropy = self._get_entropy(distribution, shape)
            if is_tensor_collection(entropy):
                entropies, entropy = entropy.detach(), entropy.sum(dim="feature", reduce=True)
            require(is_like(entropy, advantages), "entropies have another shape or dtype than advantages")
            inputs.append(entropy.squeeze(-1))
        head = Head(LogProbs, tuple(inputs), {"actions": None, "old_log_probs": torch.zeros_like(log_ratios)})
        return ActorOutputs(head, log_ratios.detach(), distribution, entropies)

    def _evaluate_critic(self, tensordict: TensorDictBase) -> Any:
        """Compute values as `loss_critic` does."""
        if self.separate_losses:
            tensordict = tensordict.detach()
        parameters: Any = nullcontext()
        if self.functional:
            parameters = self.critic_network_params.to_module(self.critic_network, preserve_module_state=False)
        with parameters:
            return self.critic_network(tensordict).get(self.tensor_keys.value)

    def _describe_objective(self, tensordict: TensorDictBase, batch: Minibatch) -> dict[str, Any]:
        """The arguments of our losses that the actor's terms depend on."""
        clip, clip_high = self._get_clip_range()
        single = batch.advantages.numel() == tensordict.batch_size.numel()
        everything = batch.mask is None and tensordict.get("shifted_valid", None) is None
        standardize = self.normalize_advantage and single and everything and not self.normalize_advantage_exclude_dims
        advantages = batch.advantages
        if not standardize:
            advantages = self._maybe_normalize_advantage(advantages, tensordict, update_norm=False)
        return {
            "advantages": advantages.squeeze(-1),
            "mask": batch.mask,
            "clip": clip,
            "clip_high": clip_high,
            "entropy_coef": self.entropy_coeff if self.entropy_bonus else 0.0,
            "normalize_advantages": standardize and Normalization(epsilon=EPSILON, epsilon_mode="floor"),
        }

    def _describe_critic(self, batch: Minibatch) -> dict[str, Any]:
        """The arguments of our losses that the critic's term depends on."""
        if batch.targets is None:
            return {}
        options = {
            "returns": batch.targets.squeeze(-1),
            "value_coef": self.critic_coeff,
            "huber_delta": DISTANCES[self.loss_critic_type],
        }
        if batch.old_values is not None:
            options |= {
                "old_values": batch.old_values.squeeze(-1),
                "value_clip": torch.where(self.clip_value == 0, torch.inf, self.clip_value),
                "value_clip_mode": "cleanrl",
            }
        return options

    def _assemble_results(self, policy: ActorOutputs, batch: Minibatch, values: Tensor | None) -> TensorDictBase:
        """Compute the loss, split it into its terms, and add what is logged, in TorchRL's order."""
        head, critic = policy.head, self._describe_critic(batch)
        column = None if values is None else values.squeeze(-1)
        result, gradients = differentiate_loss(head, column, critic)
        connect: Any = KnownGradient.apply
        terms = {"loss_objective": result.policy_loss.clone()}
        if self.entropy_bonus:
            terms["loss_entropy"] = -self.entropy_coeff * result.entropy
        outputs = connect(head._replace(inputs=()), terms, gradients[: len(head.inputs)], *head.inputs)
        terms = dict(zip(terms, outputs, strict=True))
        logged = result if batch.mask is None else self._measure_all_steps(result, policy)
        results = {
            "loss_objective": terms["loss_objective"],
            "clip_fraction": logged.clip_fraction,
            "kl_approx": logged.approx_kl_k1,
        }
        if policy.entropies is not None:
            results["composite_entropy"] = policy.entropies
        if self.entropy_bonus:
            results |= {"entropy": logged.entropy, "loss_entropy": terms["loss_entropy"]}
        if values is not None:
            term = {"loss_critic": self.critic_coeff * result.value_loss}
            (results["loss_critic"],) = connect(None, term, gradients[len(head.inputs) :], column)
            if batch.old_values is not None:
                change, bound = values.detach() - batch.old_values, critic["value_clip"]
                results["value_clip_fraction"] = (change != change.clamp(-bound, bound)).to(change.dtype).mean()
            if self.log_explained_variance:
                targets: Any = batch.targets
                unexplained, total = (x.var(0, correction=0) for x in (targets - values.detach(), targets))
                results["explained_variance"] = 1.0 - unexplained / (total + torch.finfo(total.dtype).eps)
        size = (2 * policy.log_ratios.logsumexp(0) - (2 * policy.log_ratios).logsumexp(0)).exp()  # (Σ r)²/Σ r²
        results |= {
            "ESS": size / len(policy.log_ratios),
            "max_ratio": logged.ratio_max,
            "mean_ratio": logged.ratio_mean,
        }
        return TensorDict(results)

    @torch.no_grad()
    def _measure_all_steps(self, result: PPOLoss, policy: ActorOutputs) -> PPOLoss:
        """What is logged of ratios and entropies, which TorchRL measures in steps that do not count too."""
        log_ratios, ratios = policy.log_ratios, policy.log_ratios.exp()
        entropy = policy.head.inputs[-1]
        if policy.head.kind is not LogProbs:
            entropy = policy.distribution.entropy()
        outside = log_ratios != log_ratios.clamp(*self._clip_bounds)
        return result._replace(
            clip_fraction=outside.to(ratios.dtype).mean(),
            approx_kl_k1=-log_ratios.mean(),
            entropy=entropy.mean(),
            ratio_max=ratios.max(),
            ratio_mean=ratios.mean(),
        )


SHARED = (  # which call methods of the loss as TorchRL's forward does
    *(TritonClipPPOLoss.forward, TritonClipPPOLoss._compute_losses, TritonClipPPOLoss._read_minibatch),
    *(TritonClipPPOLoss._read_mask, TritonClipPPOLoss._evaluate_critic),
)


def require(condition: bool, reason: str) -> None:
    """Raise NotFusedError for this reason unless a condition holds."""
    if not condition:
        raise NotFusedError(reason)


def is_like(x: Any, other: Tensor) -> bool:
    """Whether something is a tensor of another one's shape and dtype."""
    return isinstance(x, Tensor) and x.shape == other.shape and x.dtype == other.dtype
