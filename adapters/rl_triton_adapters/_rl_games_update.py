"""RL-Games: `calc_gradients` as a replay of a CUDA graph on a GPU."""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined, misc, call-arg"

from contextlib import nullcontext
from typing import Any

import torch
from rl_games.common import common_losses
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters._overrides import find_override, is_written_in
from rl_triton_adapters._rl_games_central_value import CapturedCentralValue, prepare_model
from rl_triton_adapters.updates import CapturedUpdate, DeferredChecks, find_reason
from rl_triton_core.capture import keep_buffers

PACKAGES = ("rl_games", "rl_triton_adapters")
STEP_METHODS = (
    "calc_gradients",
    "calc_losses",
    "calc_losses_fused",
    "bound_loss",
    "reg_loss",
    "trancate_gradients_and_step",
    "_preproc_obs",
)
"""What a graph calls at its capture alone."""
SETTINGS = (
    *("ppo", "actor_loss_func", "e_clip", "clip_value", "critic_coef", "bounds_loss_coef", "bound_loss_type"),
    *("has_value_loss", "truncate_grads", "grad_norm", "mixed_precision", "scaler"),
)
"""The agent's attributes that a step reads; where one changes, steps are captured again."""
LOSSES = ("actor_loss", "critic_loss", "default_critic_loss")
"""Functions of RL-Games that a loss of ours stands for, and that a graph calls at its capture alone."""
CAPTURING_MODES = ("reduce-overhead", "max-autotune")
"""Modes in which `torch.compile` captures graphs of its own."""
RATE = 4
"""Where the learning rate is in what a step leaves."""


def find_own_loss() -> str:
    """Say which function a user has put in the place of one of RL-Games' losses; empty if there is none."""
    functions = {f"{name} is not RL-Games'": getattr(common_losses, name, None) for name in LOSSES}
    return find_reason({text: not is_written_in(("rl_games", "torch"), x) for text, x in functions.items()})


class CapturedUpdateMixin:
    """Capture an agent's `calc_gradients`, and the steps of its central value network. Put it in front of an agent.

    What surrounds a step stays RL-Games' own: minibatches, schedules of the learning rate, which the host reads the
    divergence for.
    """

    entropy_coef: Any
    model: Any

    def __init__(self, base_name: str, params: dict[str, Any]) -> None:
        """Create the agent.

        Args:
            base_name: As of the agent.
            params: As of the agent.
        """
        self._checks: DeferredChecks | None = None
        self._refusals: list[Tensor] = []
        self.aux_loss_dict: dict[str, Any] = {}  # agents of RL-Games 1.6.1 have none
        self._captured = CapturedUpdate(self._make_step)
        self._central_value = CapturedCentralValue()
        super().__init__(base_name, params)
        self._has_fused_kernel = getattr(self, "use_fused_kernel", False)  # RL-Games 2's, which takes numbers
        self._find_step()
        if self.triton:
            self._captured.warn_of_stock(type(self).__name__, "the agent of RL-Games")
            self._central_value.captured.warn_of_stock("the central value network", "that of RL-Games")

    def describe_step(self) -> str:
        """Say in which of three ways updates are made, and why."""
        self._find_step()
        updates = [self._captured] + [self._central_value.captured] * self.has_central_value
        return "; of the central value network, ".join(x.describe("those of RL-Games") for x in updates)

    def _find_step(self) -> None:
        compiled = self.config.get("torch_compile")
        modes = compiled if isinstance(compiled, dict) else {"mode": compiled}
        mode = modes.get("mode")
        if self.has_central_value:
            self._central_value.find_step(self.central_value_net, self._find_refusal(modes.get("critic_mode", mode)))
        stock = self._find_refusal(mode) or find_reason(
            {
                "use_diagnostics reads from the device in every minibatch": getattr(self, "use_diagnostics", False),
                "zero_rnn_on_done reads from the device where episodes end": self.is_rnn and self.zero_rnn_on_done,
                "actor_loss_func is not RL-Games'": not self.actor_loss_func.__module__.startswith("rl_games."),
            }
        )
        for behind in (None, CapturedUpdateMixin):
            stock = stock or find_override(self, STEP_METHODS, PACKAGES, behind=behind)
        self._captured.find_step([self.model], [self.optimizer], stock=stock, is_averaged=self.multi_gpu)
        self.use_fused_kernel = self._has_fused_kernel and bool(self._captured.stock)

    def _find_refusal(self, mode: Any) -> str:
        """Why steps are not captured with this mode of `torch.compile` and these losses; empty if they may be."""
        captures = f"torch_compile={mode} captures graphs of its own"
        return find_reason({"switched off": not self.triton, captures: mode in CAPTURING_MODES}) or find_own_loss()

    def prepare_dataset(self, batch_dict: dict[str, Any]) -> None:
        """Prepare the minibatches of an update, as the agent does, and keep statistics where graphs read them."""
        self._find_step()
        assert self._captured.step is not None
        self._captured.step.resume()
        self._refusals = []
        models = [self.model, self.central_value_net.model] if self.has_central_value else [self.model]
        with keep_buffers(models):
            super().prepare_dataset(batch_dict)

    def train_central_value(self) -> Any:
        """Train the central value network, as the agent does."""
        with self._central_value.training():
            loss = super().train_central_value()
        return loss.item() if isinstance(loss, Tensor) else loss

    def calc_gradients(self, input_dict: dict[str, Any]) -> None:
        """Make a step with a minibatch, as the agent does."""
        step = self._captured.step
        if step is None or step.reason:
            super().calc_gradients(input_dict)
            return
        self._captured.keep_settings([getattr(self, name, None) for name in SETTINGS])
        coef = self.entropy_coef
        results = step(input_dict, coef if isinstance(coef, Tensor) else float(coef))
        copies = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, results)
        result, self.aux_loss_dict, refusals = copies
        self.train_result = (*result[:RATE], self.last_lr, *result[RATE + 1 :])
        self._refusals += refusals

    def _make_step(self, input_dict: dict[str, Any], entropy_coef: Any) -> tuple[Any, Any, list[Tensor]]:
        """One step; what it leaves, and whether a distribution has refused its arguments, if there was a check."""
        number, self.entropy_coef = self.entropy_coef, entropy_coef
        defers = DeferredChecks() if self._captured.is_captured else nullcontext()
        try:
            with prepare_model(self, self._captured), defers as self._checks:
                super().calc_gradients(input_dict)
                checks = self._checks
        finally:
            self.entropy_coef, self._checks = number, None
        refusals = [checks.has_failed()] if checks is not None and checks.results else []
        return self.train_result, self.aux_loss_dict, refusals

    def trancate_gradients_and_step(self) -> None:
        """Make a step of the optimizer, unless a distribution of this update has refused its arguments."""
        if self._checks is not None and self._checks.results:
            assert self._captured.step is not None
            self._captured.step.stop_if(self._checks.has_failed())
        super().trancate_gradients_and_step()

    def train_epoch(self) -> Any:
        """Play and update, as the agent does; a minibatch that a distribution has refused raises its error."""
        results = super().train_epoch()
        refused = torch.stack(self._refusals).tolist() if self._refusals else []
        if any(refused):
            super().calc_gradients(self.dataset[refused.index(True) % len(self.dataset)])
        return results
