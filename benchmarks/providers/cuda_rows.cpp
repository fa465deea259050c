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
