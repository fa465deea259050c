"""RSL-RL 3 and 4, whose update is its own, and what differs between versions."""

from inspect import signature
from typing import Any

from rl_triton_adapters.common.update import CapturedUpdate, find_reason

# isort: split
from rsl_rl.algorithms import PPO

if "obs" not in signature(PPO.compute_returns).parameters:
    raise ImportError("its PPO takes observations of the critic apart")
PACKAGES = ("rsl_rl",)
RETURNS_KEEP_STATE = "get_hidden_state" in PPO.compute_returns.__code__.co_names
"""Whether `compute_returns` gives a recurrent critic its hidden state back, as RSL-RL does from 5.4 on."""
UPDATE_NORMALIZES = "update_normalization" in PPO.update.__code__.co_names
"""Whether observations are counted for normalisation by `update`, of the whole rollout, as RSL-RL does from 5.5 on.
Before, `process_env_step` counts them."""


class OwnUpdate(CapturedUpdate):
    """The steps of an algorithm, which are RSL-RL's own."""

    whose = "those of RSL-RL"

    def __init__(self, alg: Any, *_: Any) -> None:
        super().__init__(alg.update)
        self.alg = alg

    def prepare(self) -> None:
        """Find out why."""
        alg = self.alg
        models = [alg.policy] if hasattr(alg, "policy") else [alg.actor, alg.critic]
        stock = find_reason({"switched off": not alg.enabled, "versions before 5 have another one": True})
        self.find_step(models, [alg.optimizer], stock=stock)
