"""TorchRL: `ClipPPOLoss` whose objective and critic's term `rl_triton_core.losses` computes in one pass.

    loss = TritonClipPPOLoss(actor, critic)

Networks, keys, value estimators and schedules are TorchRL's own, and so is the whole loss where an option or a
distribution asks for what the pass does not compute.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal

from rl_triton_adapters.common.overrides import find_override, find_own, find_replaced
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core.losses import Gaussian, MultiCategorical, Policy, PPOLoss, get_gradients, ppo_loss

with explained_import(__name__, "torchrl", "0.14"):
    from tensordict import TensorDict, TensorDictBase
    from tensordict.nn import dispatch
    from torchrl.modules import IndependentNormal, MaskedCategorical, OneHotCategorical
    from torchrl.objectives import ClipPPOLoss

__all__ = ["TritonClipPPOLoss"]

DISTANCES = {"smooth_l1": 1.0, "l2": None}
"""Where the error of a value becomes linear, if it does, by TorchRL's `loss_critic_type`."""
KNOWN = (Categorical, OneHotCategorical, MaskedCategorical, Normal, Independent, IndependentNormal)
"""The distributions whose parameters the pass takes."""
PACKAGES = ("torchrl",)
ASKED_EVERY = 64  # calls of a loss, whether functions of libraries were replaced
PRECISIONS = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32,)}
"""What the pass computes in, by the type of the device."""

# -- terms -------------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """How the pass takes a distribution: what makes a policy of it, of which parameters, and the actions."""

    kind: Callable[..., Policy]
    inputs: tuple[Tensor, ...]
    actions: Tensor


def choose_head(distribution: Any, actions: Any, shape: torch.Size) -> Head | None:
    """Choose how the pass takes a distribution's parameters, for log-probabilities of a shape, if it does."""
    kind = type(distribution)
    if kind in KNOWN[:2] or (kind is MaskedCategorical and not distribution._sparse_mask):
        indices = actions.argmax(dim=-1) if kind is OneHotCategorical else actions.long()
        if distribution.logits.shape[:-1] == indices.shape == shape:
            return Head(MultiCategorical, (distribution.logits,), indices)
    if kind in (Independent, IndependentNormal) and type(distribution.base_dist) is Normal:
        mean, scale = distribution.base_dist.loc, distribution.base_dist.scale
        if mean.shape == scale.shape == actions.shape and mean.shape[:-1] == shape:
            return Head(Gaussian, (mean, scale.log()), actions if actions.is_floating_point() else actions.to(mean))
    return None


def differentiate_loss(
    head: Head, values: Tensor | None, options: dict[str, Any]
) -> tuple[PPOLoss, Sequence[Tensor | None]]:
    """Compute a loss, and its gradients by the head's inputs and by values, if there are any, that require one."""
    given = head.inputs if values is None else (*head.inputs, values)
    leaves = [x.detach().requires_grad_(torch.is_grad_enabled() and x.requires_grad) for x in given]
    policy, column = head.kind(*leaves[: len(head.inputs)]), None if values is None else leaves[-1]
    result = ppo_loss(policy, head.actions, values=column, **options)
    return result, get_gradients(result.loss) if result.loss.requires_grad else [None] * len(leaves)


class KnownGradient(torch.autograd.Function):
    """A term of a loss, with its gradients by the inputs."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        """Return the term. Nothing is kept that a backward pass frees."""
        ctx.gradients = gradients[: len(inputs)]
        return term.clone()

    @staticmethod
    def backward(ctx: Any, by_term: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since the losses have no second derivative")
        return None, None, *(None if x is None else x * by_term for x in ctx.gradients)


# -- the loss ----------------------------------------------------------------------------------------------------------


class NotFusedError(Exception):
    """The pass cannot take a minibatch, or what the networks make of it; the message says why."""


class TritonClipPPOLoss(ClipPPOLoss):
    """`ClipPPOLoss` of TorchRL, with its arguments, keys, results and gradients; one pass computes two of its terms.

    The pass takes the parameters of a categorical distribution, also a masked or a one-hot one, and of independent
    normal ones. Nothing is read from a GPU.

    TorchRL's own operations compute the loss of other distributions; under torch.compile; of minibatches with masks;
    with dtypes other than float32, or float64 on a CPU; with shapes other than one number per step; with gradients that
    flow to advantages or targets; with methods of a subclass; and with these arguments: a `reduction` other than
    "mean", `loss_critic_type="l1"`, `advantage_norm`, `delay_actor`, `max_importance_ratio`, a mapping as
    `entropy_coeff`.
    """

    reason: str = ""
    """Why TorchRL's operations computed the last loss; empty if the pass did."""
    _asked = -1, ""
    _unknown = ""  # what of the actor's distribution the pass does not take; kept, so that the networks run once

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
            self._unknown: self._unknown,
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

    def _read_minibatch(self, tensordict: TensorDictBase) -> list[Tensor | None]:
        """Advantages, which are estimated if there are none, value targets and old values, if the critic takes them."""
        keys = self.tensor_keys
        require(all(tensordict.get(key, None) is None for key in self._loss_mask_keys()), "there is a mask")
        if tensordict.get(keys.advantage, None) is None and self.critic_network is not None:
            params, targets = self._cached_critic_network_params_detached, self.target_critic_network_params
            self.value_estimator(tensordict, params=params, target_params=targets)
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
        return [*found, None, None][:3]

    def _compute_losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the results, in TorchRL's order, or raise NotFusedError."""
        found, keys = self._read_minibatch(tensordict), self.tensor_keys
        advantages: Any = self._maybe_normalize_advantage(found[0], tensordict, update_norm=False)
        log_weights, distribution, *_ = self._log_weight(tensordict, adv_shape=advantages.shape[:-1])
        head = None
        if is_like(log_weights, advantages) and not isinstance(keys.action, list):
            head = choose_head(distribution, tensordict.get(keys.action), advantages.shape[:-1])
        if head is None:
            self._unknown = f"actions are of {type(distribution).__name__}, or of another shape than advantages"
            raise NotFusedError(self._unknown)
        clip, clip_high = self._get_clip_range()
        options = {"advantages": advantages.squeeze(-1), "clip": clip, "clip_high": clip_high}
        options["old_log_probs"] = tensordict.get(keys.sample_log_prob)
        column, measured = None, dict[str, Tensor]()
        if self._has_critic:
            column, described, measured = self._evaluate_critic(tensordict, advantages, *found[1:])
            options |= described
        result, gradients = differentiate_loss(head, column, options)
        connect: Any = KnownGradient.apply
        results = {
            "loss_objective": connect(result.policy_loss, gradients, *head.inputs),
            "clip_fraction": result.clip_fraction,
            "kl_approx": result.approx_kl_k1,
        }
        if self.entropy_bonus:
            entropy = distribution.entropy().mean()
            results |= {"entropy": entropy.detach(), "loss_entropy": -self.entropy_coeff * entropy}
        if column is not None:
            term = self.critic_coeff * result.value_loss
            results |= {"loss_critic": connect(term, gradients[-1:], column)} | measured
        log_ratios = log_weights.detach().squeeze(-1)
        size = (2 * log_ratios.logsumexp(0) - (2 * log_ratios).logsumexp(0)).exp()  # (Σ r)²/Σ r²
        results |= {"ESS": size / len(log_ratios), "max_ratio": result.ratio_max, "mean_ratio": result.ratio_mean}
        return TensorDict(results)

    def _evaluate_critic(
        self, tensordict: TensorDictBase, advantages: Any, targets: Any, old_values: Any
    ) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:
        """Values as of `loss_critic`, what `ppo_loss` takes for the critic's term, and what is logged of values."""
        if self.separate_losses:
            tensordict = tensordict.detach()
        parameters: Any = nullcontext()
        if self.functional:
            parameters = self.critic_network_params.to_module(self.critic_network, preserve_module_state=False)
        with parameters:
            values = self.critic_network(tensordict).get(self.tensor_keys.value)
        require(is_like(values, advantages), "values have another shape or dtype than advantages")
        targets, values, old_values = self._critic_loss_inputs(targets, values, old_values)
        options = {"returns": targets.squeeze(-1), "value_coef": self.critic_coeff}
        options["huber_delta"] = DISTANCES[self.loss_critic_type]
        measured = {}
        if old_values is not None:
            clip = torch.where(self.clip_value == 0, torch.inf, self.clip_value)
            options |= {"old_values": old_values.squeeze(-1), "value_clip": clip, "value_clip_mode": "cleanrl"}
            change = values.detach() - old_values
            measured["value_clip_fraction"] = (change != change.clamp(-clip, clip)).to(change.dtype).mean()
        if self.log_explained_variance:
            unexplained, total = (x.var(0, correction=0) for x in (targets - values.detach(), targets))
            measured["explained_variance"] = 1.0 - unexplained / (total + torch.finfo(total.dtype).eps)
        return values.squeeze(-1), options, measured


SHARED = (  # which call methods of the loss as TorchRL's forward does
    *(TritonClipPPOLoss.forward, TritonClipPPOLoss._compute_losses),
    *(TritonClipPPOLoss._read_minibatch, TritonClipPPOLoss._evaluate_critic),
)


def require(condition: bool, reason: str) -> None:
    """Raise NotFusedError for this reason unless a condition holds."""
    if not condition:
        raise NotFusedError(reason)


def is_like(x: Any, other: Tensor) -> bool:
    """Whether something is a tensor of another one's shape and dtype."""
    return isinstance(x, Tensor) and x.shape == other.shape and x.dtype == other.dtype
