"""Time the losses, forward and with gradients, against PyTorch's operations, eager and compiled.

    python benchmarks/losses.py FOLDER [--commit HASH] [--sizes N ...] [--threads N]

Runs on a GPU if there is one, else on the CPU, where torch.compile compiles for all sizes at once. Arms take turns; our
result is compared with eager PyTorch's before it is timed. Writes losses_BACKEND.json: median and quartiles of the full
call's time in microseconds. On a GPU, where all is compiled beforehand in parallel processes, also the device's own
time, the peak memory, the bytes of inputs and gradients, and the bandwidth of a copy in the same run.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files, harness
from benchmarks.compile_ahead import limit_threads
from benchmarks.harness import Call
from benchmarks.quartiles import compare_turns, find_quartiles
from rl_triton_core import set_num_threads
from rl_triton_core.losses import Categorical, Gaussian, LogProbs, grpo_loss, ppo_loss
from rl_triton_core.testing import assert_close

COMMON = {"normalize_advantages": True, "entropy_coef": 0.01}
SIZES = {"cpu": (64, 256, 2048, 32768, 1 << 20), "cuda": (64, 2048, 32768, 1 << 20, 1 << 21)}
KINDS = ("forward", "forward and backward")
SECONDS = {"cpu": 0.3, "cuda": 0.2}
"""How long the arms of a row take turns."""
WIDTHS = {"log-probs": (1,), "tokens": (1,), "categorical": (2, 18, 64), "gaussian": (1, 8, 32)}
MAX_VALUES = {"cpu": 1 << 22, "cuda": 1 << 27}
TOKENS = 64
"""Of a sequence."""


def draw_minibatch(head: str, n: int, width: int, device: str) -> dict[str, torch.Tensor]:
    """A minibatch."""
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
    """The same by this library."""
    value = {"values": b["values"], "returns": b["returns"], **COMMON}
    if head == "categorical":
        return ppo_loss(Categorical(b["x"]), b["actions"], b["old"], b["advantages"], **value).loss
    if head == "gaussian":
        return ppo_loss(Gaussian(b["x"], b["log_std"]), b["actions"], b["old"], b["advantages"], **value).loss
    if head == "tokens":
        return grpo_loss(b["x"], b["old"], b["advantages"], ref_log_probs=b["returns"], kl_coef=0.04).loss
    return ppo_loss(LogProbs(b["x"]), None, b["old"], b["advantages"], **value).loss


def main(arguments: list[str] | None = None) -> None:
    """Measure all heads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = files.make_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES[device], help="elements of the minibatches")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch and of this library, on the CPU")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    set_num_threads(options.threads)
    backend = {"cuda": "triton", "cpu": "cpu"}[device]
    about: dict[str, Any] = {"backend": backend, "threads": options.threads}
    jobs = [(head, width, options.sizes, device) for head in WIDTHS for width in WIDTHS[head]]
    if device == "cuda":
        with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn"), limit_threads) as pool:
            list(pool.map(measure_width, *zip(*jobs, strict=True)))  # it fills the compilers' caches
        clock = harness.make_clock(device)
        about["copy_bandwidth_gb_per_s"] = harness.measure_copy_bandwidth(device, clock, harness.QUICK)
    rows = [row for job in jobs for row in measure_width(*job)]
    files.save_rows(options, f"losses_{backend}.json", rows, **about)


def measure_width(head: str, width: int, sizes: list[int], device: str) -> list[files.Row]:
    """Measure a head with so many actions in all sizes."""
    compiled = {kind: torch.compile(partial(compute_plain, head), dynamic=device == "cpu") for kind in KINDS}
    rows = []
    for n in (n for n in sizes if n * width <= MAX_VALUES[device]):
        if device == "cuda" or n == sizes[0]:
            torch._dynamo.reset()
        b = draw_minibatch(head, n, width, device)
        with torch.no_grad():  # a graph that lives on ties the inputs to this stream, and none of them can be captured
            want, got = compute_plain(head, b), compute_fused(head, b)
        assert_close(got.cpu(), want.double().cpu(), rtol=1e-4, name=f"{head} {n}")
        inputs, gradients = (sum(x.nbytes for x in b.values() if x.requires_grad >= only) for only in (False, True))
        for kind in KINDS:
            losses = {"eager": partial(compute_plain, head, b), "compiled": partial(compiled[kind], b)}
            losses["ours"] = partial(compute_fused, head, b)
            arms = {name: partial(run_loss, loss, kind, b) for name, loss in losses.items()}
            about = {"head": head, "width": width, "elements": n, "kind": kind}
            moved = inputs + gradients * (kind != "forward")
            rows.append({**about, **measure_arms(arms, device), "bytes": moved})
    return rows


def run_loss(loss: Callable[[], torch.Tensor], kind: str, b: dict[str, torch.Tensor]) -> None:
    """Compute a loss, and perhaps its gradients."""
    if kind == "forward":
        with torch.no_grad():
            loss()
    else:
        torch.autograd.grad(loss(), [x for x in b.values() if x.requires_grad], allow_unused=True)


def measure_arms(arms: dict[str, Call], device: str) -> dict[str, Any]:
    """Time all arms in turns."""
    memory = {name: measure_memory(arm, device) for name, arm in arms.items()}
    times = harness.time_in_turns(arms, harness.make_clock(device), turns=5, seconds=SECONDS[device])
    alone = harness.measure_calls(arms, harness.make_clock(device), harness.QUICK) if device == "cuda" else {}
    turns = {name: [*itertools.chain(*bursts)] for name, bursts in times.items()}
    rows: dict[str, Any] = {}
    for name, calls in turns.items():
        low, median, high = find_quartiles(calls)
        rows[name] = {"median": median, "low": low, "high": high, "peak_bytes": memory[name]}
        rows[name] |= {"device": find_quartiles(alone[name].device)} if alone else {}
    faster = {name: compare_turns(calls, turns["ours"]) for name, calls in turns.items() if name != "ours"}
    return {"microseconds": rows, "times_faster": faster}


def measure_memory(arm: Call, device: str) -> int:
    """Warm up, and find the peak memory on a GPU; 0 on the CPU."""
    for _ in range(3):
        arm()
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    arm()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
