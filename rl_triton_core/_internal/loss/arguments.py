"""The check of a loss's arguments, and their form for a backend: elements of a minibatch in one dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.loss.equations import CLIPS, ESTIMATORS, SURROGATES, Choices, Coefficients
from rl_triton_core._internal.loss.problem import LossProblem, Streams
from rl_triton_core._internal.moments.rule import Exchange, Rule, check_rule, make_exchange

Number = float | torch.Tensor
"""Or a tensor without dimensions, as schedules in a CUDA graph are."""
CLIP_MODES = tuple(name for name in CLIPS if name != "none")
LIMITS = ("clip", "clip_high", "dual_clip", "value_clip", "huber_delta", "log_ratio_clamp", "kl_clip")
"""Coefficients that limit something, unless they are infinite."""
LEAST = dict.fromkeys((*LIMITS, "value_factor"), 0.0) | {"dual_clip": 1.0, "tau": 1e-6, "tau_negative": 1e-6}
"""What coefficients are at least, where that is bounded."""
ESTIMATOR_NAMES = tuple(name for name in ESTIMATORS if name != "none")


class Elements(NamedTuple):
    """What the tensors of a call have in common."""

    name: str
    """The argument that set it."""
    shape: torch.Size
    """Of a tensor with one number per element."""
    device: torch.device

    def check_input(self, name: str, x: Any) -> torch.Tensor:
        """One number per element, perhaps with a gradient, as [num_elements, 1]."""
        check.check_tensor(name, x, check.REAL_DTYPES)
        self.check_shape(name, x, self.shape)
        column: torch.Tensor = drop_graph(x)
        return column.unsqueeze(1) if column.ndim == 1 else column.reshape(-1, 1)

    def check_stream(self, name: str, x: Any) -> torch.Tensor | None:
        """One number per element, without a gradient, as [num_elements]; or None."""
        if x is None:
            return None
        check.check_tensor(name, x, check.FLAG_DTYPES if name == "mask" else check.REAL_DTYPES)
        self.check_shape(name, x, self.shape)
        check.check_detached(name, x)
        return flatten(drop_graph(x))

    def check_matrix(
        self, name: str, x: Any, size: int | None = None, dtypes: Any = check.REAL_DTYPES, constant: bool = False
    ) -> torch.Tensor:
        """Several numbers per element, as [num_elements, size] without gaps between those of an element.

        No gradient flows through those that are constant.
        """
        check.check_tensor(name, x, dtypes)
        shape = (*self.shape, x.shape[-1] if size is None and x.ndim else size)
        self.check_shape(name, x, shape)
        if constant:
            check.check_detached(name, x)
        matrix: torch.Tensor = drop_graph(x)
        if matrix.ndim != 2:
            matrix = matrix.flatten(0, -2) if matrix.ndim > 2 else matrix.unsqueeze(0)
        return matrix if matrix.stride(-1) == 1 else matrix.contiguous()

    def check_shape(self, name: str, x: torch.Tensor, shape: Sequence[Any]) -> None:
        """A tensor of this shape, on the device."""
        meaning = f"as {self.name} has one element per position of {tuple(self.shape)}"
        check.check_shape(name, x, shape, meaning, self.device)


def elements_of(name: str, x: Any, trailing: int = 0) -> Elements:
    """The elements of a call, from its first tensor, which may have a last dimension of several numbers for each."""
    check.check_tensor(name, x, check.REAL_DTYPES)
    if x.ndim < trailing or (trailing and not x.shape[-1]):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected a last dimension of size 1 or more")
    return Elements(name, x.shape[: x.ndim - trailing], x.device)


class CheckedPolicy(NamedTuple):
    """Network outputs, by the name of the head, with the actions."""

    elements: Elements
    head: str
    network: Sequence[torch.Tensor]
    """Tensors as they were given."""
    inputs: Sequence[torch.Tensor]
    """The same as matrices, without a graph."""
    actions: torch.Tensor | None = None
    old_inputs: Sequence[torch.Tensor] = ()
    """Outputs of the old network, like `inputs`."""
    sizes: Sequence[int] = (1,)
    """Columns of each of the distributions side by side."""


def drop_graph(x: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, except under torch.compile, where an operator has the graph."""
    return x.detach() if x.requires_grad and not check.is_traced() else x


def flatten(x: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor side by side in one dimension."""
    return x if x.ndim == 1 and x.is_contiguous() else x.reshape(-1).contiguous()


def check_coefficients(clip: Any, clip_high: Any, huber_delta: Any = None, **others: Any) -> Coefficients:
    """The numbers of a loss, with defaults in the place of those that are not given."""
    delta = 1.0 if huber_delta is None else huber_delta
    given = {"clip": clip, "clip_high": clip if clip_high is None else clip_high, "huber_delta": delta, **others}
    return Coefficients(**{name: check_coefficient(name, x, LEAST.get(name, -math.inf)) for name, x in given.items()})


def check_coefficient(name: str, x: Any, low: float = -math.inf) -> Number:
    """A number, or a tensor of one number on any device; of those that limit something, None is infinity."""
    if not isinstance(x, torch.Tensor):
        is_endless = name in LIMITS and (x is None or x == math.inf)
        return math.inf if is_endless else check.check_number(name, x, low, math.inf)
    check.check_tensor(name, x, check.REAL_DTYPES)
    if x.ndim:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected a number or a tensor without dimensions")
    check.check_detached(name, x)
    return drop_graph(x)


class Normalization(NamedTuple):
    """How advantages are normalised: as `normalize_advantages` of the package does it, which explains each field."""

    correction: float = 1
    """What the variance's divisor is less than the sum of the weights."""
    epsilon: float = 1e-8
    """ε of the normalisation."""
    epsilon_mode: str = "add"
    """Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``."""
    group: distributed.ProcessGroup | str | None = None
    """Normalise over all ranks of this process group, ``"world"`` for the default one. Every rank must call. Not under
    torch.compile."""


def check_normalization(wanted: Any) -> tuple[Rule | None, Exchange | None]:
    """How advantages are normalised, and how ranks exchange their moments; None where they are not."""
    if wanted is False:
        return None, None
    if wanted is not True and not isinstance(wanted, Normalization):
        raise TypeError(f"normalize_advantages: got {type(wanted).__name__}, expected a bool or a Normalization")
    correction, epsilon, epsilon_mode, group = Normalization() if wanted is True else wanted
    return check_rule(correction, epsilon, epsilon_mode), make_exchange(group, differentiable=False)


def build_problem(
    policy: CheckedPolicy,
    *,
    old_log_probs: Any = None,
    advantages: Any = None,
    values: Any = None,
    returns: Any = None,
    old_values: Any = None,
    ref_log_probs: Any = None,
    mask: Any = None,
    value_clip_mode: Any = "sb3",
    kl_estimator: Any = "k1",
    kl_times_ratio: Any = False,
    surrogate: Any = "clip",
    rule: Rule | None = None,
    exchange: Exchange | None = None,
    **coefficients: Any,
) -> LossProblem:
    """A call as a problem. The policy is checked; the other arguments are as users give them."""
    elements, old_inputs = policy.elements, policy.old_inputs
    value_clip, huber_delta, kl_coef = map(coefficients.get, ("value_clip", "huber_delta", "kl_coef"))
    clipped_value = check_values(values, returns, old_values, value_clip, value_clip_mode)
    check_kl(ref_log_probs, old_inputs, kl_coef)
    estimator = check.check_choice("kl_estimator", kl_estimator, ESTIMATOR_NAMES)
    return LossProblem(
        Choices(
            policy.head,
            "mse" if huber_delta is None else "huber",
            clipped_value,
            "none" if ref_log_probs is None else estimator,
            check.check_choice("surrogate", surrogate, tuple(SURROGATES)),
            "ratio" if check.check_bool("kl_times_ratio", kl_times_ratio) and ref_log_probs is not None else "none",
        ),
        tuple(policy.inputs),
        Streams(
            elements.check_stream("old_log_probs", old_log_probs),
            elements.check_stream("advantages", advantages),
            elements.check_stream("returns", returns),
            None if value_clip is None else elements.check_stream("old_values", old_values),
            elements.check_stream("ref_log_probs", ref_log_probs),
            elements.check_stream("mask", mask),
            policy.actions,
        ),
        None if values is None else elements.check_input("values", values),
        tuple(old_inputs),
        tuple(policy.sizes),
        check_coefficients(**coefficients),
        rule=rule,
        exchange=exchange,
    )


def check_values(values: Any, returns: Any, old_values: Any, value_clip: Any, mode: Any) -> str:
    """The name of the equation of the value loss; values come with returns, and with old ones where these are read."""
    check.check_choice("value_clip_mode", mode, CLIP_MODES)
    if (values is None) != (returns is None):
        missing, given = ("returns", "values") if returns is None else ("values", "returns")
        raise ValueError(f"{missing}: got None together with {given}, expected both or neither")
    if values is None:
        return "none"
    if value_clip is not None and old_values is None and mode != "rllib":
        raise ValueError(f"old_values: got None together with value_clip in the mode {mode!r}, expected a tensor")
    return str(mode) if value_clip is not None else "sb3"


def check_kl(ref_log_probs: Any, old_inputs: Sequence[torch.Tensor], kl_coef: Any) -> None:
    """One divergence at most, and one if it is part of the loss."""
    if ref_log_probs is not None and old_inputs:
        raise ValueError("ref_log_probs: got them and outputs of the old network, expected one of the two")
    if ref_log_probs is None and not old_inputs and (isinstance(kl_coef, torch.Tensor) or kl_coef):
        expected = "expected ref_log_probs or outputs of the old network beside it, or 0"
        raise ValueError(f"kl_coef: got one without a policy to compare with, {expected}")
