"""PPO's advantages and value targets, and the piece of a learner's connector pipeline that computes them."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from rl_triton_adapters.common.overrides import find_replaced
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_core import compute_gae, normalize_advantages


class TritonGeneralAdvantageEstimation(GeneralAdvantageEstimation):
    """`GeneralAdvantageEstimation` with the numbers of `rl_triton_core.compute_gae`, for every module in the batch.

        δ[t] = r[t] + γ·V[t+1] − V[t]          r[t] − V[t] where terminateds[t]
        A[t] = δ[t] + γλ·A[t+1]                δ[t] where terminateds[t] or truncateds[t]
        value_targets[t] = A[t] + V[t]
        advantages[t] = (A[t] − μ) / max(σ, 1e-4)

    t counts slots: the steps of each episode, end to end, with an extra slot behind them that holds the bootstrap
    value. V is 0 behind the last one. As in RLlib, extra slots have the next episode's advantage, and count in μ and σ.

    Arguments are RLlib's, γ as `gamma` and λ in [0, 1] as `lambda_` among them, and:

    Args:
        masked_statistics: Whether μ and σ are those of real steps, "loss_mask"; other advantages are then 0.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.
    """

    def __init__(self, *args: Any, masked_statistics: bool = False, backend: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masked_statistics, self.backend = masked_statistics, backend

    @torch.no_grad()
    def __call__(self, *, rl_module: Any, episodes: Any, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add the columns "advantages" and "value_targets" to the batch of every module that has a value function.

        Columns are [slots] or, for stateful modules, [rows, max_seq_len] with "seq_lens". Episodes are not read: the
        batch says where they end.
        """
        if find_off_switch():
            return super().__call__(rl_module=rl_module, episodes=episodes, batch=batch, **kwargs)  # type: ignore[no-any-return]

        def add_columns(module_id: str, module: Any) -> None:
            if module_id in batch and isinstance(module, ValueFunctionAPI):
                columns = batch[module_id]
                values, expected = module.compute_values(columns), tuple(columns[Columns.REWARDS].shape)
                if values.shape != expected:
                    raise ValueError(
                        f"compute_values of module {module_id!r}: got shape {tuple(values.shape)}, expected "
                        f"{expected}, one value per slot"
                    )
                columns.update(self._compute_columns(columns, values, module.is_stateful()))

        rl_module.foreach_module(add_columns)
        return batch

    def _compute_columns(self, columns: dict[str, Any], values: Tensor, is_padded: bool) -> dict[str, Tensor]:
        seq_lens = columns[Columns.SEQ_LENS] if is_padded else None
        advantages, value_targets = compute_gae_of_slots(
            columns, values, seq_lens, gamma=self.gamma, lambda_=self.lambda_, backend=self.backend
        )
        in_use = None if seq_lens is None else mask_padding(seq_lens, values)
        standardised = normalize_advantages(
            advantages,
            torch.as_tensor(columns[Columns.LOSS_MASK], device=values.device) if self.masked_statistics else in_use,
            backend=self.backend,
            **STANDARDISED,
        )
        return {Postprocessing.ADVANTAGES: standardised.float(), Postprocessing.VALUE_TARGETS: value_targets.float()}


TritonGeneralAdvantageEstimation.__name__ = GeneralAdvantageEstimation.__name__
"""By which RLlib finds pieces and names their timers."""
STANDARDISED: dict[str, Any] = {"correction": 0, "epsilon": 1e-4, "epsilon_mode": "floor"}


def find_own_estimator() -> str:
    """What of RLlib's piece, or of what it calls, is not RLlib's; empty if all is."""
    return find_replaced([GeneralAdvantageEstimation.__call__], [GeneralAdvantageEstimation], ("ray",))


def compute_gae_of_slots(
    columns: Mapping[str, Any], values: Tensor, seq_lens: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute advantages, not standardised, and value targets of all slots, in one call.

    Values are [slots], or [rows, max_seq_len] with `seq_lens`, the numbers of slots in use, at least one; rows continue
    each other. Columns are shaped like them, tensors or arrays of NumPy, and so are the results, 0 in the padding.
    Options are γ, λ and the backend, as of `compute_gae`.
    """

    def as_row(column: Any) -> Tensor:  # slots are the steps of one environment
        return torch.as_tensor(column, device=values.device).reshape(1, -1)

    next_values = torch.cat([values.flatten()[1:], values.new_zeros(1)]).view(values.shape)
    if seq_lens is not None:  # a row goes on with the first value of the next one, not with its padding
        next_row = torch.cat([values[1:, 0], values.new_zeros(1)])
        next_values = next_values.scatter(1, (seq_lens.long() - 1)[:, None], next_row[:, None])
    rewards = as_row(columns[Columns.REWARDS])
    advantages, value_targets = compute_gae(
        rewards if rewards.is_floating_point() else rewards.to(values.dtype),
        as_row(values),
        as_row(columns[Columns.TERMINATEDS]),
        as_row(columns[Columns.TRUNCATEDS]),
        next_values=as_row(next_values),
        mask=None if seq_lens is None else as_row(mask_padding(seq_lens, values)),
        **options,
    )
    return advantages.view_as(values), value_targets.view_as(values)


def mask_padding(seq_lens: Tensor, values: Tensor) -> Tensor:
    """Say which slots of padded rows are in use, shaped like the values, [rows, max_seq_len]."""
    return torch.arange(values.shape[1], device=seq_lens.device) < seq_lens[:, None]
