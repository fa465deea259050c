"""Serial CUDA kernels with a thread per row, called from C++ with a preallocated output, in PufferLib's manner.

One reads a number at a time, as PufferLib 3.0 does, the other four, 16 bytes, as 5.0 does. Rewards and dones are those
that arrive with an observation: step t reads them at t + 1, and the last column of the result has no advantages. Flags
are float32. GAE in env-major memory only; needs nvcc and ninja.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME, load_inline

from benchmarks import workloads
from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload

SERIAL_LONGEST = 262144  # longer rows take a thread a second


def make_call_by_four(workload: Workload, inputs: Inputs) -> Call | None:
    """As `make_call`, of the kernel that reads four numbers at a time."""
    return None if workload.num_steps % 4 else make_call(workload, inputs, by_four=True)


def make_call(workload: Workload, inputs: Inputs, by_four: bool = False) -> Call | None:
    """The call from Python into C++, which launches."""
    plain = workload.estimator == "gae_advantages" and workload.layout == "env-major" and not workload.truncated
    if not plain or workload.dtype != "float32" or workload.num_steps > SERIAL_LONGEST or CUDA_HOME is None:
        return None
    values, rewards, dones = inputs["values"], inputs["rewards"], inputs["terminated"].float()
    compute, out = load_extension().compute, torch.zeros_like(rewards)

    def call() -> Tensor:
        compute(values, rewards, dones, out, GAMMA, workload.spec.lambda_, by_four)
        return out

    return call


def compute_oracle(workload: Workload, inputs: Inputs, envs: Tensor | None = None) -> tuple[Tensor, ...]:
    """The oracle on the steps that are written, with the flags and rewards where this kernel takes them from."""
    shifted = {name: inputs[name][:, 1:] for name in ("rewards", "terminated")}
    values = {"values": inputs["values"][:, :-1], "bootstrap_values": inputs["values"][:, -1]}
    return workloads.compute_oracle(workload, {**shifted, **values}, envs)


def select_written(result: Tensor) -> Tensor:
    return result[:, :-1]


@cache
def load_extension() -> Any:
    cpp, cuda = (Path(__file__).with_suffix(f".{language}").read_text() for language in ("cpp", "cu"))
    sources = {"cpp_sources": [cpp], "cuda_sources": [cuda], "functions": ["compute"]}
    return load_inline("rl_triton_cuda_rows", **sources, no_implicit_headers=True)
