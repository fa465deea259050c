"""TorchRL: value estimators, and the functions they call, that compute with `rl_triton_core`.

One line turns them on, for one loss or for all that are made later:

    loss.make_value_estimator(TritonGAE, gamma=0.99, lmbda=0.95, value_network=critic)
    use_triton_estimators()

Everything around the computation is TorchRL's own: calls of the networks, keys, standardisation, gradient modes.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from collections.abc import Callable
from types import CellType
from typing import Any

import torch
from torch import Tensor

from rl_triton_adapters._copies import copy_function
from rl_triton_core import compute_gae, compute_lambda_returns, compute_vtrace

try:
    from torchrl.objectives.utils import ValueEstimators, default_value_kwargs, register_value_estimator
    from torchrl.objectives.value import GAE, TDLambdaEstimator, VTrace
    from torchrl.objectives.value.functional import SHAPE_ERR, _transpose_time
except ImportError as error:
    raise ImportError(
        "rl_triton_adapters.torchrl needs TorchRL, which could not be imported: pip install rl-triton-core[torchrl]"
    ) from error

__all__ = [
    "TritonGAE",
    "TritonTDLambdaEstimator",
    "TritonVTrace",
    "generalized_advantage_estimate",
    "td_lambda_return_estimate",
    "use_triton_estimators",
    "vtrace_advantage_estimate",
]

# ---------------------------------------------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------------------------------------------


@_transpose_time
def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates, by `rl_triton_core.compute_gae`.

    Takes the place of `torchrl.objectives.value.functional.generalized_advantage_estimate` and of its vectorized form.

    Args:
        gamma: Discount: a number, a tensor of one element, or one per step that broadcasts to `reward`.
        lmbda: λ in [0, 1]: a number or a tensor of one element.
        state_value: V(s_t), [*B, T, F]. Floating point.
        next_state_value: V(s_{t+1}) before any reset, read at every step that is not terminated.
        reward: Reward of the transition t → t+1.
        done: Whether the transition ended the trajectory, in a terminal state or not.
        terminated: Whether it ended in a terminal state; None takes `done`. A terminated step counts as done.
        time_dim: Where T is.

    Returns:
        Advantages and value targets, [*B, T, F], of the dtype of `state_value`.

    Raises:
        RuntimeError: The shapes differ, or there is no such `time_dim`.
        NotImplementedError: `lmbda` has several elements.
        TypeError: A dtype is not one that `rl_triton_core.compute_gae` takes.
        ValueError: `gamma` or `lmbda` is out of range, or there are no dimensions T and F.
    """
    steps = _steps(gamma, next_state_value, reward, done, terminated, values=state_value)
    advantages, targets = compute_gae(**steps, lambda_=_number("lmbda", lmbda))
    return _restored(advantages, state_value), _restored(targets, state_value)


@_transpose_time
def td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """TD(λ) returns, by `rl_triton_core.compute_lambda_returns`.

    Takes the place of `torchrl.objectives.value.functional.td_lambda_return_estimate` and of its vectorized form.

    Args:
        gamma: As in `generalized_advantage_estimate`.
        lmbda: As in `generalized_advantage_estimate`.
        next_state_value: As in `generalized_advantage_estimate`.
        reward: As in `generalized_advantage_estimate`.
        done: As in `generalized_advantage_estimate`.
        terminated: As in `generalized_advantage_estimate`.
        rolling_gamma: True or None: a discount per step belongs to that step.
        time_dim: Where T is.

    Returns:
        Returns, [*B, T, F], of the dtype of `next_state_value`.

    Raises:
        RuntimeError: As in `generalized_advantage_estimate`.
        NotImplementedError: As in `generalized_advantage_estimate`, or `rolling_gamma` is False.
        TypeError: As in `generalized_advantage_estimate`.
        ValueError: As in `generalized_advantage_estimate`.
    """
    if rolling_gamma is not None and not rolling_gamma:
        raise NotImplementedError(f"rolling_gamma: got {rolling_gamma!r}, expected True or None")
    steps = _steps(gamma, next_state_value, reward, done, terminated)
    return _restored(compute_lambda_returns(**steps, lambda_=_number("lmbda", lmbda)), next_state_value)


@_transpose_time
def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-Trace advantages and targets vs, the latter by `rl_triton_core.compute_vtrace`.

        advantages[t] = min(ρ̄, ratio)·(r[t] + γ·NVS[t] − V[t])

    NVS[t] is 0 where step t terminated, V(s_{t+1}) of `next_state_value` where it was done and at the window's end, and
    vs[t+1] elsewhere. The core's own advantages would take V(s_{t+1}) + vs[t+1] − V[t+1] there, which is another number
    where `next_state_value` comes from another network than `state_value`.

    Takes the place of `torchrl.objectives.value.functional.vtrace_advantage_estimate`.

    Args:
        gamma: As in `generalized_advantage_estimate`.
        log_pi: Log-probability of the action under the policy to be learned, broadcasts to `reward`.
        log_mu: Log-probability of the action under the policy that acted, likewise.
        state_value: As in `generalized_advantage_estimate`.
        next_state_value: As in `generalized_advantage_estimate`.
        reward: As in `generalized_advantage_estimate`.
        done: As in `generalized_advantage_estimate`.
        terminated: As in `generalized_advantage_estimate`.
        rho_thresh: ρ̄ >= 0, clip of the temporal difference's weight: a number or a tensor of one element.
        c_thresh: c̄ >= 0, clip of the trace, likewise.
        time_dim: Where T is. By name only: TorchRL's function misreads it by position.

    Returns:
        Advantages and targets, as in `generalized_advantage_estimate`.

    Raises:
        RuntimeError: As in `generalized_advantage_estimate`.
        NotImplementedError: `rho_thresh` or `c_thresh` has several elements.
        TypeError: As in `generalized_advantage_estimate`.
        ValueError: As in `generalized_advantage_estimate`, or a clip is negative.
    """
    terminated = done if terminated is None else terminated
    steps = _steps(gamma, next_state_value, reward, done, terminated, values=state_value)
    log_ratios, rho_bar = log_pi - log_mu, _number("rho_thresh", rho_thresh)
    result = compute_vtrace(
        **steps,
        log_ratios=_rows(log_ratios, reward.shape),
        rho_bar=rho_bar,
        c_bar=_number("c_thresh", c_thresh),
        compute_advantages=False,
    )
    targets = _restored(result.targets, state_value)
    ahead = torch.cat([targets[..., 1:, :], next_state_value[..., -1:, :]], dim=-2)
    ahead = torch.where(terminated.bool(), 0, torch.where(done.bool(), next_state_value, ahead))
    return log_ratios.exp().clamp(max=rho_bar) * (reward + gamma * ahead - state_value), targets


def _steps(
    gamma: float | Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None,
    **values: Tensor,
) -> dict[str, Any]:
    """The arguments that every estimator of the core takes."""
    streams = {"rewards": reward, "next_values": next_state_value, "truncated": done, **values}
    streams["terminated"] = done if terminated is None else terminated
    if len({x.shape for x in streams.values()}) > 1:
        raise RuntimeError(SHAPE_ERR)
    if reward.ndim < 2:
        raise ValueError(f"reward: got shape {tuple(reward.shape)}, expected [*B, T, F], or [T] with time_dim=-1")
    per_step = isinstance(gamma, Tensor) and (gamma.numel() > 1 or gamma.requires_grad)
    discount = _rows(gamma, reward.shape) if per_step else _number("gamma", gamma)
    return {"gamma": discount, **{name: _rows(x, reward.shape) for name, x in streams.items()}}


def _rows(x: Any, shape: torch.Size) -> Tensor:
    """What broadcasts to [*B, T, F] as [rows, T], in place if strides allow it."""
    rows: Tensor = x.expand(shape).transpose(-2, -1).flatten(0, -2)
    return rows


def _restored(rows: Any, like: Tensor) -> Tensor:
    """A result of the core as [*B, T, F]."""
    result: Tensor = rows.unflatten(0, (*like.shape[:-2], like.shape[-1])).transpose(-2, -1).to(like.dtype)
    return result


def _number(name: str, number: float | Tensor) -> float:
    """A number, or that in a tensor of one element, which waits for the tensor's device."""
    if not isinstance(number, Tensor):
        return number
    if number.numel() != 1:
        raise NotImplementedError(f"{name}: got shape {tuple(number.shape)}, expected a number or one element")
    return number.item()


# ---------------------------------------------------------------------------------------------------------------------
# Classes
# ---------------------------------------------------------------------------------------------------------------------


def replace_call(ours: Callable[..., Any], method: Any) -> Any:
    """A copy of a TorchRL method, with its decorators, that calls `ours` where it called TorchRL's of that name.

    Raises:
        ImportError: It calls no function of that name, vectorized or not: another TorchRL than this file knows.
    """
    inner = getattr(method, "__wrapped__", None)
    if inner is not None:
        copied = replace_call(ours, inner)
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in method.__closure__)
        return copy_function(method, {}, cells)
    names = {ours.__name__, f"vec_{ours.__name__}"}.intersection(method.__code__.co_names)
    if not names:
        raise ImportError(f"TorchRL's {method.__qualname__} calls no {ours.__name__}: another version is needed")
    return copy_function(method, dict.fromkeys(names, ours))


class TritonGAE(GAE):
    """`GAE` of TorchRL with the advantages of `rl_triton_core`. `vectorized` makes no difference."""

    forward = replace_call(generalized_advantage_estimate, GAE.forward)
    value_estimate = replace_call(generalized_advantage_estimate, GAE.value_estimate)


class TritonTDLambdaEstimator(TDLambdaEstimator):
    """`TDLambdaEstimator` of TorchRL with the returns of `rl_triton_core`. `vectorized` makes no difference."""

    value_estimate = replace_call(td_lambda_return_estimate, TDLambdaEstimator.value_estimate)


class TritonVTrace(VTrace):
    """`VTrace` of TorchRL with the targets of `rl_triton_core`."""

    forward = replace_call(vtrace_advantage_estimate, VTrace.forward)


def use_triton_estimators(enabled: bool = True) -> None:
    """Let every loss make these estimators where it is asked for `ValueEstimators.GAE`, `TDLambda` or `VTrace`.

    Enters them in TorchRL's registry, under the defaults that stand there: in this process, for losses and calls of
    `make_value_estimator` from here on.

    Args:
        enabled: False enters TorchRL's own again.
    """
    pairs = {
        ValueEstimators.GAE: (GAE, TritonGAE),
        ValueEstimators.TDLambda: (TDLambdaEstimator, TritonTDLambdaEstimator),
        ValueEstimators.VTrace: (VTrace, TritonVTrace),
    }
    for value_type, pair in pairs.items():
        register_value_estimator(value_type, default_kwargs=default_value_kwargs(value_type))(pair[enabled])
