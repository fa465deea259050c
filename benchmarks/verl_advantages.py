"""The advantage step of verl, its function and ours in turn, on CPU tensors as in verl's driver.

The floor is what GRPO cannot do without: each response's rewards are summed, and the sum times the mask is written to
its tokens.
"""

import logging
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from advantages_verl import check_difference, make_batch, make_calls

from benchmarks import harness
from benchmarks.results import Row
from rl_triton_adapters.verl import install, uninstall


class Setting(NamedTuple):
    """Responses and their tokens, and the threads of PyTorch and of this library."""

    responses: int
    tokens: int
    threads: int


SHAPES = ((512, 1024), (512, 8192), (1024, 512))
SETTINGS = {
    "cpu": [Setting(*shape, n) for n, shape in product(sorted({1, torch.get_num_threads()}), SHAPES)],
    "cuda": [],
    "quick": [Setting(8, 32, 1)],
}
TURNS, CALLS = 5, 4


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    logging.getLogger("rl_triton_adapters.verl").setLevel(logging.WARNING)
    harness.set_threads(setting.threads)
    batch = make_batch(setting.responses, setting.tokens)
    rewards, mask = batch["token_level_rewards"], batch["response_mask"]
    for estimator, call in make_calls(batch).items():
        expected = call()
        install()
        check_difference(estimator, [call(), call()][1], expected, mask)
        arms = {"stock": call, "ours": call, "floor": lambda: rewards.sum(-1, keepdim=True) * mask}
        about = {"turns": TURNS, "burst": CALLS, "warm_up": False}
        times = harness.time_in_turns(
            arms, "cpu", prepare=lambda name: (uninstall if name == "stock" else install)(), **about
        )
        uninstall()
        yield from harness.list_times(times, unit="ms", estimator=estimator)
