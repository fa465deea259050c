"""sb3-contrib: MaskablePPO and RecurrentPPO with updates that take less time, and rollout buffers for the former.

    TritonMaskablePPO("MlpPolicy", env)
    TritonRecurrentPPO("MlpLstmPolicy", env)
    MaskablePPO("MlpPolicy", env, rollout_buffer_class=TritonMaskableRolloutBuffer)

TRPO takes the buffers of `sb3`.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import LSTM

from rl_triton_adapters.common.optimizers import fused
from rl_triton_adapters.common.overrides import find_override, find_replaced, has_hooks
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import describe_update
from rl_triton_adapters.common.versions import explained_import
from rl_triton_adapters.sb3.base import PACKAGES, replace_methods
from rl_triton_adapters.sb3.buffers import TritonGAEMixin
from rl_triton_adapters.sb3.captured import PPOUpdateMixin
from rl_triton_adapters.sb3.policies import explain_head, list_sizes

with explained_import(__name__, "sb3-contrib", "2.9"):
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

__all__ = ["TritonMaskableDictRolloutBuffer", "TritonMaskablePPO", "TritonMaskableRolloutBuffer", "TritonRecurrentPPO"]


class TritonMaskableRolloutBuffer(TritonGAEMixin, MaskableRolloutBuffer):
    """`MaskableRolloutBuffer` of sb3-contrib with the advantages of `rl_triton_core`."""


class TritonMaskableDictRolloutBuffer(TritonGAEMixin, MaskableDictRolloutBuffer):
    """`MaskableDictRolloutBuffer` of sb3-contrib with the advantages of `rl_triton_core`."""


class TritonMaskablePPO(PPOUpdateMixin, MaskablePPO):
    """`MaskablePPO` with a fused loss and fewer operations around it; on a GPU, with captured updates and acting.

    All that is said of `TritonPPO` holds, masks included. An update is that of `MaskablePPO` if a sample of its rollout
    has no allowed action at all. With a policy that has methods or a distribution of its own, all is `MaskablePPO`.
    """

    fields: ClassVar = (*PPOUpdateMixin.fields, "action_masks")

    def find_obstacle(self) -> str:
        """As for other algorithms; a distribution that is not known may have masks of another form, too."""
        return super().find_obstacle() or explain_head(self.policy)

    def _can_update(self) -> bool:
        """Not where nothing is allowed, which sb3-contrib gives an entropy of 0."""
        buffer: Any = self.rollout_buffer
        starts = np.cumsum([0, *list_sizes(self.policy.action_dist)[:-1]])
        return super()._can_update() and bool(np.logical_or.reduceat(buffer.action_masks, starts, axis=-1).all())


class TritonRecurrentPPO(RecurrentPPO):
    """`RecurrentPPO` that calls the LSTM once for all steps of a minibatch, where `RecurrentPPO` calls it for each.

    Parameters are those of `RecurrentPPO` up to rounding. Arguments are, too, and `enabled` as of `TritonPPO`.
    """

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self.enabled = check_enabled(enabled)
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        self.enabled = check_enabled(self.enabled)  # `load` has set it
        super()._setup_model()

    @property
    def is_accelerated(self) -> bool:
        """Whether updates are other than those of RecurrentPPO."""
        return not self.find_obstacle()

    def describe(self) -> str:
        """Say whether updates are accelerated or those of RecurrentPPO, and why they are not captured."""
        return describe_update(self.find_obstacle() or "each minibatch has another shape", not self.is_accelerated)

    def find_obstacle(self) -> str:
        """Why RecurrentPPO's own update runs; empty if it does not."""
        if find_off_switch() or not check_enabled(self.enabled):
            return find_off_switch() or "switched off"
        own = find_override(self.policy, ["_process_sequence"], PACKAGES)
        lstms = [x for name in ("lstm_actor", "lstm_critic") if (x := getattr(self.policy, name, None)) is not None]
        plain = [x for x in lstms if type(x) is LSTM and not has_hooks(x) and "forward" not in vars(x)]
        if plain != lstms or not isinstance(self.policy, RecurrentActorCriticPolicy):
            return own or f"{type(self.policy).__name__} has an LSTM of its own, or one with hooks"
        return own or find_replaced([RecurrentActorCriticPolicy._process_sequence], lstms, PACKAGES)

    def train(self) -> None:
        """Update the policy, as RecurrentPPO does."""
        if not self.is_accelerated:
            super().train()
            return
        optimizers = [self.policy.optimizer] if self.device.type == "cpu" else []
        with fused(optimizers), replace_methods(self.policy, _process_sequence=process_sequences):
            super().train()


def process_sequences(
    features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: torch.nn.LSTM
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Call an LSTM once for all steps of some sequences, which rollout buffers cut where episodes start.

    sb3-contrib calls it for each step if any episode starts, lest one starts within a sequence. Features and outputs
    are [num_sequences * num_steps, size], states before and after all steps [num_layers, num_sequences, size], and
    `episode_starts`, 1 where one does, [num_sequences * num_steps].
    """
    num_sequences = lstm_states[0].shape[1]
    starts = episode_starts.view(num_sequences, -1)
    if starts[:, 1:].any():
        stock: Any = RecurrentActorCriticPolicy._process_sequence
        return stock(features, lstm_states, episode_starts, lstm)  # type: ignore[no-any-return]
    going_on = (1 - starts[:, 0]).view(1, num_sequences, 1)
    inputs = features.view(num_sequences, -1, lstm.input_size).transpose(0, 1)
    outputs, states = lstm(inputs, (going_on * lstm_states[0], going_on * lstm_states[1]))
    return outputs.transpose(0, 1).flatten(0, 1), states
