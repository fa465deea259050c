"""RSL-RL: PPO with the advantages and the loss of `rl_triton_core`, its update captured in a CUDA graph on a GPU.

One line of the training configuration turns it on, and another one off again:

    algorithm["class_name"] = "rl_triton_adapters.rsl_rl:TritonPPO"
    algorithm["enabled"] = False

Minibatches, random numbers, logs and checkpoints are those of RSL-RL.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

from typing import Any

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import Described
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core.capture import keep_buffers

with explained_import(__name__, "rsl-rl-lib", "3.0.0", "rsl-rl"):
    from rsl_rl.algorithms import PPO

    from rl_triton_adapters.rsl_rl.older import PACKAGES, RETURNS_KEEP_STATE, UPDATE_NORMALIZES
    from rl_triton_adapters.rsl_rl.step import Update

__all__ = ["TritonPPO"]


class TritonPPO(PPO, Described):
    """`PPO` of RSL-RL with a scan for the advantages, a fused loss and a captured update.

    The adaptive learning rate stays on the device, and losses are read once per update: within an update nothing waits
    for the device. Where only RSL-RL's own update applies (see `obstacle`), that one runs, on the same advantages.

    Arguments are those of `PPO`, and two keys more of its configuration. With `enabled` False it is `PPO` of RSL-RL;
    with `capture` False every step runs eagerly. None captures the update where the policy lies on a GPU.

    The loss is computed from the outputs of a Gaussian policy, or, where its distribution or a method is not RSL-RL's,
    from log-probabilities and entropies.

    Raises:
        TypeError: `enabled` is no bool, or `capture` neither a bool nor None.
    """

    def __init__(self, *args: Any, enabled: bool = True, capture: bool | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enabled = check_enabled(enabled) and not find_off_switch()
        self._rl_triton = Update(self, TritonPPO, capture)
        self._rl_triton.prepare()
        if self.enabled:
            self._rl_triton.warn_of_stock("TritonPPO", "PPO of RSL-RL")

    def process_env_step(self, *args: Any, **kwargs: Any) -> Any:
        """Record a step as `PPO` does, and keep statistics of observations where graphs read them."""
        is_read = self.enabled and not UPDATE_NORMALIZES
        with keep_buffers(getattr(self._rl_triton.step, "modules", []) if is_read else []):
            return super().process_env_step(*args, **kwargs)

    def compute_returns(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
        """Fill in the storage's returns and advantages; time-outs are in the rewards already, as in `PPO`."""
        storage, own = self.storage, find_override(self, ["compute_returns"], PACKAGES, behind=TritonPPO)
        if not self.enabled or own or find_override(storage, ["compute_returns"], PACKAGES):
            return super().compute_returns(obs, *args, **kwargs)
        hidden_state = self.critic.get_hidden_state() if RETURNS_KEEP_STATE else None
        last_values = (self.policy.evaluate if hasattr(self, "policy") else self.critic)(obs).detach()
        if RETURNS_KEEP_STATE:
            self.critic.reset(hidden_state=hidden_state)
        fields = (storage.rewards, storage.values, storage.dones, last_values, storage.advantages, storage.returns)
        rewards, values, dones, last_values, *out = (x.squeeze(-1) for x in fields)
        numbers = {"gamma": self.gamma, "lambda_": self.lam, "time_dim": 0, "out": tuple(out)}
        compute_gae(rewards, values, terminated=dones, bootstrap_values=last_values, **numbers)
        if not self.normalize_advantage_per_mini_batch:
            normalize_advantages(storage.advantages, out=storage.advantages)
        return None

    @with_check
    def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Update actor and critic, as `PPO.update` does, and return the mean losses."""
        self._rl_triton.prepare()
        make = super().update if self._rl_triton.stock else self._rl_triton.make_steps
        return make(*args, **kwargs)  # type: ignore[no-any-return]
