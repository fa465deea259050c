"""Advantages of verl for generated responses, computed by verl and by rl_triton_core.

    make example-frameworks RUN="advantages_verl.py --batch-size 64 --response-length 1024"

Prints times, and the largest difference at valid tokens. Ends with status 1 if that is more than rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from command_line import COUNT, needing, run, within

with needing("verl", __name__):
    import numpy as np
    import torch
    from verl.trainer.ppo import core_algos

    from rl_triton_adapters.verl import install

TOLERANCE = 1e-3  # verl sums up to millions of float32 numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=COUNT, default=64, help="number of responses, eight to a prompt")
    parser.add_argument("--response-length", type=within(4), default=1024, help="in tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as Ray does for the actor that computes them
    batch = make_batch(args.batch_size, args.response_length)
    calls = make_calls(batch)
    stock = {name: time_call(compute) for name, compute in calls.items()}
    install()
    for name, compute in calls.items():
        (expected, slow), (result, fast) = stock[name], time_call(compute)
        difference = check_difference(name, result, expected, batch["response_mask"])
        print(
            f"{name:5} verl {1e3 * slow:9.2f} ms   rl_triton_core {1e3 * fast:8.2f} ms   {slow / fast:6.1f}x   "
            f"difference {difference:.1e}"
        )


def make_batch(batch_size: int, response_length: int) -> dict[str, Any]:
    """Responses of many lengths with a reward at the end, and the output of a tool somewhere inside."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(response_length // 4, response_length + 1, (batch_size, 1))
    position = np.arange(response_length)
    tool = rng.integers(0, lengths)
    mask = (position < lengths) & ~((tool <= position) & (position < tool + response_length // 16))
    mask |= position == lengths - 1
    rewards = np.where(position == lengths - 1, rng.normal(size=(batch_size, 1)), 0.0) - 0.01 * mask
    return {
        "token_level_rewards": torch.tensor(rewards, dtype=torch.float32),
        "values": torch.tensor(rng.normal(size=mask.shape), dtype=torch.float32),
        "response_mask": torch.tensor(mask, dtype=torch.int64),
    }


def make_calls(batch: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """As verl calls its functions, by the name of the estimator."""
    per_token = {name: batch[name] for name in ("token_level_rewards", "values", "response_mask")}
    return {"gae": lambda: core_algos.compute_gae_advantage_return(**per_token, gamma=1.0, lam=0.95)}


def time_call(compute: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds of the quickest of three, after two that compile and prepare."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = compute()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds[2:])


def check_difference(name: str, ours: Any, stock: Any, mask: torch.Tensor) -> float:
    """The largest difference of advantages or returns at valid tokens; exits where it is more than rounding."""
    difference = max(float(((x - y) * mask).abs().max()) for x, y in zip(ours, stock, strict=True))
    if not difference < TOLERANCE:
        raise SystemExit(f"{name}: advantages or returns differ by {difference}")
    return difference


if __name__ == "__main__":
    run(main)
