"""RSL-RL: models with a GRU or an LSTM over minibatches of one shape, whatever the number of episodes in them."""

from typing import Any

import torch
from torch import Tensor

from rl_triton_adapters._overrides import find_override, has_hooks

# isort: split
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.modules import RNN

METHODS = ("__call__", "forward", "get_latent")
PACKAGES = ("rsl_rl", "torch")


def is_known(model: Any) -> bool:
    """Whether `compute_outputs` computes what a recurrent model does."""
    if not isinstance(model, RNNModel) or type(model.rnn) is not RNN:
        return False
    return not find_override(model, METHODS, PACKAGES) and not any(map(has_hooks, (model, model.rnn, model.rnn.rnn)))


def compute_outputs(model: Any, observations: Any, states: list[Tensor], begins: Tensor) -> Tensor:
    """Compute what a recurrent model's last layers return for steps of whole rollouts.

    RSL-RL splits rollouts where episodes end, and pads the parts to one length: how many there are depends on the
    rollout. Here a step begins with the state that was recorded where an episode begins, and goes on elsewhere.

    Args:
        model: One that `is_known`.
        observations: [num_steps, num_envs].
        states: Recorded before each step, one of a GRU, two of an LSTM, each [num_steps, num_envs, num_layers, size].
        begins: Whether a step is the first one of an episode, or of the rollout, [num_steps, num_envs].
    """
    inputs = MLPModel.get_latent(model, observations)
    state, outputs = [], []
    for t, x in enumerate(inputs.split(1)):
        recorded = [x[t].swapaxes(0, 1).contiguous() for x in states]
        if t == 0:
            state = recorded
        else:
            state = [torch.where(begins[t, :, None], *pair) for pair in zip(recorded, state, strict=True)]
        output, following = model.rnn.rnn(x, state[0] if len(state) == 1 else tuple(state))
        state = [following] if len(state) == 1 else [*following]
        outputs.append(output)
    result: Tensor = model.mlp(torch.cat(outputs))
    return result
