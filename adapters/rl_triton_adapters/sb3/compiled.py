"""Stable-Baselines3: updates of policies that are perceptrons, in compiled code on the CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rl_triton_adapters.common.overrides import find_override, find_own, has_hooks, list_modules
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_adapters.sb3.policies import EXTRACTING, explain_head, find_head, list_sizes
from rl_triton_core.compiled import CompiledUpdate, Rollout
from rl_triton_core.extending import say

# isort: split
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor


def find_compiled(algorithm: Any) -> tuple[CompiledUpdate | None, str]:
    """The compiled update of an algorithm, and why there is none."""
    policy, head = algorithm.policy, find_head(algorithm.policy)
    reason = find_reason({f"it is on {algorithm.device.type}": algorithm.device.type != "cpu"})
    around = "_make_updates", "_make_step", "_gather_minibatch", "_step_optimizer"  # of ours
    reason = reason or find_override(algorithm, around, ("rl_triton_adapters",))
    reason = reason or find_unknown(list_modules(policy), head)
    if reason:
        return None, reason
    extractor = policy.mlp_extractor
    update = CompiledUpdate(
        nn.Sequential(extractor.policy_net, policy.action_net),
        nn.Sequential(extractor.value_net, policy.value_net),
        policy.optimizer,
        head="categorical" if head == "multicategorical" else str(head),
        nvec=list_sizes(policy.action_dist) if head == "multicategorical" else None,
        log_std=policy.log_std if head == "gaussian" else None,
    )
    reason = update.find_obstacle()
    return (None, reason) if reason else (update, "")


def find_unknown(modules: list[nn.Module], head: str | None) -> str:
    """Why a policy, the first of its modules, is not two perceptrons behind flat features; empty if it is."""
    policy: Any = modules[0]
    shared, name = getattr(policy, "share_features_extractor", True), type(policy).__name__
    extractors = [policy.features_extractor] if shared else [policy.pi_features_extractor, policy.vf_features_extractor]
    extracting = next((type(x).__name__ for x in extractors if not is_flat(x)), "")
    if getattr(policy, "use_sde", False):
        return "exploration is state-dependent"
    if head is None:
        return explain_head(policy)
    networks = getattr(policy, "mlp_extractor", nn.Identity())
    owned = [x for part in (networks, policy.action_net, policy.value_net) for x in list_modules(part)]
    known = {id(x) for x in list_own_parameters(owned)} | {id(policy.log_std) if head == "gaussian" else 0}
    parameters = {id(x): x for x in list_own_parameters(modules)}
    is_stale = any(x.grad is not None and not x.requires_grad for x in parameters.values())
    reason = find_reason(
        {
            f"{name} has no MlpExtractor of Stable-Baselines3": type(networks) is not MlpExtractor,
            f"{extracting} extracts features": extracting,
            f"{name} has further parameters": not known.issuperset(parameters),
            "a frozen parameter has a gradient": is_stale,
            "a module has hooks": any(map(has_hooks, modules)),
        }
    )
    return reason or find_own(modules, [type(policy).extract_features, *EXTRACTING], PACKAGES)


def list_own_parameters(modules: list[nn.Module]) -> list[Any]:
    """The parameters of modules, without those of modules in them."""
    return [x for module in modules for x in module._parameters.values() if x is not None]


def is_flat(extractor: nn.Module) -> bool:
    """Whether features are the observations, flattened and side by side."""
    if type(extractor) is CombinedExtractor:
        return all(type(x) is nn.Flatten for x in extractor.extractors.values())
    return type(extractor) is FlattenExtractor and type(extractor.flatten) is nn.Flatten


def compile_update(algorithm: Any) -> bool:
    """Compile an algorithm's update or load it, and say so if that takes long; whether there is one."""
    update, _ = find_compiled(algorithm)
    if update is not None:
        seconds = update.compile()
        if seconds > 1 and algorithm.verbose >= 1:
            say(f"Compiled the update in {seconds:.1f} s; other processes load it from disk")
    return update is not None


@torch.no_grad()
def view_rollout(algorithm: Any) -> Rollout:
    """The samples of an algorithm's rollout."""
    samples, policy = algorithm._rollout, algorithm.policy
    features = policy.extract_features(samples["observations"])
    features = features if policy.share_features_extractor else features[0]
    actions, masks = samples["actions"].reshape(len(features), -1), samples.get("action_masks")
    advantages, returns, log_probs, values = (samples[x] for x in ("advantages", "returns", "log_probs", "values"))
    return Rollout(features, actions, advantages, returns, log_probs, values, masks)


def run_compiled(
    algorithm: Any, update: CompiledUpdate, size: int, num_epochs: int, **numbers: Any
) -> tuple[list[Any], list[torch.Tensor]]:
    """Make all steps of an update; return the minibatches of each epoch, and their statistics."""
    minibatches: list[Any] = []

    def draw_orders() -> Iterator[torch.Tensor]:
        for epoch in range(num_epochs):
            algorithm._n_updates += bool(epoch)  # the one before is over
            order = algorithm._draw_permutation()
            minibatches.append(torch.split(order, size))
            yield order

    epochs = update.run(
        view_rollout(algorithm),
        draw_orders(),
        size,
        value_coef=algorithm.vf_coef,
        entropy_coef=algorithm.ent_coef,
        max_grad_norm=float(algorithm.max_grad_norm),
        normalize_advantages=bool(algorithm.normalize_advantage),
        **numbers,
    )
    return minibatches, epochs
