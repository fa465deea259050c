"""RSL-RL 3, whose update is its own, and what differs between versions."""

from inspect import signature
from typing import Any

from rsl_rl.algorithms import PPO

from rl_triton_adapters.common.update import CapturedUpdate

if "obs" not in signature(PPO.compute_returns).parameters:
    raise ImportError("its PPO takes observations of the critic apart")
PACKAGES = ("rsl_rl",)
# `compute_returns` gives a recurrent critic its hidden state back, from 5.4 on.
RETURNS_KEEP_STATE = "get_hidden_state" in PPO.compute_returns.__code__.co_names
# `update`, not `process_env_step`, counts observations for their normalisation, from 5.5 on.
UPDATE_NORMALIZES = "update_normalization" in PPO.update.__code__.co_names


class OwnUpdate(CapturedUpdate):
    """The steps of an algorithm, which are RSL-RL's own."""

    whose = "those of RSL-RL"

    def __init__(self, alg: Any, *_: Any) -> None:
        super().__init__(alg.update)
        self.alg = alg

    def prepare(self) -> None:
        """Find out why."""
        stock = "versions before 4 have another one" if self.alg.enabled else "switched off"
        self.find_step([self.alg.policy], [self.alg.optimizer], stock=stock)
