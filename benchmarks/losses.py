"""The losses, forward and with gradients, against PyTorch's operations, eager and compiled.

On a CPU torch.compile compiles for any size. Our result is compared with eager PyTorch's before it is timed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import distributions

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting
from rl_triton_core.losses import Categorical, Gaussian, LogProbs, grpo_loss, ppo_loss
from rl_triton_core.testing import assert_close

KINDS = ("forward", "forward and backward")
TOKENS = 64  # of a sequence


def draw_minibatch(head: str, n: int, width: int, device: str) -> dict[str, torch.Tensor]:
    x = torch.randn(n, width, device=device)
    shape = (-1, TOKENS) if head == "tokens" else (n,)
    values, returns, advantages, noise = (x.view(shape) for x in torch.randn(4, n, device=device))
    data = {"values": values.requires_grad_(), "returns": returns, "advantages": advantages}
    if head == "categorical":
        data |= {"x": x.requires_grad_(), "actions": torch.randint(width, (n,), device=device)}
        old = distributions.Categorical(logits=x.detach(), validate_args=False).log_prob(data["actions"])
    elif head == "gaussian":
        data |= {"x": x.requires_grad_(), "log_std": torch.zeros(width, device=device, requires_grad=True)}
        data["actions"] = torch.randn(n, width, device=device)
        old = distributions.Normal(x.detach(), 1.0, validate_args=False).log_prob(data["actions"]).sum(-1)
    else:
        data["x"] = (-x[:, 0].abs()).view(shape).requires_grad_()
        old = data["x"].detach()
    return {**data, "old": old + 0.1 * noise}


def compute_plain(head: str, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss as frameworks write it."""
    log_prob, entropy = b["x"], -b["x"]
    if head == "categorical":
        d = distributions.Categorical(logits=b["x"], validate_args=False)
        log_prob, entropy = d.log_prob(b["actions"]), d.entropy()
    elif head == "gaussian":
        d = distributions.Normal(b["x"], b["log_std"].exp().expand_as(b["x"]), validate_args=False)
        log_prob, entropy = d.log_prob(b["actions"]).sum(-1), d.entropy().sum(-1)
    a = b["advantages"]
    ratio = (log_prob - b["old"]).exp()
    if head == "tokens":
        x = b["returns"] - log_prob
        return (-torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) + 0.04 * (x.exp() - 1 - x)).mean()
    a = (a - a.mean()) / (a.std() + 1e-8)
    policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    return policy + 0.5 * ((b["values"] - b["returns"]) ** 2).mean() - 0.01 * entropy.mean()


def compute_fused(head: str, b: dict[str, torch.Tensor]) -> torch.Tensor:
    value = {"values": b["values"], "returns": b["returns"], "normalize_advantages": True}
    if head == "tokens":
        return grpo_loss(b["x"], b["old"], b["advantages"], ref_log_probs=b["returns"], kl_coef=0.04).loss
    kind = {"categorical": Categorical, "gaussian": Gaussian}.get(head, LogProbs)
    policy = kind(*(b[name] for name in ("x", "log_std") if name in b))
    return ppo_loss(policy, b.get("actions"), b["old"], b["advantages"], entropy_coef=0.01, **value).loss


def measure(setting: Setting, options: Options) -> Rows:
    harness.set_threads(setting.threads)
    b = draw_minibatch(setting.head, setting.elements, setting.width, options.device)
    with torch.no_grad():  # a graph that lives on ties the inputs to this stream, and none of them can be captured
        want, got = compute_plain(setting.head, b), compute_fused(setting.head, b)
    assert_close(got.cpu(), want.double().cpu(), rtol=1e-4, name=str(setting))
    for kind in KINDS:
        leaves = list_leaves(kind, b)
        compiled = compile_plain(setting.head, options.device)
        losses = {"eager": partial(compute_plain, setting.head, b), "compiled": partial(compiled, b)}
        losses["ours"] = partial(compute_fused, setting.head, b)
        arms = {name: partial(harness.run_pass, loss, leaves) for name, loss in losses.items()}
        moved = sum(x.nbytes for x in (*b.values(), *leaves))
        about = {"moved": moved, "peaks": True, "kind": kind}
        yield from harness.measure_arms(arms, options.device, options.seconds, **about)


def prepare(settings: Sequence[Setting], options: Options) -> None:
    harness.compile_ahead(compile_only, [(setting,) for setting in settings], options)


def compile_only(setting: Setting) -> None:
    b = draw_minibatch(setting.head, setting.elements, setting.width, "cuda")
    for kind in KINDS:
        for function in (compile_plain(setting.head, "cuda"), partial(compute_fused, setting.head)):
            harness.run_pass(function, list_leaves(kind, b), b)


def compile_plain(head: str, device: str) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()  # after some heads, kinds and sizes it would compile no more, and run what is eager
    return torch.compile(partial(compute_plain, head), dynamic=device == "cpu")


def list_leaves(kind: str, b: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Those whose gradients are asked for."""
    return [x for x in b.values() if x.requires_grad and kind != "forward"]
