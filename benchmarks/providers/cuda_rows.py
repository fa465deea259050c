"""A serial CUDA kernel with a thread per row, called from C++ with a preallocated output, in PufferLib's manner.

Rewards and dones are those that arrive with an observation: step t reads them at t + 1, and the last column of the
result is never written. Flags are float32. GAE in env-major memory only; needs nvcc and ninja.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME, load_inline

from benchmarks import workloads
from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload

SERIAL_LONGEST = 262144
"""Longer rows take a thread a second."""

CUDA = r"""
__global__ void gae_rows(const float* values, const float* rewards, const float* dones, float* advantages,
                         float gamma, float lambda, int rows, int steps) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    long long offset = (long long)row * steps;
    float advantage = 0;
    for (int t = steps - 2; t >= 0; t--) {
        long long now = offset + t, next = now + 1;
        float nonterminal = 1.0f - dones[next];
        float delta = rewards[next] + gamma * values[next] * nonterminal - values[now];
        advantages[now] = advantage = delta + gamma * lambda * nonterminal * advantage;
    }
}

void launch_gae_rows(const float* values, const float* rewards, const float* dones, float* advantages,
                     float gamma, float lambda, int rows, int steps, void* stream) {
    int threads = 256;
    gae_rows<<<(rows + threads - 1) / threads, threads, 0, (cudaStream_t)stream>>>(
        values, rewards, dones, advantages, gamma, lambda, rows, steps);
}
"""

CPP = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

void launch_gae_rows(const float* values, const float* rewards, const float* dones, float* advantages,
                     float gamma, float lambda, int rows, int steps, void* stream);

void compute(torch::Tensor values, torch::Tensor rewards, torch::Tensor dones, torch::Tensor advantages,
             double gamma, double lambda) {
    for (const auto& x : {values, rewards, dones, advantages}) {
        TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.scalar_type() == torch::kFloat32 && x.dim() == 2);
        TORCH_CHECK(x.sizes() == values.sizes());
    }
    launch_gae_rows(values.data_ptr<float>(), rewards.data_ptr<float>(), dones.data_ptr<float>(),
                    advantages.data_ptr<float>(), (float)gamma, (float)lambda, (int)values.size(0),
                    (int)values.size(1), (void*)c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(cudaGetLastError() == cudaSuccess);
}
"""


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The call from Python into C++, which launches."""
    plain = workload.estimator == "gae_advantages" and workload.layout == "env-major" and not workload.truncated
    if not plain or workload.dtype != "float32" or workload.num_steps > SERIAL_LONGEST or CUDA_HOME is None:
        return None
    values, rewards, dones = inputs["values"], inputs["rewards"], inputs["terminated"].float()
    compute, out = load_extension().compute, torch.zeros_like(rewards)

    def call() -> Tensor:
        compute(values, rewards, dones, out, GAMMA, workload.spec.lambda_)
        return out

    return call


def compute_oracle(workload: Workload, inputs: Inputs, envs: Tensor | None = None) -> tuple[Tensor, ...]:
    """The oracle on the steps that are written, with the flags and rewards where this kernel takes them from."""
    shifted = {name: inputs[name][:, 1:] for name in ("rewards", "terminated")}
    values = {"values": inputs["values"][:, :-1], "bootstrap_values": inputs["values"][:, -1]}
    return workloads.compute_oracle(workload, {**shifted, **values}, envs)


def select_written(result: Tensor) -> Tensor:
    """All but the last column."""
    return result[:, :-1]


@cache
def load_extension() -> Any:
    """The compiled extension."""
    sources = {"cpp_sources": [CPP], "cuda_sources": [CUDA], "functions": ["compute"]}
    return load_inline("rl_triton_cuda_rows", **sources, no_implicit_headers=True)
