// A .cu file of csrc/cuda as ops of CPU tensors, torch.ops.cuda_on_cpu.*: what csrc/stable.h and csrc/cuda/common.cuh
// have for nvcc alone. To be compiled with -include.
#pragma once

#include "cuda_on_cpu.h"
#include "stable.h"

#include <cfloat>

#define FASTMP_CUDA_CHECK(call)                                                   \
  do {                                                                            \
    const cudaError_t error_ = (call);                                            \
    FASTMP_CHECK(error_ == cudaSuccess, #call, ": ", cudaGetErrorString(error_)); \
  } while (0)

namespace fastmp {

inline const bool kPoisonable = outputs_by_dispatcher = true;  // as those of a GPU are

inline cudaStream_t current_stream(const Tensor&) { return nullptr; }
struct DeviceGuard {
  explicit DeviceGuard(const Tensor&) {}
};

inline float fast_exp2(float x) {
  const float y = std::exp2(x);
  return y < FLT_MIN ? 0 : y;
}
inline float fast_reciprocal(float x) { return 1 / x; }
inline float fast_sqrt(float x) { return x < FLT_MIN ? 0 : std::sqrt(x); }
inline void store_words(void* to, const unsigned (&words)[4]) {
  *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}
inline void add_pair(float* to, float x, float y) {
  to[0] += x;
  to[1] += y;
}
using cuda_on_cpu::dynamic_shared;

}  // namespace fastmp

#define CUDA CPU
#define fastmp_cuda FASTMP_NAMESPACE
