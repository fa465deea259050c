"""Advantages relative to a group of answers to the same question (Shao et al. 2024)."""

from __future__ import annotations

import math

import numpy as np
import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.backend import check_choice, copy_to_host, needs_host

MODES = ("mean-std", "mean", "leave-one-out")


def group_normalize(
    rewards: torch.Tensor,
    groups: int | torch.Tensor,
    *,
    mode: str = "mean-std",
    correction: float = 1,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    r"""Rewards relative to those of their group.

        mode               result
        "mean-std"         (r − μ)/(σ + ε)                  GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300)
        "mean"             r − μ                            Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783)
        "leave-one-out"    r − mean of the others           RLOO (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740)

    A group too small for that (of one, in "leave-one-out"; of no more than `correction`, in "mean-std") keeps its
    rewards. Sums are float64 and have one order: equal inputs give equal bits.

    Args:
        rewards: r, of any shape; float32, bfloat16, float16 or float64. A reward that is not finite spoils its group.
        groups: The size of every group, if groups lie side by side in the flattened `rewards`; or the group of each
            reward, any integers, shaped like `rewards`.
        mode: See above.
        correction: What the variance's divisor is less than the size of the group, finite and >= 0.
        epsilon: ε, finite and >= 0.

    Returns:
        Shaped like `rewards`, float32 (float64 if `rewards` is). No gradient flows through it.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.

    Example:
        >>> group_normalize(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2, mode="mean")
        tensor([-1.,  1.,  0.,  0.])
    """
    check.check_tensor("rewards", rewards, check.REAL_DTYPES)
    check.check_choice("mode", mode, MODES)
    correction = check.check_number("correction", correction, 0.0, math.inf)
    epsilon = check.check_number("epsilon", epsilon, 0.0, math.inf)
    r, device = rewards.detach(), rewards.device
    if isinstance(groups, torch.Tensor):
        check.check_tensor("groups", groups, check.INTEGER_DTYPES)
        check.check_shape("groups", groups, rewards.shape, "that of rewards", device)
    if needs_host(device):
        check_choice(None, device)
        r, groups = copy_to_host((r, groups))
    r = r.double().reshape(-1)
    if isinstance(groups, torch.Tensor):
        count, mean, m2 = moments_by_id(r, groups.reshape(-1))
    else:
        count, mean, m2 = moments_by_size(r, groups)
    if mode == "mean-std":
        enough = count > correction
        std = torch.sqrt(m2 / torch.where(enough, count - correction, 1))
        divisor = std + epsilon
        result = torch.where(enough, torch.where(divisor == 0, 0, (r - mean) / divisor), r)
    elif mode == "mean":
        result = r - mean
    else:
        result = torch.where(count > 1, (r - mean) * (count / (count - 1).clamp(min=1)), r)
    return result.reshape(rewards.shape).to(check.find_precision((rewards,))).to(device)


def moments_by_size(r: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Size, mean and sum of squared deviations of each reward's group, of `size` rewards in a row."""
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
        raise TypeError(f"groups: got {type(size).__name__}, expected an int or a tensor of integers")
    if size < 1 or r.shape[0] % size:
        raise ValueError(f"groups: got {size}, expected a divisor of the number of rewards, {r.shape[0]}")
    rows = r.view(-1, size)
    mean = rows[:, :1] + (rows - rows[:, :1]).mean(1, keepdim=True)
    m2 = (rows - mean).square().sum(1, keepdim=True)
    return torch.full_like(r, size), mean.expand_as(rows).reshape(-1), m2.expand_as(rows).reshape(-1)


def moments_by_id(r: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Size, mean and sum of squared deviations of each reward's group, of rewards with the same id."""
    ids, order = ids.sort(stable=True)
    begins = torch.cat([ids.new_zeros(min(1, len(ids)), dtype=torch.bool), ids[1:] != ids[:-1]])
    group = begins.cumsum(0)
    offsets = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))
    x = r[order]
    first = x[offsets[group]]

    def sum_groups(values: torch.Tensor) -> torch.Tensor:
        """The sum over each element's group."""
        sums = torch.segment_reduce(values, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
        return sums[group]

    count = sum_groups(torch.ones_like(x))
    mean = first + sum_groups(x - first) / count
    m2 = sum_groups((x - mean).square())
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(ids), device=ids.device))
    return count[back], mean[back], m2[back]
