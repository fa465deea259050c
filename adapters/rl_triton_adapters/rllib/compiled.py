"""RLlib: updates of PPO's modules that are MLPs, in compiled code on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from gymnasium.spaces import Box
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.torch.encoder import TorchActorCriticEncoder, TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead
from ray.rllib.core.models.torch.primitives import TorchMLP
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor, nn

from rl_triton_adapters.common.overrides import find_own, find_replaced, has_hooks, list_modules, list_stock
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.rllib.loss import FusedLoss
from rl_triton_core.compiled import CompiledUpdate, Rollout

PACKAGES = ("ray",)
PARTS = TorchMLPEncoder, TorchMLPHead, TorchFreeLogStdMLPHead
SLOTS = Columns.OBS, Columns.ACTIONS, Postprocessing.ADVANTAGES, Postprocessing.VALUE_TARGETS, Columns.ACTION_LOGP
"""The first columns of a rollout."""


def find_compiled(learner: Any, loss: Any, names: Iterable[str]) -> tuple[dict[str, CompiledUpdate], str]:
    """The compiled updates of modules by name, and why there are none."""
    modules = {name: learner.module[name].unwrapped() for name in names}
    parameters = [id(x) for module in modules.values() for x in module.parameters()]
    stock = list_stock(type(learner.module), "forward_train", PACKAGES)
    reason = find_own([learner.module], stock, PACKAGES) or find_reason(
        {
            f"it is on {learner._device.type}": learner._device.type != "cpu",
            "the loss is not that of PPO": loss is None,
            "several learners average their gradients": learner.config.num_learners > 1,
            "torch_skip_nan_gradients is on": learner.config.torch_skip_nan_gradients,
            "modules share parameters": len({*parameters}) < len(parameters),
        }
    )
    updates: dict[str, CompiledUpdate] = {}
    for name, module in () if reason else modules.items():
        unknown = find_unknown(learner, name, module)
        if not unknown:
            updates[name] = build_update(learner, name, module, loss)
            unknown = updates[name].find_obstacle()
        if unknown:
            return {}, f"{name}: {unknown}"
    return updates, reason


def find_unknown(learner: Any, name: str, module: Any) -> str:
    """Why a module is not two MLPs, or its loss and optimizer are not known; empty if all are."""
    kind, optimizers = type(module).__name__, learner._module_optimizers.get(name, ())
    return find_unlike(module, "_forward_train", "compute_values") or find_reason(
        {
            "the loss has no critic": not learner.config.get_config_for_module(name).use_critic,
            f"{kind} has {len(optimizers)} optimizers": len(optimizers) != 1,
            f"{kind} clips logits": not isinstance(module.action_space, Box)
            and getattr(module.pi, "clip_log_std", False),
        }
    )


def find_unlike(module: Any, *names: str) -> str:
    """Why a module is not RLlib's of PPO, of MLPs, with its methods of these names; empty if it is."""
    kind, parts = type(module).__name__, list_modules(module)
    called = [y for x in names for y in list_stock(type(module), x, PACKAGES)]
    if not isinstance(module, DefaultPPOTorchRLModule) or type(module.encoder) is not TorchActorCriticEncoder:
        return f"{kind} is not RLlib's module of PPO"
    wrong = [type(x).__name__ for x in list_networks(module) if type(x) not in PARTS or type(x.net) is not TorchMLP]
    reasons = {f"{kind} has a {''.join(wrong[:1])}": wrong, "a module has hooks": any(map(has_hooks, parts))}
    return find_own(parts, called, PACKAGES) or find_reason(reasons) or find_replaced(called, parts, PACKAGES)


def list_networks(module: Any) -> list[Any]:
    """The encoder and the head of the actor, and those of the critic."""
    encoder = module.encoder
    parts = (encoder.encoder,) * 2 if encoder.config.shared else (encoder.actor_encoder, encoder.critic_encoder)
    return [parts[0], module.pi, parts[1], module.vf] if hasattr(module, "vf") else [parts[0], module.pi]


def build_update(learner: Any, name: str, module: Any, loss: FusedLoss) -> CompiledUpdate:
    """The compiled update of a module that is known."""
    head, pi, networks = loss.find_head(name), module.pi, [x.net.mlp for x in list_networks(module)]
    assert head is not None
    return CompiledUpdate(
        nn.Sequential(*networks[:2]),
        nn.Sequential(*networks[2:]),
        learner.get_optimizer(name, *learner._module_optimizers[name]),
        head="categorical" if head else "gaussian",
        nvec=head or None,
        log_std=None if head else getattr(pi, "log_std", None),
        log_std_bound=float(pi.log_std_clip_param_const) if pi.clip_log_std else math.inf,
        value_clip_mode="rllib",
        has_kl=learner.config.get_config_for_module(name).use_kl_loss,
    )


def run_compiled(learner: Any, name: str, update: CompiledUpdate, columns: Any, minibatches: list[Tensor]) -> int:
    """Make the steps of a module with minibatches of its slots; return how often gradients were not finite."""
    config, rows = learner.config.get_config_for_module(name), torch.stack(minibatches)
    counted = columns.get(Columns.LOSS_MASK, torch.ones(len(columns), dtype=torch.bool))[rows]
    waiting = iter(torch.split(rows[counted], counted.sum(1).tolist()))
    features, actions, *others = (columns[x] for x in SLOTS)
    rollout = Rollout(features, actions.reshape(len(columns), -1), *others)
    results = update.run(
        rollout._replace(old_outputs=columns[Columns.ACTION_DIST_INPUTS]),
        iter(lambda: [*islice(waiting, -(-len(columns) // rows.shape[1]))], []),  # an interrupt ends it after an epoch
        clip=config.clip_param,
        value_clip=config.vf_clip_param,
        value_coef=config.vf_loss_coeff,
        entropy_coef=float(learner.entropy_coeff_schedulers_per_module[name].get_current_value()),
        kl_coef=float(learner.curr_kl_coeffs_per_module[name]) if config.use_kl_loss else 0.0,
        max_grad_norm=config.grad_clip or math.inf,
        grad_clip_mode=config.grad_clip_by,
        replace_nan=True,
    )
    return sum(int((~epoch[:, -2].isfinite()).sum()) for epoch in results)
