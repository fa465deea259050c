"""Time the losses, forward and with gradients, against PyTorch's operations, eager and compiled.

    python benchmarks/losses.py OUTPUT [--device cuda] [--quick]

Arms take turns; a row has the median and quartiles of the full call's time, and the peak memory. The result is
OUTPUT/losses.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributions import Categorical, Normal

from rl_triton_core.losses import categorical_ppo_loss, gaussian_ppo_loss, grpo_loss, ppo_loss

COMMON = {"normalize_advantages": True, "entropy_coef": 0.01}
SIZES = (64, 2048, 32768, 1 << 20, 1 << 21)
WIDTHS = {"log-probs": (1,), "tokens": (1,), "categorical": (2, 18, 64), "gaussian": (1, 8, 32)}
MOST_NUMBERS = 1 << 27


def draw(head: str, n: int, width: int, device: str) -> dict[str, torch.Tensor]:
    """A minibatch."""
    x = torch.randn(n, width, device=device)
    values, returns, advantages, noise = torch.randn(4, n, device=device)
    data = {"values": values.requires_grad_(), "returns": returns, "advantages": advantages}
    if head == "categorical":
        data |= {"x": x.requires_grad_(), "actions": torch.randint(width, (n,), device=device)}
        old = Categorical(logits=x.detach(), validate_args=False).log_prob(data["actions"])
    elif head == "gaussian":
        data |= {"x": x.requires_grad_(), "log_std": torch.zeros(width, device=device, requires_grad=True)}
        data["actions"] = torch.randn(n, width, device=device)
        old = Normal(x.detach(), 1.0, validate_args=False).log_prob(data["actions"]).sum(-1)
    else:
        data["x"] = (-x[:, 0].abs()).requires_grad_()
        old = data["x"].detach()
    return {**data, "old": old + 0.1 * noise}


def compute_plain(head: str, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss as frameworks write it."""
    log_prob, entropy = b["x"], -b["x"]
    if head == "categorical":
        d = Categorical(logits=b["x"], validate_args=False)
        log_prob, entropy = d.log_prob(b["actions"]), d.entropy()
    elif head == "gaussian":
        d = Normal(b["x"], b["log_std"].exp().expand_as(b["x"]), validate_args=False)
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
    """The same by this library."""
    value = {"values": b["values"], "returns": b["returns"], **COMMON}
    if head == "categorical":
        return categorical_ppo_loss(b["x"], b["actions"], b["old"], b["advantages"], **value).loss
    if head == "gaussian":
        return gaussian_ppo_loss(b["x"], b["log_std"], b["actions"], b["old"], b["advantages"], **value).loss
    if head == "tokens":
        rows = [b[name].view(-1, 64) for name in ("x", "old", "advantages")]
        return grpo_loss(*rows, ref_log_probs=b["returns"].view(-1, 64), kl_coef=0.04).loss
    return ppo_loss(b["x"], b["old"], b["advantages"], **value).loss


def measure(arms: dict[str, Callable[[], None]], device: str, seconds: float) -> dict[str, dict[str, float]]:
    """Time all arms in turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    memory = {}
    for name, arm in arms.items():
        for _ in range(3):
            arm()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            arm()
            memory[name] = torch.cuda.max_memory_allocated() - before
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[name]) < 5:
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    rows = {}
    for name, t in times.items():
        low, middle, high = statistics.quantiles(t, n=4)
        rows[name] = {"median": middle, "low": low, "high": high, "peak_bytes": memory.get(name, 0)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a size of each head")
    options = parser.parse_args()
    seconds = 0.2 if options.quick else 0.6
    results = []
    for head, widths in WIDTHS.items():
        compiled = torch.compile(lambda b, head=head: compute_plain(head, b), dynamic=False)
        for width in widths:
            for n in SIZES[1:2] if options.quick else SIZES:
                if n * width > MOST_NUMBERS:
                    continue
                torch._dynamo.reset()
                b = draw(head, n, width, options.device)
                losses = {
                    "eager": lambda b=b, head=head: compute_plain(head, b),
                    "torch.compile": lambda b=b, compiled=compiled: compiled(b),
                    "rl_triton_core": lambda b=b, head=head: compute_fused(head, b),
                }
                want, got = float(losses["eager"]().detach()), float(losses["rl_triton_core"]().detach())
                assert abs(want - got) <= 1e-4 * max(1, abs(want)), (head, n, want, got)
                leaves = [x for x in b.values() if x.requires_grad]
                for kind in ("forward", "forward and backward"):

                    def run(loss, kind=kind, leaves=leaves):
                        if kind == "forward":
                            with torch.no_grad():
                                loss()
                            return
                        torch.autograd.grad(loss(), leaves, allow_unused=True)

                    arms = {name: lambda f=f, run=run: run(f) for name, f in losses.items()}
                    row = {"head": head, "elements": n, "width": width, "kind": kind}
                    row["arms"] = measure(arms, options.device, seconds)
                    results.append(row)
                    print({k: row[k] for k in ("head", "elements", "width", "kind")}, end=" ")
                    print({name: f"{1e6 * x['median']:.0f} us" for name, x in row["arms"].items()}, flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"device": device, "torch": torch.__version__, "rows": results}
    (options.output / "losses.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
