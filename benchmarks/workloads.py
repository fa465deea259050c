"""What is computed: an estimator on random experience of some shape, memory layout and dtype."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import equations
from benchmarks.equations import ACTIONS, ESTIMATORS, FLAGS, GAMMA, LOG_PROBS, PER_ACTION, VARIANTS, Estimator, Inputs


class Workload(NamedTuple):
    """An estimator and its inputs. With `truncated`: truncation flags too, and bootstrap values at every step."""

    estimator: str
    num_envs: int
    num_steps: int
    layout: str = "env-major"
    truncated: bool = False
    dtype: str = "float32"
    flags: str = "bool"

    @property
    def spec(self) -> Estimator:
        return ESTIMATORS.get(self.estimator) or VARIANTS[self.estimator]

    @property
    def time_dim(self) -> int:
        return 1 if self.layout == "env-major" else 0

    @property
    def cells(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_envs, self.num_steps) if self.time_dim == 1 else (self.num_steps, self.num_envs)

    def __str__(self) -> str:
        flags = f" {self.flags} flags" if self.flags != "bool" else ""
        truncated = " truncated" if self.truncated else ""
        return f"{self.estimator} {self.num_envs}x{self.num_steps} {self.layout}{truncated} {self.dtype}{flags}"


def draw_inputs(workload: Workload, device: str, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    dtype, flag_dtype = getattr(torch, workload.dtype), getattr(torch, workload.flags)

    def draw_normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def draw_input(name: str) -> torch.Tensor:
        if name in FLAGS:
            return (torch.rand(workload.shape, generator=generator, device=device) < FLAGS[name]).to(flag_dtype)
        if name in LOG_PROBS:
            return draw_normal(*workload.shape).mul_(0.2).sub_(1)
        x = draw_normal(*workload.shape, *[ACTIONS] * (name in PER_ACTION))
        return x.softmax(-1) if name == "next_action_probs" else x

    inputs = {name: draw_input(name) for name in workload.spec.inputs + ("truncated",) * workload.truncated}
    if workload.spec.bootstraps:
        inputs["bootstrap_values"] = draw_normal(*(workload.shape if workload.truncated else (workload.num_envs,)))
    return inputs


def draw_sequences(estimator: str, lengths: Any, device: str) -> Inputs:
    """Inputs of sequences of these lengths, end to end."""
    inputs = {name: x[0] for name, x in draw_inputs(Workload(estimator, 1, int(lengths.sum())), device).items()}
    if "bootstrap_values" in inputs:
        inputs["bootstrap_values"] = torch.zeros(len(lengths), device=device)
    return {**inputs, "cu_seqlens": torch.tensor(np.cumsum([0, *lengths]), device=device)}


def select_envs(inputs: Inputs, workload: Workload, envs: torch.Tensor) -> Inputs:
    dim = 1 - workload.time_dim
    return {name: x.index_select(dim if x.ndim > 1 else 0, envs) for name, x in inputs.items()}


def compute_oracle(workload: Workload, inputs: Inputs, envs: Tensor | None = None) -> tuple[Tensor, ...]:
    """The results in float64, of some environments if `envs` are given."""
    chosen = inputs if envs is None else select_envs(inputs, workload, envs)
    wide = {name: x if name in FLAGS else x.double() for name, x in chosen.items()}
    return solve_equations(workload.spec, workload.time_dim, wide, equations.scan_serially)


def solve_equations(spec: Estimator, time_dim: int, inputs: Inputs, scan: equations.Scan) -> tuple[Tensor, ...]:
    flags = {name: inputs[name] != 0 for name in inputs if name in FLAGS}
    rates = equations.Rates(GAMMA if spec.discounts else 1.0, spec.lambda_ or 1.0)
    results = spec.equation({**inputs, **flags}, time_dim, rates, scan)
    return results[: len(spec.outputs)]
