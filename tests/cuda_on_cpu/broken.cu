// Kernels with one mistake each, and some without, for tests of cuda_on_cpu.h: prints what a launch says of the kernel
// named by the first argument, or the sum of its results that are not NaN, for each of 20 seeds.
#include "cuda_on_cpu.h"

#include <cstdio>

using Kernel = void (*)(float*, int*);
constexpr int kThreads = 64;

void barrier_for_some(float*, int*) {
  if (threadIdx.x < 16) __syncthreads();
}
void barriers_in_two_places(float*, int*) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
void return_before_barrier(float*, int*) {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
void shuffle_in_half_a_warp(float*, int*) {
  if (threadIdx.x % 2) __shfl_xor_sync(0xffffffffu, 1.0f, 2);
}
void write_beyond_dynamic(float*, int*) { cuda_on_cpu::dynamic_shared<float>()[kThreads + threadIdx.x % 2] = 1; }
void write_beyond_static(float* out, int*) {
  __shared__ float values[kThreads];
  values[threadIdx.x + 1] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}
void read_unaligned_vector(float* out, int*) {
  const uint4 vector = *reinterpret_cast<const uint4*>(out + 1);
  out[0] = vector.x;
}

// Each thread hands a number to the next. Without the barrier it takes what is there, or NaN.
template <bool kBarrier>
void hand_on(float* out, int*) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = threadIdx.x;
  if constexpr (kBarrier) __syncthreads();
  out[blockIdx.x * kThreads + threadIdx.x] = values[(threadIdx.x + 1) % kThreads];
}

// Blocks in the order of a ticket, which the results show.
void order_of_blocks(float* out, int* ticket) {
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>((blockIdx.x + 1) * (*ticket)++);
}

int main(int, char** arguments) {
  const std::map<std::string, Kernel> kernels{
      {"barrier_for_some", barrier_for_some},           {"barriers_in_two_places", barriers_in_two_places},
      {"return_before_barrier", return_before_barrier}, {"shuffle_in_half_a_warp", shuffle_in_half_a_warp},
      {"write_beyond_dynamic", write_beyond_dynamic},   {"write_beyond_static", write_beyond_static},
      {"read_unaligned_vector", read_unaligned_vector}, {"hand_on", hand_on<true>},
      {"hand_on_without_barrier", hand_on<false>},      {"order_of_blocks", order_of_blocks},
  };
  const std::string name = arguments[1];
  const cudaLaunchConfig_t config{{8}, {kThreads}, kThreads * sizeof(float), nullptr};
  for (unsigned seed = 0; seed < 20; ++seed) {
    cuda_on_cpu_set(seed, 233472);
    alignas(16) float out[8 * kThreads] = {};
    int ticket = 0;
    try {
      cudaLaunchKernelEx(&config, kernels.at(name), &out[0], &ticket);
    } catch (const std::logic_error& error) {
      return std::fprintf(stderr, "%s\n", error.what()), 1;
    }
    float sum = 0;
    for (const float each : out) sum += std::isnan(each) ? 0 : each;
    std::printf("%g\n", sum);
  }
}
