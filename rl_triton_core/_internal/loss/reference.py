"""The readable losses: the equations in float64 on whole tensors, and what the other backends must equal.

What there is one of per element of the minibatch is a column, [num_elements, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rl_triton_core._internal.arguments.validation import assert_offsets
from rl_triton_core._internal.equations.compile import PYTORCH
from rl_triton_core._internal.equations.primitives import multiply_or_zero
from rl_triton_core._internal.loss import equations
from rl_triton_core._internal.loss.equations import Coefficients
from rl_triton_core._internal.loss.problem import LossProblem, Results, Stream
from rl_triton_core._internal.moments.reference import standardize


def compute_loss(problem: LossProblem) -> Results:
    """Compute a loss and its gradients."""
    batch = Minibatch(problem)
    old = problem.split_inputs(problem.old_inputs) if problem.old_inputs else [()] * len(problem.sizes)
    parts = [
        Distribution(batch, inputs, old_inputs, index)
        for index, (inputs, old_inputs) in enumerate(zip(problem.split_inputs(problem.inputs), old, strict=True))
    ]
    log_prob, entropy, kl = (sum(x) for x in zip(*(part.evaluate_policy() for part in parts), strict=True))
    streams = problem.streams
    advantage = batch.read_column(streams.advantages, problem.per_sequence)
    old_log_prob, ref_log_prob = batch.read_column(streams.old_log_probs), batch.read_column(streams.ref_log_probs)
    target, old_value = batch.read_column(streams.returns), batch.read_column(streams.old_values)
    if problem.rule is not None:
        advantage = standardize(advantage, batch.valid, batch.mask_weight, problem.rule, problem.exchange)
    value = batch.read_column(problem.values)
    averaged, slopes, value_slope = batch.equations["compute_terms"](
        (log_prob, entropy, kl), old_log_prob, advantage, ref_log_prob, value, target, old_value, batch.coefficients
    )
    share = batch.weight * equations.invert_or_zero(batch.divisor)
    *by_policy, by_value = (torch.where(share == 0, 0, x * share) for x in (*slopes, value_slope))
    gradients = [gradient for part in parts for gradient in part.compute_gradients(by_policy)]
    if problem.head.indexed and len(problem.inputs) == 1:
        gradients = [torch.cat(gradients, 1)]
    loss, *statistics = compute_statistics(batch, averaged, target, target - value)
    return Results(loss, torch.stack(statistics), write_gradients(problem, [*gradients, by_value]))


def write_gradients(problem: LossProblem, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that are wanted, in the shape and precision of what they are by."""
    targets = zip(problem.differentiable, problem.allocate_gradients(), gradients, strict=False)
    return [
        memory.copy_(gradient.sum(0) if x.ndim == 1 else gradient)
        for x, memory, gradient in targets
        if memory is not None
    ]


class Minibatch:
    """A problem's elements in float64. What stands in masked ones becomes 0 first."""

    def __init__(self, problem: LossProblem) -> None:
        self.problem, streams = problem, problem.streams
        self.device, self.size = problem.like.device, problem.like.shape[0]
        self.equations = equations.compile_equations(problem.choices, PYTORCH, (equations.compute_terms,))
        self.coefficients = Coefficients(*map(self.as_number, problem.coefficients))
        self.sequence = self.find_sequences()
        self.valid = torch.ones(self.size, 1, dtype=torch.bool, device=self.device)
        self.mask_weight = self.valid.double()
        if streams.mask is not None:
            self.valid = streams.mask[:, None] != 0
            self.mask_weight = (streams.mask[:, None] if streams.mask.is_floating_point() else self.valid).double()
        scale = None if streams.scale is None else self.read_column(streams.scale, per_sequence=True)
        self.weight = self.mask_weight if scale is None else self.mask_weight * scale
        normalizer = problem.normalizer if streams.normalizer is None else streams.normalizer
        self.divisor = self.weight.sum() if normalizer is None else self.as_number(normalizer)

    def as_number(self, x: Any) -> torch.Tensor:
        """A number as a tensor."""
        return torch.as_tensor(x, dtype=torch.float64, device=self.device)

    def find_sequences(self) -> torch.Tensor | None:
        """The index of each element's sequence."""
        position, offsets = torch.arange(self.size, device=self.device), self.problem.streams.cu_seqlens
        if offsets is not None:
            assert_offsets(offsets, self.size)
            return torch.searchsorted(offsets[1:].long(), position, right=True)
        return position // self.problem.length if self.problem.length else None

    def read_column(self, x: Stream, per_sequence: bool = False) -> torch.Tensor:
        """What there is one of per element, or per sequence; 0 for None."""
        if x is None:
            return torch.zeros(self.size, 1, dtype=torch.float64, device=self.device)
        x = x[self.sequence] if per_sequence else x
        return torch.where(self.valid, x.view(-1, 1).double(), 0)

    def read_matrix(self, x: torch.Tensor) -> torch.Tensor:
        """Network outputs in float64."""
        return torch.where(self.valid, x.double(), 0)


class Distribution:
    """A distribution of actions per element."""

    def __init__(
        self, batch: Minibatch, inputs: Sequence[torch.Tensor], old: Sequence[torch.Tensor], index: int
    ) -> None:
        self.equations: dict[str, Any] = batch.equations
        head = batch.problem.head
        self.num_inputs = len(inputs)
        xy = [batch.read_matrix(x) for x in inputs] or [torch.zeros_like(batch.weight)]
        old_xy = [batch.read_matrix(x) for x in old]
        actions = batch.problem.streams.actions
        action = xy[0] if actions is None else batch.read_matrix(actions)
        self.in_range, peaks = batch.valid, [torch.zeros_like(batch.divisor)] * 2
        if head.indexed:
            size, action = xy[0].shape[1], action[:, index : index + 1]
            self.in_range = (action >= 0) & (action < size)
            action = action == torch.arange(size, device=batch.device)
            peaks = [x.amax(1, keepdim=True) for x in (xy[0], *old_xy)]
        self.arguments = xy[0], xy[-1], action, peaks[0]
        self.kl_arguments = (xy[0], xy[-1], old_xy[0], old_xy[-1], *peaks) if old else None
        self.sums = list(map(self.sum_actions, self.equations["sums"](*self.arguments)))
        self.kl_sums: list[torch.Tensor] = []
        if self.kl_arguments is not None:
            self.kl_sums = list(map(self.sum_actions, self.equations["kl_sums"](*self.kl_arguments)))

    def sum_actions(self, x: Any) -> torch.Tensor:
        """The sum over the dimension of actions."""
        return torch.as_tensor(x, device=self.arguments[0].device).expand(self.arguments[0].shape).sum(1, keepdim=True)

    def evaluate_policy(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Log-probability, NaN for an action that there is not, entropy, and KL from the old distribution."""
        log_prob, entropy = self.equations["readout"](self.sums)
        kl = self.equations["kl"](self.sums, self.kl_sums) if self.kl_sums else 0.0
        return torch.where(self.in_range, log_prob, math.nan), entropy, kl

    def compute_gradients(self, by_policy: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Derivatives of the loss by the network outputs, from those by log-probability, entropy and KL."""
        by_log_prob, by_entropy, by_kl = by_policy
        slopes = self.equations["slopes"](*self.arguments, self.sums, by_log_prob, by_entropy)
        if self.kl_arguments is not None:
            kl_slopes = self.equations["kl_slopes"](*self.kl_arguments, self.sums, self.kl_sums)
            slopes = [
                slope + multiply_or_zero(by_kl, kl_slope) for slope, kl_slope in zip(slopes, kl_slopes, strict=True)
            ]
        return list(slopes[: self.num_inputs])


def compute_statistics(
    batch: Minibatch, averaged: Sequence[Any], target: torch.Tensor, error: torch.Tensor
) -> list[torch.Tensor]:
    """The loss and the statistics."""

    def sum_weighted(x: Any) -> torch.Tensor:
        return (torch.where(batch.valid, x, 0) * batch.weight).sum()

    ratio = averaged[equations.TERMS.index("ratio_mean")]
    compared = batch.valid & ~ratio.isnan()
    summary = equations.summarize_terms(
        tuple(map(sum_weighted, averaged)),
        batch.weight.sum(),
        tuple(map(sum_weighted, (target, target * target, error, error * error))),
        (torch.where(compared, ratio, math.inf).amin(), torch.where(compared, ratio, -math.inf).amax()),
        batch.divisor,
        batch.coefficients,
        math.nan,
    )
    return [x.to(batch.problem.dtype) for x in summary]


def scale_gradients(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a number in place, unless that is 1 and known to be."""
    if factor.device.type != "cpu" or factor.item() != 1:
        for x in gradients:
            x.mul_(factor)
