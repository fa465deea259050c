"""Serial CUDA kernels with a thread per row, called from C++ with a preallocated output, in PufferLib's manner.

One reads a number at a time, as PufferLib 3.0 does, the other four, 16 bytes, as 5.0 does. Rewards and dones are those
that arrive with an observation: step t reads them at t + 1, and the last column of the result has no advantages. Flags
are float32. GAE in env-major memory only; needs nvcc and ninja.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME, load_inline

from benchmarks import workloads
from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload

SERIAL_LONGEST = 262144  # longer rows take a thread a second

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

__global__ void gae_rows_by_four(const float4* __restrict__ values, const float4* __restrict__ rewards,
                                 const float4* __restrict__ dones, float4* __restrict__ advantages,
                                 float gamma, float lambda, int rows, int groups) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    long long first = (long long)row * groups, last = first + groups - 1;
    float value = 0, done = 1, advantage = 0, reward = values[last].w;  // behind the row: its last advantage is 0
    for (long long at = last; at >= first; at--) {
        float4 v = values[at], r = rewards[at], d = dones[at], written;
        const float now[] = {v.x, v.y, v.z, v.w}, given[] = {r.x, r.y, r.z, r.w}, ended[] = {d.x, d.y, d.z, d.w};
        float* to[] = {&written.x, &written.y, &written.z, &written.w};
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            float nonterminal = 1.0f - done;
            float delta = reward + gamma * value * nonterminal - now[i];
            *to[i] = advantage = delta + gamma * lambda * nonterminal * advantage;
            value = now[i], reward = given[i], done = ended[i];
        }
        advantages[at] = written;
    }
}

void launch_gae_rows(const float* values, const float* rewards, const float* dones, float* advantages,
                     float gamma, float lambda, int rows, int steps, bool by_four, void* stream) {
    int threads = by_four ? 32 : 256, blocks = (rows + threads - 1) / threads;
    if (by_four)
        gae_rows_by_four<<<blocks, threads, 0, (cudaStream_t)stream>>>(
            (const float4*)values, (const float4*)rewards, (const float4*)dones, (float4*)advantages,
            gamma, lambda, rows, steps / 4);
    else
        gae_rows<<<blocks, threads, 0, (cudaStream_t)stream>>>(
            values, rewards, dones, advantages, gamma, lambda, rows, steps);
}
"""

CPP = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

void launch_gae_rows(const float* values, const float* rewards, const float* dones, float* advantages,
                     float gamma, float lambda, int rows, int steps, bool by_four, void* stream);

void compute(torch::Tensor values, torch::Tensor rewards, torch::Tensor dones, torch::Tensor advantages,
             double gamma, double lambda, bool by_four) {
    for (const auto& x : {values, rewards, dones, advantages}) {
        TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.scalar_type() == torch::kFloat32 && x.dim() == 2);
        TORCH_CHECK(x.sizes() == values.sizes() && (!by_four || x.size(1) % 4 == 0));
    }
    launch_gae_rows(values.data_ptr<float>(), rewards.data_ptr<float>(), dones.data_ptr<float>(),
                    advantages.data_ptr<float>(), (float)gamma, (float)lambda, (int)values.size(0),
                    (int)values.size(1), by_four, (void*)c10::cuda::getCurrentCUDAStream().stream());
    TORCH_CHECK(cudaGetLastError() == cudaSuccess);
}
"""


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
    sources = {"cpp_sources": [CPP], "cuda_sources": [CUDA], "functions": ["compute"]}
    return load_inline("rl_triton_cuda_rows", **sources, no_implicit_headers=True)
