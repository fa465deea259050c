"""Minibatches for the losses, and the comparison with the oracles."""

import math
from typing import Any, NamedTuple

import oracles_losses as oracle
import torch

from rl_triton_core import losses
from rl_triton_core.testing import assert_close


class Case(NamedTuple):
    head: str
    network: dict[str, Any]  # tensors with gradients: what the network gives, and the values
    data: dict[str, Any]
    old: dict[str, Any]  # outputs of the old network


HEADS = ("ppo", "entropy", "categorical", "multi", "nvec", "gaussian", "gaussian per state", "bernoulli")


def make(head, n=37, size=5, seed=0, dtype=torch.float32, spread=1.0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def randint(high, *shape):
        return torch.randint(high, shape, generator=g)

    network, old, data = {}, {}, {}
    sizes = (size, 2, 3)
    if head in ("ppo", "entropy"):
        network["log_probs"] = -randn(n).abs() - 0.1
        if head == "entropy":
            network["entropy"] = randn(n).abs()
    elif head in ("categorical", "bernoulli"):
        network["logits"], old["old_logits"] = spread * randn(n, size), spread * randn(n, size)
        data["actions"] = randint(size, n) if head == "categorical" else randint(2, n, size)
    elif head in ("multi", "nvec"):
        network["logits"] = [spread * randn(n, k) for k in sizes]
        old["old_logits"] = [spread * randn(n, k) for k in sizes]
        data["actions"] = torch.stack([randint(k, n) for k in sizes], -1)
        if head == "nvec":
            data["nvec"] = sizes
            network["logits"], old["old_logits"] = torch.cat(network["logits"], 1), torch.cat(old["old_logits"], 1)
    else:
        shape = (n, size) if head == "gaussian per state" else (size,)
        network |= {"mean": spread * randn(n, size), "log_std": 0.3 * randn(*shape)}
        old |= {"old_mean": network["mean"] + 0.2 * randn(n, size), "old_log_std": 0.3 * randn(*shape)}
        data["actions"] = network["mean"] + randn(n, size)
    network["values"] = randn(n)
    data["returns"] = network["values"] + randn(n)
    data["old_values"] = network["values"] + 0.3 * randn(n)
    data["advantages"] = 0.5 + randn(n)
    case = Case(head, cast(network, dtype), cast(data, dtype), cast(old, dtype))
    log_prob = policy_of(case, case.network, {})[0].detach()
    case.data["old_log_probs"] = (log_prob + 0.3 * randn(n)).to(dtype)
    case.data["ref_log_probs"] = (log_prob + 0.3 * randn(n)).to(dtype)
    return case


def each(function, x):
    if isinstance(x, list):
        return [each(function, y) for y in x]
    return function(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def cast(tensors, dtype):
    return {name: each(lambda t: t.to(dtype), x) for name, x in tensors.items()}


def policy_of(case, network, old):
    head, actions = case.head, case.data.get("actions")
    if head in ("ppo", "entropy"):
        log_prob = network["log_probs"].double()
        return log_prob, network["entropy"].double() if head == "entropy" else -log_prob, 0.0
    if head == "nvec":
        network = {"logits": list(network["logits"].split(case.data["nvec"], 1))}
        old = {name: list(x.split(case.data["nvec"], 1)) for name, x in old.items()}
    if head in ("categorical", "multi", "nvec"):
        return oracle.categorical(network["logits"], actions, **old)
    if head == "bernoulli":
        return oracle.bernoulli(network["logits"], actions, **old)
    return oracle.gaussian(network["mean"], network["log_std"], actions, **old)


POLICIES = {"ppo": "LogProbs", "entropy": "LogProbs", "multi": "MultiCategorical", "nvec": "MultiCategorical"}


def call(case, network, *, device="cpu", exact_kl=False, **options):
    kind = getattr(losses, POLICIES.get(case.head, case.head.split()[0].capitalize()))
    data = {**case.data, **(case.old if exact_kl else {})}
    data.pop("ref_log_probs" if exact_kl or "kl_estimator" not in options else "", None)
    arguments = {key: each_on(device, x) for key, x in {**network, **data, **arrange(options)}.items()}
    policy = kind(**{name: arguments.pop(name) for name in kind._fields if name in arguments})
    return losses.ppo_loss(policy, arguments.pop("actions", None), **arguments)


def arrange(options):
    """The oracle's options as the losses take them."""
    options = dict(options)
    how = {name: options.pop(name) for name in losses.Normalization._fields if name in options}
    if how and options.get("normalize_advantages"):
        options["normalize_advantages"] = losses.Normalization(**how)
    if options.pop("value_loss", "mse") == "mse":
        options.pop("huber_delta", None)
    return options


def each_on(device, x):
    if isinstance(x, list):
        return [y.to(device) for y in x]
    return x.to(device) if isinstance(x, torch.Tensor) else x


def leaves(network, dtype=None):
    """Tensors of their own that require grad."""
    fresh = {name: each(lambda t: t.detach().to(dtype or t.dtype).clone(), x) for name, x in network.items()}
    return fresh, [t.requires_grad_() for x in fresh.values() for t in (x if isinstance(x, list) else [x])]


def differentiate(case, target=None, *, factor=1.0, **options):
    """The call's result, and the tensors whose gradients it has given."""
    network, inputs = leaves(case.network)
    options |= {} if target is None else {"device": target.device, "backend": target.backend}
    got = call(case, network, **options)
    (factor * got.loss).backward()
    return got, inputs


def check(case, target, *, mask=None, exact_kl=False, rtol=1e-5, grad_rtol=None, factor=1.0, **options):
    """Loss, parts, statistics and gradients are the oracle's."""
    got, inputs = differentiate(case, target, exact_kl=exact_kl, mask=mask, factor=factor, **options)
    exact, exact_inputs = leaves(case.network, torch.float64)
    numbers = {name: x for name, x in options.items() if name != "epsilon_mode"}
    data = {k: v for k, v in case.data.items() if k not in ("actions", "nvec", "ref_log_probs")}
    if "kl_estimator" in options:
        data["ref_log_probs"] = case.data["ref_log_probs"]
    policy = policy_of(case, exact, cast(case.old, torch.float64) if exact_kl else {})
    want = oracle.ppo(policy, values=exact["values"], weights=mask, **data, **numbers)
    for name, expected in want._asdict().items():
        close(getattr(got, name), expected, rtol, name)
    assert got.loss.requires_grad and not any(x.requires_grad for x in got[1:])
    (factor * want.loss).backward()
    for x, expected in zip(inputs, exact_inputs, strict=True):
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
        assert_close(
            x.grad.double(),
            torch.zeros_like(expected) if expected.grad is None else expected.grad,
            rtol=grad_rtol or rtol,
            name="gradient",
        )
    return got


def close(got, expected, rtol, name):
    """Relative to 1 or to what is expected: parts of a loss cancel."""
    got, expected = float(got.detach()), float(expected.detach())
    assert (
        got == expected
        or abs(got - expected) <= rtol * max(1, abs(expected))
        or (math.isnan(got) and math.isnan(expected))
    ), f"{name}: got {got}, expected {expected}"
