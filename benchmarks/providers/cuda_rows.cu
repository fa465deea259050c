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
