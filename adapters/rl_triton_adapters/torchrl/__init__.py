"""TorchRL: value estimators, and the functions they call, that compute with `rl_triton_core`.

One line turns them on, for one loss or for all that are made later:

    loss.make_value_estimator(TritonGAE, gamma=0.99, lmbda=0.95, value_network=critic)
    use_triton_estimators()

Everything around the computation is TorchRL's own: calls of the networks, keys, standardisation, gradient modes.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from collections.abc import Callable
from functools import reduce, wraps
from inspect import signature
from types import CellType
from typing import Any

import torch
from torch import Tensor

from rl_triton_adapters.common.overrides import CopiedMethodsMixin
from rl_triton_adapters.common.switch import with_switch
from rl_triton_adapters.common.versions import explain_version, explained_import
from rl_triton_core import compute_gae, compute_lambda_returns, compute_vtrace
from rl_triton_core.reach import copy_function

with explained_import(__name__, "torchrl", "0.14"):
    from torchrl.objectives.utils import ValueEstimators, default_value_kwargs, register_value_estimator
    from torchrl.objectives.value import GAE, TDLambdaEstimator, VTrace, functional
    from torchrl.objectives.value.functional import SHAPE_ERR, _transpose_time

__all__ = [
    "TritonGAE",
    "TritonTDLambdaEstimator",
    "TritonVTrace",
    "generalized_advantage_estimate",
    "td_lambda_return_estimate",
    "use_triton_estimators",
    "vtrace_advantage_estimate",
]

LOOPS = functional.generalized_advantage_estimate, functional.td_lambda_return_estimate
"""Their results have the dtype of the values; those of TorchRL's other functions have the one that all promote to."""

# -- functions, in the place of those of these names in `torchrl.objectives.value.functional`, and of vectorised ones --


def with_stock(stock: Callable[..., Any], other: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """As `with_switch`, with the dtypes of TorchRL's results; `other`, or `stock`, computes what ours does not."""

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        names, compute = [*signature(ours).parameters], with_switch(stock)(ours)

        @wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args)), **kwargs}  # noqa: B905 (most are left out)
            if needs_stock(given):
                return (other or stock)(*args, **kwargs)
            result = compute(*args, **kwargs)
            if stock not in LOOPS:
                return result
            dtype = given["next_state_value"].dtype
            if isinstance(result, Tensor):
                return result.to(dtype)
            return result[0].to(dtype), result[1].to(torch.promote_types(dtype, given["state_value"].dtype))

        return call

    return decorate


def needs_stock(given: dict[str, Any]) -> bool:
    """Whether ours does not compute it: λ or a clip per step or with a gradient, a discount for all that follows."""
    is_rolling = given.get("rolling_gamma") is not False
    tensors = [x for x in map(given.get, ("lmbda", "rho_thresh", "c_thresh")) if isinstance(x, Tensor)]
    return not is_rolling or any(x.numel() > 1 or (x.requires_grad and torch.is_grad_enabled()) for x in tensors)


@with_stock(functional.vec_generalized_advantage_estimate, functional.generalized_advantage_estimate)
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

    Arguments are TorchRL's: `gamma` a number, a tensor of one element, or one per step that broadcasts to `reward`;
    `lmbda` in [0, 1], of which TorchRL's function computes what has several elements; values, rewards and flags
    [*B, T, F]. Advantages and value targets have the dtype that values, rewards and `gamma` promote to.

    Raises:
        RuntimeError: The shapes differ, or there is no such `time_dim`.
        TypeError: A dtype is not one that the estimator takes.
        ValueError: `gamma` or `lmbda` is out of range, or there are no dimensions T and F.
    """
    dtype = _promote_dtypes(gamma, state_value, next_state_value, reward)
    steps = _build_steps(dtype, gamma, reward, done, terminated, values=state_value, next_values=next_state_value)
    advantages, targets = compute_gae(**steps, lambda_=_read_number(lmbda))
    return _restore_layout(advantages, reward.shape, dtype), _restore_layout(targets, reward.shape, dtype)


@with_stock(functional.vec_td_lambda_return_estimate, functional.td_lambda_return_estimate)
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

    Arguments and errors are as of `generalized_advantage_estimate`; ``rolling_gamma=False`` is left to TorchRL's
    function. Returns have the dtype that values, rewards, `gamma` and `lmbda` promote to.
    """
    dtype = _promote_dtypes(gamma, lmbda, next_state_value, reward)
    steps = _build_steps(dtype, gamma, reward, done, terminated, next_values=next_state_value)
    return _restore_layout(compute_lambda_returns(**steps, lambda_=_read_number(lmbda)), reward.shape, dtype)


@with_stock(functional.vtrace_advantage_estimate)
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

    NVS[t] is 0 where step t terminated, V(s_{t+1}) of `next_state_value` where it was done and at the end, and vs[t+1]
    elsewhere. The core's own advantages would take V(s_{t+1}) + vs[t+1] − V[t+1] there, which is another number
    where `next_state_value` comes from another network than `state_value`.

    Arguments and errors are as of `generalized_advantage_estimate`; clips are >= 0, and those of several elements are
    left to TorchRL's function. It misreads `time_dim` by position: it goes by name.
    Results have the dtype that values, rewards, log-probabilities and `gamma` promote to.
    """
    terminated = done if terminated is None else terminated
    dtype = _promote_dtypes(gamma, log_pi, log_mu, state_value, next_state_value, reward)
    steps = _build_steps(dtype, gamma, reward, done, terminated, values=state_value, next_values=next_state_value)
    log_ratios, rho_bar = log_pi.to(dtype) - log_mu, _read_number(rho_thresh)
    result = compute_vtrace(
        **steps,
        log_ratios=_flatten_to_rows(log_ratios, reward.shape),
        rho_bar=rho_bar,
        c_bar=_read_number(c_thresh),
        compute_advantages=False,
    )
    targets = _restore_layout(result.targets, reward.shape, dtype)
    next_targets = torch.cat([targets[..., 1:, :], next_state_value[..., -1:, :]], dim=-2)
    next_targets = torch.where(terminated.bool(), 0, torch.where(done.bool(), next_state_value, next_targets))
    advantages = log_ratios.exp().clamp(max=rho_bar) * (reward + gamma * next_targets - state_value)
    return advantages.to(dtype), targets


def _build_steps(
    dtype: torch.dtype, gamma: float | Tensor, reward: Tensor, done: Tensor, terminated: Tensor | None, **values: Tensor
) -> dict[str, Any]:
    """Lay TorchRL's tensors out as the arguments that every estimator of the core takes."""
    streams = {"rewards": reward.to(dtype), "truncated": done, **values}
    streams["terminated"] = done if terminated is None else terminated
    if len({x.shape for x in streams.values()}) > 1:
        raise RuntimeError(SHAPE_ERR)
    if reward.ndim < 2:
        raise ValueError(f"reward: got shape {tuple(reward.shape)}, expected [*B, T, F], or [T] with time_dim=-1")
    per_step = isinstance(gamma, Tensor) and (gamma.numel() > 1 or gamma.requires_grad)
    discount = _flatten_to_rows(gamma, reward.shape) if per_step else _read_number(gamma)
    return {"gamma": discount, **{name: _flatten_to_rows(x, reward.shape) for name, x in streams.items()}}


def _flatten_to_rows(x: Any, shape: torch.Size) -> Tensor:
    """View what broadcasts to [*B, T, F] as [rows, T]; a copy only where strides ask for it."""
    return x.expand(shape).transpose(-2, -1).flatten(0, -2)  # type: ignore[no-any-return]


def _restore_layout(rows: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """View a result of the core as [*B, T, F], and convert it."""
    return rows.unflatten(0, (*shape[:-2], shape[-1])).transpose(-2, -1).to(dtype)  # type: ignore[no-any-return]


def _promote_dtypes(*given: float | Tensor) -> torch.dtype:
    """The dtype of an expression of these, as TorchRL has them: numbers are multiplied with tensors of integers."""
    kinds = torch.get_default_dtype(), torch.int32
    return reduce(torch.promote_types, (x.dtype if isinstance(x, Tensor) else kinds[isinstance(x, int)] for x in given))


def _read_number(number: float | Tensor) -> Any:
    """Read a number out of a tensor of one element, which waits for the tensor's device.

    While torch.compile traces, it is a tensor in host memory, which the compiled code reads.
    """
    if not isinstance(number, Tensor):
        return number
    return number.detach().cpu().reshape(()) if torch.compiler.is_compiling() else number.item()


# -- classes -----------------------------------------------------------------------------------------------------------


def replace_call(ours: Callable[..., Any], method: Any) -> Any:
    """Copy a TorchRL method, with its decorators, so that it calls `ours` where it called TorchRL's of that name."""
    inner = getattr(method, "__wrapped__", None)
    if inner is not None:
        copied = replace_call(ours, inner)
        cells = tuple(CellType(copied) if cell.cell_contents is inner else cell for cell in method.__closure__)
        return copy_function(method, {}, cells)
    names = {ours.__name__, f"vec_{ours.__name__}"}.intersection(method.__code__.co_names)
    if not names:
        raise explain_version(f"TorchRL's {method.__qualname__} calls no {ours.__name__}", "torchrl", "0.14")
    return copy_function(method, {name: with_stock(method.__globals__[name])(ours) for name in names})


class TritonGAE(GAE, CopiedMethodsMixin):
    """`GAE` of TorchRL with the advantages of `rl_triton_core`. `vectorized` makes no difference."""

    forward = replace_call(generalized_advantage_estimate, GAE.forward)
    value_estimate = replace_call(generalized_advantage_estimate, GAE.value_estimate)


class TritonTDLambdaEstimator(TDLambdaEstimator, CopiedMethodsMixin):
    """`TDLambdaEstimator` of TorchRL with the returns of `rl_triton_core`. `vectorized` makes no difference."""

    value_estimate = replace_call(td_lambda_return_estimate, TDLambdaEstimator.value_estimate)


class TritonVTrace(VTrace, CopiedMethodsMixin):
    """`VTrace` of TorchRL with the targets of `rl_triton_core`."""

    forward = replace_call(vtrace_advantage_estimate, VTrace.forward)


def use_triton_estimators(enabled: bool = True) -> None:
    """Make every loss use these estimators for `ValueEstimators.GAE`, `TDLambda` and `VTrace`.

    Registers them with TorchRL, under the defaults that are registered there: in this process, for losses that are made
    and calls of `make_value_estimator` from here on. With ``enabled=False``, TorchRL's own are registered again.
    """
    pairs = {
        ValueEstimators.GAE: (GAE, TritonGAE),
        ValueEstimators.TDLambda: (TDLambdaEstimator, TritonTDLambdaEstimator),
        ValueEstimators.VTrace: (VTrace, TritonVTrace),
    }
    for value_type, pair in pairs.items():
        register_value_estimator(value_type, default_kwargs=default_value_kwargs(value_type))(pair[enabled])
