"""What a policy is to `ppo_loss`: outputs of a network, by the kind of distribution that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.launch.fast_path import SEQUENCES
from rl_triton_core._internal.loss.arguments import CheckedPolicy, Elements, drop_graph, elements_of


class LogProbs(NamedTuple):
    """Any policy, by log-probabilities of its actions. `ppo_loss` takes no actions beside it.

    Attributes:
        log_probs: Log-probabilities of the actions, of any shape; float32, bfloat16, float16, or float64 (not on the
            triton backend).
        entropy: Of the policy at each element, shaped like `log_probs`; None estimates it by −log_probs.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None

    def check(self, actions: Any = None) -> CheckedPolicy:
        """Check tensors and actions, for a loss."""
        elements = elements_of("log_probs", self.log_probs)
        if actions is not None:
            raise ValueError(f"actions: got {type(actions).__name__} together with LogProbs, expected None")
        network = (self.log_probs,) if self.entropy is None else (self.log_probs, self.entropy)
        inputs = [elements.check_input("entropy" if i else "log_probs", x) for i, x in enumerate(network)]
        return CheckedPolicy(elements, "sampled" if self.entropy is None else "given", network, inputs)


class MultiCategorical(NamedTuple):
    """Several categorical distributions side by side, from logits.

        log π(a) = x[a] − log Σ exp x          H = −Σ p·log p          summed over the distributions
        KL(π_old ‖ π) = Σ p_old·(log p_old − log p)                    with `old_logits`

    A logit of −∞ is an action that is not allowed: of probability 0, with a gradient of 0. Beyond the gradient, nothing
    of the size of the logits is kept.

    Attributes:
        logits: x, a sequence of tensors [..., number of actions], one per distribution, or one tensor in which they lie
            side by side in the last dimension. float32, bfloat16, float16, or float64 (not on the triton backend).
        nvec: Numbers of actions of the distributions, where `logits` is one tensor.
        old_logits: Logits of the policy that drew the actions, like `logits`: `kl` is then KL(π_old ‖ π), exact.

    Actions are indices, [..., number of distributions], integers. One that there is not makes the loss NaN.
    """

    logits: torch.Tensor | Sequence[torch.Tensor]
    nvec: Sequence[int] | None = None
    old_logits: torch.Tensor | Sequence[torch.Tensor] | None = None

    def check(self, actions: Any) -> CheckedPolicy:
        """Check tensors and actions, for a loss."""
        elements, network, inputs, sizes = check_logits("logits", self.logits, self.nvec)
        old_inputs: Sequence[torch.Tensor] = ()
        if self.old_logits is not None:
            _, old_network, old_inputs, old_sizes = check_logits("old_logits", self.old_logits, self.nvec)
            rows, old_rows = inputs[0].shape[0], old_inputs[0].shape[0]
            if old_sizes != sizes or old_inputs[0].shape != inputs[0].shape:
                got, wanted = f"{old_rows} elements of sizes {old_sizes}", f"{rows} of {sizes}"
                raise ValueError(f"old_logits: got {got}, expected {wanted}, as logits have")
            for x in old_network:
                check.check_detached("old_logits", x)
        check.check_tensor("actions", actions, check.INTEGER_DTYPES)
        if len(network) == len(sizes) == 1 and actions.shape == elements.shape:
            actions = actions.unsqueeze(-1)
        indices = elements.check_matrix("actions", actions, len(sizes), check.INTEGER_DTYPES)
        return CheckedPolicy(elements, "categorical", network, inputs, indices, old_inputs, sizes)


class Categorical(NamedTuple):
    """A categorical distribution: `MultiCategorical` of one.

    Attributes:
        logits: x, [..., num_actions]; float32, bfloat16, float16, or float64 (not on the triton backend).
        old_logits: Logits of the policy that drew the actions, like `logits`: `kl` is then KL(π_old ‖ π), exact.

    Actions are indices, [...], or [..., 1], integers. One that there is not makes the loss NaN.
    """

    logits: torch.Tensor
    old_logits: torch.Tensor | None = None

    def check(self, actions: Any) -> CheckedPolicy:
        """Check tensors and actions, for a loss."""
        return MultiCategorical(self.logits, None, self.old_logits).check(actions)


class Gaussian(NamedTuple):
    """Independent normal distributions, one per dimension of the action.

        log π(a) = Σ −(a − μ)²/(2σ²) − log σ − log √(2π)          H = Σ log σ + log √(2π) + 1/2
        KL(π_old ‖ π) = Σ log σ − log σ_old + (σ_old² + (μ_old − μ)²)/(2σ²) − 1/2     with `old_mean` and `old_log_std`

    Attributes:
        mean: μ, [..., num_dimensions]; float32, bfloat16, float16, or float64 (not on the triton backend).
        log_std: log σ, [num_dimensions] where it does not depend on the state, or like `mean`.
        old_mean: μ_old, like `mean`: `kl` is then KL(π_old ‖ π), exact.
        old_log_std: log σ_old, [num_dimensions] or like `mean`.

    Actions are like `mean`, as they were drawn: neither clipped nor squashed.
    """

    mean: torch.Tensor
    log_std: torch.Tensor
    old_mean: torch.Tensor | None = None
    old_log_std: torch.Tensor | None = None

    def check(self, actions: Any) -> CheckedPolicy:
        """Check tensors and actions, for a loss."""
        elements = elements_of("mean", self.mean, trailing=1)
        size = self.mean.shape[-1]
        inputs = [elements.check_matrix("mean", self.mean), check_log_std(elements, "log_std", self.log_std, self.mean)]
        old_inputs: tuple[torch.Tensor, ...] = ()
        if (self.old_mean is None) != (self.old_log_std is None):
            raise ValueError("old_log_std: got one of old_mean and old_log_std, expected both or neither")
        if self.old_mean is not None and self.old_log_std is not None:
            old_mean = elements.check_matrix("old_mean", self.old_mean, size, constant=True)
            old_inputs = old_mean, check_log_std(elements, "old_log_std", self.old_log_std, self.mean)
            check.check_detached("old_log_std", self.old_log_std)
        actions = elements.check_matrix("actions", actions, size, constant=True)
        return CheckedPolicy(elements, "gaussian", self[:2], inputs, actions, old_inputs, (size,))


class Bernoulli(NamedTuple):
    """Independent binary actions (MultiBinary), each 1 with probability sigmoid(logit).

        log π(a) = Σ log sigmoid(±x)          H = −Σ p·log p + (1 − p)·log(1 − p)          p = sigmoid(x)

    Attributes:
        logits: x, [..., num_actions]; float32, bfloat16, float16, or float64 (not on the triton backend).
        old_logits: Logits of the policy that drew the actions, like `logits`: `kl` is then KL(π_old ‖ π), exact.

    Actions are like `logits`: nonzero where the action is 1.
    """

    logits: torch.Tensor
    old_logits: torch.Tensor | None = None

    def check(self, actions: Any) -> CheckedPolicy:
        """Check tensors and actions, for a loss."""
        elements = elements_of("logits", self.logits, trailing=1)
        size = self.logits.shape[-1]
        given = [] if self.old_logits is None else [self.old_logits]
        old_inputs = [elements.check_matrix("old_logits", x, size, constant=True) for x in given]
        actions = elements.check_matrix("actions", actions, size, check.FLAG_DTYPES, constant=True)
        inputs = [elements.check_matrix("logits", self.logits)]
        return CheckedPolicy(elements, "bernoulli", (self.logits,), inputs, actions, old_inputs, (size,))


Policy = LogProbs | Categorical | MultiCategorical | Gaussian | Bernoulli
POLICIES = (LogProbs, Categorical, MultiCategorical, Gaussian, Bernoulli)
SEQUENCES.update(POLICIES)


def check_policy(policy: Any, actions: Any) -> CheckedPolicy:
    """A policy with its actions, checked."""
    if not isinstance(policy, POLICIES):
        expected = ", ".join(kind.__name__ for kind in POLICIES)
        raise TypeError(f"policy: got {type(policy).__name__}, expected one of {expected}")
    return policy.check(actions)


def check_logits(
    name: str, logits: Any, nvec: Sequence[int] | None
) -> tuple[Elements, Sequence[torch.Tensor], list[torch.Tensor], tuple[int, ...]]:
    """The elements, the logits as given and as matrices, and how many each distribution has."""
    network = (logits,) if isinstance(logits, torch.Tensor) else tuple(logits)
    if not network:
        raise ValueError(f"{name}: got no tensor, expected one for each distribution")
    elements = elements_of(name, network[0], trailing=1)
    inputs = [elements.check_matrix(name, x) for x in network]
    sizes = tuple(x.shape[1] for x in inputs)
    if nvec is not None:
        if len(network) > 1:
            raise ValueError(
                f"nvec: got {tuple(nvec)} together with {len(network)} tensors of {name}, expected one of them"
            )
        if sum(nvec) != sizes[0] or min(nvec) < 1:
            raise ValueError(f"nvec: got {tuple(nvec)}, expected sizes of 1 or more that add up to {sizes[0]}")
        sizes = tuple(int(n) for n in nvec)
    return elements, network, inputs, sizes


def check_log_std(elements: Elements, name: str, log_std: Any, mean: torch.Tensor) -> torch.Tensor:
    """Logarithms of standard deviations as [num_dimensions] or [num_elements, num_dimensions]."""
    size = mean.shape[-1]
    check.check_tensor(name, log_std, check.REAL_DTYPES)
    if log_std.shape != mean.shape and log_std.numel() == size == log_std.shape[-1]:
        check.check_device(name, log_std, elements.device)
        return drop_graph(log_std).reshape(size).contiguous()
    return elements.check_matrix(name, log_std, size)
