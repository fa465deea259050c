"""What a loss is to a backend: tensors, numbers and the names of equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from rl_triton_core._internal.arguments.validation import find_precision
from rl_triton_core._internal.launch.launcher import mark_numbers
from rl_triton_core._internal.loss.equations import HEADS, Choices, Coefficients, Head
from rl_triton_core._internal.moments.rule import Exchange, Rule

Stream = torch.Tensor | None


class Streams(NamedTuple):
    """Tensors of a loss through which no gradient flows: [num_elements] each unless stated, or None."""

    old_log_probs: Stream = None
    advantages: Stream = None
    """Per element, or per sequence."""
    returns: Stream = None
    old_values: Stream = None
    ref_log_probs: Stream = None
    mask: Stream = None
    """Flags, or weights if floating point."""
    actions: Stream = None
    """[num_elements, number of parts] of a head whose actions are indices, else [num_elements, size]."""
    scale: Stream = None
    """A weight of every sequence, [num_sequences]."""
    cu_seqlens: Stream = None
    """Where in the flat row each sequence starts, and the row's end: [num_sequences + 1]."""
    normalizer: Stream = None
    """A number."""


@dataclass(eq=False)
class LossProblem:
    """One call, validated and flat: what a backend needs to compute a loss, and nothing else.

    The loss is Σ wᵢ·lossᵢ / normalizer, with weights w from mask and scale.
    """

    choices: Choices
    inputs: tuple[torch.Tensor, ...]
    """Network outputs (logits, or mean and log_std) as matrices [num_elements, size]; log_std perhaps as [size]."""
    streams: Streams
    values: Stream = None
    old_inputs: tuple[torch.Tensor, ...] = ()
    """Outputs of the old network, like `inputs`: the KL from them is exact."""
    sizes: tuple[int, ...] = (1,)
    """Columns of each of the distributions side by side."""
    coefficients: Coefficients = field(default_factory=Coefficients)
    length: int = 0
    """Elements of every sequence, if all have equally many; 0 if there are none, or with `cu_seqlens`."""
    per_sequence: bool = False
    """Whether advantages are."""
    normalizer: float | None = None
    """None: the sum of the weights, unless the streams have one."""
    rule: Rule | None = None
    """How advantages are normalised, if they are."""
    exchange: Exchange | None = None
    wanted: tuple[bool, ...] = ()
    """Whether the gradient of each input, and then of the values, is."""

    def set_streams(self, **tensors: Stream) -> None:
        """Put tensors in their places; PyTorch 2.8 does not trace `_replace`."""
        self.streams = Streams(*[tensors.get(name, x) for name, x in zip(Streams._fields, self.streams, strict=True)])

    @property
    def head(self) -> Head:
        """The distribution of the actions."""
        return HEADS[self.choices.head]

    @property
    def like(self) -> torch.Tensor:
        """A tensor on the device, with an element in the first dimension for each of the minibatch."""
        return self.inputs[0]

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """What may have a gradient."""
        return self.inputs if self.values is None else (*self.inputs, self.values)

    @cached_property
    def dtype(self) -> torch.dtype:
        """What the arithmetic is done in: float64 if an input is, else float32."""
        return find_precision((*self.differentiable, *self.streams[:5]))

    def mark_numbers(self) -> None:
        """Let the numbers be known to a recording of this call."""
        rule = () if self.rule is None else self.rule
        *coefficients, self.normalizer = mark_numbers((*rule, *self.coefficients, self.normalizer))
        self.coefficients = Coefficients(*coefficients[len(rule) :])
        self.rule = None if self.rule is None else Rule(*coefficients[: len(rule)])

    def split_inputs(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Inputs, or tensors like them, of each of the distributions side by side, in place."""
        if not self.head.indexed:
            return [tuple(tensors)]
        if len(tensors) == 1 and len(self.sizes) > 1:
            tensors = torch.split(tensors[0], list(self.sizes), 1)
        return [(x,) for x in tensors]

    def allocate_gradients(self) -> list[Stream]:
        """Memory for the gradients that are wanted, None for the others.

        Those of float16 are float32: a gradient of a mean may leave the range of float16 before it is scaled.
        """
        dtypes = [torch.float32 if x.dtype == torch.float16 else x.dtype for x in self.differentiable]
        return [
            torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) if want else None
            for x, dtype, want in zip(self.differentiable, dtypes, self.wanted, strict=True)
        ]


class Results(NamedTuple):
    """What a backend computes."""

    loss: torch.Tensor
    statistics: torch.Tensor
    gradients: list[torch.Tensor]
    """Those that are wanted."""


class PPOLoss(NamedTuple):
    """A loss, its parts and what is logged beside it: tensors without dimensions, of which `loss` has a graph.

    loss = policy_loss + value_coef·value_loss − entropy_coef·entropy + kl_coef·kl, each a weighted mean.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    """0 without values."""
    entropy: torch.Tensor
    kl: torch.Tensor
    """0 without a policy to compare with."""
    approx_kl: torch.Tensor
    """KL from the old policy, estimated as the mean of r − 1 − log r."""
    approx_kl_k1: torch.Tensor
    """The same, estimated as the mean of −log r."""
    clip_fraction: torch.Tensor
    """How often the ratio was outside of the clip."""
    ratio_mean: torch.Tensor
    explained_variance: torch.Tensor
    """1 − Var(R − V)/Var(R); NaN without values, and where returns do not vary."""
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor
