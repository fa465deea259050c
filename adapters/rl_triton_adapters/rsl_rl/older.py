"""What differs between versions of RSL-RL: what older ones have, by the names and in the shape of newer ones."""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any

from rsl_rl import modules
from rsl_rl.algorithms import PPO
from torch import Tensor, nn, no_grad

if "obs" not in signature(PPO.compute_returns).parameters:
    raise ImportError("its PPO takes observations of the critic apart")
PACKAGES = ("rsl_rl",)
# `compute_returns` gives a recurrent critic its hidden state back, from 5.4 on.
RETURNS_KEEP_STATE = "get_hidden_state" in PPO.compute_returns.__code__.co_names
# `update`, not `process_env_step`, counts observations for their normalisation, from 5.5 on.
UPDATE_NORMALIZES = "update_normalization" in PPO.update.__code__.co_names
# What `update` calls the loss of values, up to 3.1, and a policy's states.
VALUE = "value_function" if "'value_function'" in repr(PPO.update.__code__.co_consts) else "value"
STATES = "hidden_states" if "'hidden_states'" in repr(PPO.update.__code__.co_consts) else "hidden_state"


class Part:
    """The actor or the critic of RSL-RL 3, whose policy is both, as a model of RSL-RL 4."""

    def __init__(self, policy: Any, role: str) -> None:
        self.policy, self.role = policy, role
        self.names = {"mlp": role, "rnn": f"memory_{role[0]}", "get_output_log_prob": "get_actions_log_prob"}
        self.names |= {"output_entropy": "entropy", "output_mean": "action_mean", "output_std": "action_std"}
        self.names |= {"_update_distribution": "update_distribution"} if hasattr(policy, "update_distribution") else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, self.names.get(name, name))

    def __call__(self, observations: Any, stochastic_output: bool = False, **given: Any) -> Any:
        """Values, or actions: drawn, or means."""
        given = {STATES if name == "hidden_state" else name: x for name, x in given.items()}
        if self.role == "critic":
            return self.policy.evaluate(observations, **given)
        act = self.policy.act if stochastic_output else self.policy.act_inference
        return act(observations, **given)

    def get_latent(self, observations: Any) -> Any:
        """What the layers of a recurrent one are given."""
        gather, normalize = (getattr(self.policy, x) for x in (f"get_{self.role}_obs", f"{self.role}_obs_normalizer"))
        return normalize(gather(observations))


MODELS: Any = import_module("rsl_rl.models" if find_spec("rsl_rl.models") else "rsl_rl.networks")
MLPModel: Any = getattr(MODELS, "MLPModel", Part)
RNNModel: Any = getattr(MODELS, "RNNModel", None) or modules.ActorCriticRecurrent
RNN: Any = getattr(modules, "RNN", None) or MODELS.Memory


class Symmetry(SimpleNamespace):
    """Mirrored samples as the update has them up to 5.3, from their settings."""

    mirror_loss_coeff = 0.0

    def augment_batch(self, batch: Any, size: int) -> None:
        """Append mirrored samples to a minibatch of this size, if that is asked for."""
        if self.use_data_augmentation:
            given = {"env": self._env, "obs": batch.observations, "actions": batch.actions}
            batch.observations, batch.actions = self.data_augmentation_func(**given)
            for name in ("old_actions_log_prob", "values", "advantages", "returns"):
                setattr(batch, name, getattr(batch, name).repeat(len(batch.observations) // size, 1))

    def compute_loss(self, actor: Any, batch: Any, size: int) -> Tensor:
        """How far means of the actions of mirrored samples are from mirrored means."""
        if not self.use_data_augmentation:
            batch.observations, _ = self.data_augmentation_func(env=self._env, obs=batch.observations, actions=None)
        means = actor(batch.observations.detach().clone())
        _, mirrored = self.data_augmentation_func(env=self._env, obs=None, actions=means[:size])
        loss = nn.functional.mse_loss(means[size:], mirrored.detach()[size:])
        return loss if self.use_mirror_loss else loss.detach()


def compute_rnd_loss(rnd: Any, observations: Any) -> Tensor:
    """The loss of random network distillation, which the update computes up to 5.3."""
    if "compute_loss" in PPO.update.__code__.co_names:
        return rnd.compute_loss(observations)  # type: ignore[no-any-return]
    with no_grad():
        state = rnd.state_normalizer(rnd.get_rnd_state(observations))
    return nn.functional.mse_loss(rnd.predictor(state), rnd.target(state).detach())
