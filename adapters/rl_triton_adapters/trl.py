"""TRL: `GRPOTrainer` with log-probabilities, and the gradient of the loss by them, from `rl_triton_core`.

from rl_triton_adapters.trl import TritonGRPOTrainer
"""

# mypy: allow-subclassing-any, allow-untyped-calls

import copy
import math
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.common.switch import find_off_switch, replace_stock
from rl_triton_adapters.common.update import Deferral, read_numbers
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core.extending import warn
from rl_triton_core.losses import grpo_loss, linear_token_log_probs

with explained_import(__name__, "trl", "1.15.0"):
    from trl.trainer import grpo_trainer, utils
    from trl.trainer.grpo_trainer import GRPOTrainer  # `trl` would keep it, whatever takes its place here
    from trl.trainer.utils import add_fused_lm_head  # noqa: F401

__all__ = ["TritonGRPOTrainer"]

STOCK = utils._ChunkedLogProbFunction
AGGREGATIONS = {"bnpo": "token-mean", "dr_grpo": "sequence-sum", "luspo": "sequence-sum"}
AGGREGATIONS |= {"grpo": "sequence-mean", "sapo": "sequence-mean"}
"""Of losses that are not divided by the number of tokens in all processes."""


def compute_log_probs(hidden: Any, weight: Any, bias: Any, tokens: Tensor, temperature: float, *args: Any) -> Any:
    """Log-probabilities and entropies as from TRL's function of the last layer, which runs where it does more."""
    _, softcap, scale, outputs = args
    is_gathered = hasattr(weight, "ds_id")  # by DeepSpeed, for this call alone
    if softcap is not None or not scale > 0 or is_gathered or not {"log_probs", "entropy"}.issuperset(outputs):
        return STOCK.apply(hidden, weight, bias, tokens, temperature, *args)
    weight, bias = (None if x is None else x.to(hidden.dtype) for x in (weight, bias))
    options = {"temperature": temperature / scale, "entropy": "entropy" in outputs}
    options["chunk"] = 1024  # with more, a step takes as long, and more memory
    return *linear_token_log_probs(hidden, weight, tokens, bias=bias, **options), None, None, None


def nanmax(x: Tensor) -> Tensor:
    """The largest number, NaN if there is none: TRL's waits for how many there are."""
    return torch.where(x.isnan().all(), math.nan, x.nan_to_num(-math.inf, math.inf, -math.inf).max())


PLACES = [
    (utils, "_ChunkedLogProbFunction", STOCK, SimpleNamespace(apply=compute_log_probs)),
    (grpo_trainer, "nanmax", grpo_trainer.nanmax, nanmax),
    (grpo_trainer, "nanmin", grpo_trainer.nanmin, lambda x: -nanmax(-x)),
]
"""Where TRL finds the functions of this module."""


class TritonGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with log-probabilities from hidden states, and one pass for the gradient of the loss by them.

    The loss and the metrics are TRL's, computed without a graph; metrics become numbers in `log`. Before the first
    step, and whenever a setting has changed, both gradients are compared for drawn numbers. Where they differ, or a
    class has its own loss, TRL's gradient is taken, and a warning says why.
    """

    _pass: Any = None  # log-probabilities and more of the loss that TRL computes, and what multiplies losses of tokens
    _verdict: tuple[Any, str] = None, ""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        known = self._pass
        if known is not None and known.found is not None:
            return known.found
        with ExitStack() if known is not None or find_off_switch() else replace_stock(PLACES):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if known is None:
            return found
        known.found = found
        known.stack.enter_context(Deferral())
        return found[0].detach(), *found[1:]

    for _factor in ("get_off_policy_mask", "get_high_entropy_mask", "get_gamma_weights"):

        def _keep(self, *args: Any, _factor: str = _factor, **kwargs: Any) -> Any:
            found = getattr(super(), _factor)(*args, **kwargs)
            if self._pass is not None:
                self._pass.factors.append(found)
            return found

        locals()[_factor] = _keep

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if find_off_switch() or not torch.is_grad_enabled() or self._find_reason(inputs):
            return super()._compute_loss(model, inputs)
        self._pass = known = SimpleNamespace(found=None, factors=[], stack=ExitStack())
        floats = [name for name, x in vars(self).items() if isinstance(x, float)]
        try:
            with replace_stock(PLACES), known.stack:
                loss = super()._compute_loss(model, inputs)
        finally:
            self._pass = None
        self.__dict__.update({name: float(getattr(self, name)) for name in floats})
        ours = self._compute_own_loss(inputs, known)
        return loss + (ours - ours.detach())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As of `GRPOTrainer`, which gets numbers."""
        for metrics in self._metrics.values():
            metrics.update({name: read_numbers(values) for name, values in metrics.items()})
        super().log(logs, *args, **kwargs)

    def _compute_own_loss(self, inputs: Any, known: Any, **options: Any) -> Tensor:
        """The same loss from `grpo_loss`, but for what depends on entropies or experts."""
        log_probs, mask = known.found[0], inputs["completion_mask"] * inputs.get("tool_mask", 1)
        weights = math.prod(known.factors, start=torch.ones_like(log_probs, requires_grad=False))
        if self.loss_type != "vespo":  # which has it in its factor
            weights = weights * inputs.get("importance_sampling_ratio", 1)
        counts = {"bnpo": mask.sum().clamp(min=1), "dr_grpo": len(mask) * self.max_completion_length}
        count: Any = counts.get(self.loss_type, len(mask))
        if self.loss_type not in AGGREGATIONS:
            share = self.accelerator.num_processes * self.args.steps_per_generation
            count = inputs["num_items_in_batch"].clamp(min=1) / share
        options |= {"ref_log_probs": inputs["ref_per_token_logps"]} if self.beta else {}
        options |= {"normalizer": count * self.current_gradient_accumulation_steps, "weights": weights, "mask": mask}
        old, advantages = inputs.get("old_per_token_logps"), inputs["advantages"]
        return grpo_loss(log_probs, old, advantages, **options, **self._choose_options()).loss

    def _choose_options(self) -> dict[str, Any]:
        """Arguments of `grpo_loss` that the settings choose."""
        args, high, delta = self.args, self.epsilon_high, self.args.delta
        options = {"ratio": self.importance_sampling_level, "kl_coef": self.beta}
        options["kl_times_ratio"] = bool(args.use_bias_correction_kl and self.beta)
        options["aggregation"] = AGGREGATIONS.get(self.loss_type, "token-mean")
        if delta is not None:
            high, options["dual_clip"] = min(high, delta - 1), max(delta, 1 + high)
        others: dict[str, dict[str, Any]] = {
            "cispo": {"surrogate": "cispo", "clip": None, "clip_high": self.epsilon_high - 1},
            "sapo": {"surrogate": "sapo", "tau": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg},
            "vespo": {"surrogate": "reinforce"},
        }
        return options | others.get(self.loss_type, {"clip": self.epsilon_low, "clip_high": high})

    def _find_reason(self, inputs: Any) -> str:
        """Why TRL's gradient is taken; empty if ours is."""
        names, packages = ("_compute_loss", "_get_per_token_logps_and_entropies"), ("trl", "rl_triton_adapters")
        own = find_override(self, names, packages) or find_override(self, names, packages, behind=TritonGRPOTrainer)
        key = own, {*inputs}, inputs["advantages"].ndim, self.loss_type, self._choose_options()
        if key != self._verdict[0]:
            self._verdict = key, own or self._compare_gradients(inputs)
            if self._verdict[1]:
                warn(f"TritonGRPOTrainer takes TRL's gradient: {self._verdict[1]}", RuntimeWarning)
        return self._verdict[1]

    def _compare_gradients(self, inputs: Any) -> str:
        """Say that TRL's loss has another gradient than ours, for drawn numbers in the place of the batch's."""
        device, length = self.accelerator.device, inputs["completion_mask"].shape[1]
        options = {"generator": torch.Generator(device).manual_seed(0), "dtype": torch.float64, "device": device}
        log_probs, entropies = torch.randn(2, 8, 16, **options).exp()
        log_probs, made = (-log_probs).requires_grad_(), {**inputs}
        for name in [name for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim]:
            x = torch.randn(8, *(16 if n == length else n for n in inputs[name].shape[1:]), **options)
            made[name] = (x > -1).long() if name.endswith("mask") else x.exp() if name.endswith("ratio") else x
            if name.endswith("_per_token_logps"):
                made[name] = log_probs.detach() + x + x[:, :1]
        other = copy.copy(self)
        other._metrics = {name: defaultdict(list) for name in self._metrics}
        other._pass = known = SimpleNamespace(found=(log_probs, entropies, entropies[0, 0]), factors=[])
        try:
            stock = super(TritonGRPOTrainer, other)._compute_loss(None, made)
            ours = other._compute_own_loss(made, known, backend="reference")
        except (TypeError, ValueError) as error:
            return str(error)
        wanted, got = (torch.autograd.grad(x, log_probs)[0] for x in (stock, ours))
        return "" if (got - wanted).abs().max() <= 1e-6 * wanted.abs().max() else "it is another one than ours"
