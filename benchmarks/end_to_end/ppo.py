"""PPO as in examples/ppo_gpu_envs.py, and the compiled scan that its advantages may come from."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from benchmarks.end_to_end.frameworks import Setting
from benchmarks.equations import doubling, solve
from benchmarks.files import ROOT
from benchmarks.providers import compiled_scan
from benchmarks.workloads import GAMMA, Inputs, Workload

Advantages = Callable[[Inputs], tuple[Tensor, Tensor]]
"""Advantages and returns."""

LAMBDA = 0.95


@cache
def example() -> ModuleType:
    """The example; what it logs with is not needed."""
    logging = {"torch.utils.tensorboard": MagicMock(), "tqdm": MagicMock()}
    with patch.dict(sys.modules, logging), patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]):
        return import_module("ppo_gpu_envs")


def arguments(setting: Setting) -> Namespace:
    """The example's arguments."""
    known: Namespace = example().parse_arguments([])
    known.device, known.num_envs, known.num_steps = setting.device, setting.num_envs, setting.num_steps
    known.hidden, known.update_epochs, known.num_minibatches = setting.hidden, setting.epochs, setting.minibatches
    known.gamma, known.gae_lambda, known.learning_rate = GAMMA, LAMBDA, 3e-4
    return known


def compiled(workload: Workload) -> Advantages:
    """`torch.compile` of a doubling scan: advantages and returns."""

    def function(inputs: Inputs) -> tuple[Tensor, Tensor]:
        (advantages,) = solve(workload, inputs, doubling)
        return advantages, advantages + inputs["values"]

    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True, backend=compiled_scan.BACKEND)
