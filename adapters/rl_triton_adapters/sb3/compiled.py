"""Stable-Baselines3: updates of policies that are MLPs, in compiled code on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from torch import nn

from rl_triton_adapters.common.overrides import find_override, find_own, has_hooks, list_modules
from rl_triton_adapters.common.update import find_reason
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_adapters.sb3.policies import MASKED_LOGIT, explain_head, find_head, list_sizes
from rl_triton_core.compiled import CompiledNetwork, CompiledUpdate, Rollout, draw_actions


class Compiled(NamedTuple):
    """An algorithm's updates and acting in compiled code, and what of its policy they are made of."""

    parts: list[Any]
    update: CompiledUpdate
    acting: CompiledNetwork
    draw: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]

    def is_of(self, policy: Any) -> bool:
        """Whether the policy has all of it still."""
        return all(map(is_, self.parts, list_parts(policy)))


def list_parts(policy: Any) -> list[Any]:
    """Modules of the actor and of the critic behind features, and what else a policy draws and learns with."""
    extractor = getattr(policy, "mlp_extractor", None)
    owners = (extractor, "policy_net"), (policy, "action_net"), (extractor, "value_net"), (policy, "value_net")
    others = ((policy, name) for name in ("log_std", "action_dist", "optimizer"))
    return [getattr(owner, name, None) for owner, name in (*owners, *others)]


def find_compiled(algorithm: Any, asks: bool = True) -> tuple[Compiled | None, str]:
    """What is compiled of an algorithm, and why nothing is; networks that are known ask before they act."""
    policy, device = algorithm.policy, algorithm.device.type
    around, head = ("_make_updates", "_make_step", "_gather_minibatch", "_step_optimizer"), find_head(policy)  # of ours
    reason = f"it is on {device}" if device != "cpu" else find_override(algorithm, around, ("rl_triton_adapters",))
    reason = reason or find_unknown(list_modules(policy), head)
    known, algorithm._compiled = algorithm._compiled, None
    if not reason and (known is None or not known.is_of(policy)):
        parts, sizes = list_parts(policy), list_sizes(policy.action_dist)
        pair = nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:4])
        log_std, kind = policy.log_std if head == "gaussian" else None, str(head).removeprefix("multi")
        nvec = sizes if head == "multicategorical" else None
        update = CompiledUpdate(*pair, policy.optimizer, head=kind, nvec=nvec, log_std=log_std)
        draw = partial(draw_actions, head=kind, sizes=sizes, log_std=log_std)
        known, asks = Compiled(parts, update, CompiledNetwork(*pair), draw), True
    reason = reason or (known.update.find_obstacle() if known is not None and asks else "")
    algorithm._compiled = None if reason else known
    return algorithm._compiled, reason


def find_unknown(modules: list[nn.Module], head: str | None) -> str:
    """Why a policy, the first of its modules, is not two MLPs on flat features; empty if it is."""
    policy: Any = modules[0]
    shared, name = getattr(policy, "share_features_extractor", True), type(policy).__name__
    extractors = [policy.features_extractor] if shared else [policy.pi_features_extractor, policy.vf_features_extractor]
    extracting = next((type(x).__name__ for x in extractors if not is_flat(x)), "")
    if getattr(policy, "use_sde", False):
        return "exploration is state-dependent"
    if head is None:
        return explain_head(policy)
    networks = getattr(policy, "mlp_extractor", nn.Identity())
    known = [x for part in (networks, policy.action_net, policy.value_net) for x in part.parameters()]
    known += [policy.log_std] if head == "gaussian" else []
    parameters = [*policy.parameters()]
    is_stale = any(x.grad is not None and not x.requires_grad for x in parameters)
    reason = find_reason(
        {
            f"{name} has no MlpExtractor of Stable-Baselines3": type(networks) is not MlpExtractor,
            f"{extracting} extracts features": extracting,
            f"{name} has further parameters": not {*map(id, known)}.issuperset(map(id, parameters)),
            "a frozen parameter has a gradient": is_stale,
            "a module has hooks": any(map(has_hooks, modules)),
        }
    )
    return reason or find_own(modules, [type(policy).extract_features, MlpExtractor.forward], PACKAGES)


def is_flat(extractor: nn.Module) -> bool:
    """Whether features are the observations, flattened and side by side."""
    if type(extractor) is CombinedExtractor:
        return all(type(x) is nn.Flatten for x in extractor.extractors.values())
    return type(extractor) is FlattenExtractor and type(extractor.flatten) is nn.Flatten


def find_features(policy: Any, observations: Any) -> torch.Tensor:
    """What both networks take."""
    features = policy.extract_features(observations)
    return features if policy.share_features_extractor else features[0]  # type: ignore[no-any-return]


def act(algorithm: Any, observations: Any, action_masks: Any = None, values_alone: bool = False) -> Any:
    """Return what the policy's `forward` does, or values alone; None if that is not compiled now, or for NaN."""
    policy, compiled, space = algorithm.policy, algorithm._compiled, algorithm.observation_space
    is_row = isinstance(space, spaces.Box) and len(space.shape) == 1
    features = observations if is_row else find_features(policy, observations)
    try:
        outputs = compiled.acting(features.numpy())
    except ValueError:  # something has changed meanwhile
        return None
    values = torch.from_numpy(outputs[:, -1:])
    if values_alone:
        return values
    if action_masks is not None:
        if not hasattr(policy.action_dist, "apply_masking"):
            return None
        allowed = np.asarray(action_masks).reshape(len(outputs), -1).astype(bool)
        outputs[:, :-1][~(allowed | np.isnan(outputs[:, :-1]))] = MASKED_LOGIT
    actions, log_probs = compiled.draw(outputs)
    return None if log_probs.isnan().any() else (actions.view(-1, *policy.action_space.shape), values, log_probs)


def run_compiled(algorithm: Any, size: int, num_epochs: int, **numbers: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Make all steps of an update; return the minibatches of each epoch, and their statistics."""
    minibatches: list[Any] = []
    with torch.no_grad():
        features = find_features(algorithm.policy, algorithm._rollout["observations"])
    others = map(algorithm._rollout.get, ("advantages", "returns", "log_probs", "values", "action_masks"))
    rollout = Rollout(features, algorithm._rollout["actions"].reshape(len(features), -1), *others)

    def draw_orders() -> Iterator[torch.Tensor]:
        for epoch in range(num_epochs):
            algorithm._n_updates += bool(epoch)  # the one before is over
            order = algorithm._draw_permutation()
            minibatches.append(torch.split(order, size))
            yield order

    epochs = algorithm._compiled.update.run(
        rollout,
        draw_orders(),
        size,
        value_coef=algorithm.vf_coef,
        entropy_coef=algorithm.ent_coef,
        max_grad_norm=float(algorithm.max_grad_norm),
        normalize_advantages=bool(algorithm.normalize_advantage),
        **numbers,
    )
    return minibatches, epochs
