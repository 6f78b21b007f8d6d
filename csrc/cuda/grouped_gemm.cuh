// The GEMM of every expert: by CUTLASS for bf16 or fp16 with sizes that are multiples of 8, and by a simple, slow kernel
// otherwise.
#pragma once

#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "gemm_sm90a.cuh"
#endif
#include "problems.cuh"

namespace fastmp {

// d = a b, or d += a b, of every problem, one thread an element; for operands that CUTLASS does not support.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    gemm_kernel(const Problems problems, bool columns_a, bool columns_b, bool accumulate) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int expert = 0; expert < problems.count; ++expert) {
    const Problems::Shape shape = problems.shapes[expert];
    const int64_t stride_a = problems.stride_a[expert], stride_b = problems.stride_b[expert];
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<int64_t>(shape.m) * shape.n; i += step) {
      const int64_t row = i / shape.n, column = i % shape.n;
      const T* a = static_cast<const T*>(problems.a[expert]) + row * (columns_a ? 1 : stride_a);
      const T* b = static_cast<const T*>(problems.b[expert]) + column * (columns_b ? stride_b : 1);
      Compute<T> sum = 0;
      for (int64_t k = 0; k < shape.k; ++k) {
        sum += widen(a[k * (columns_a ? stride_a : 1)]) * widen(b[k * (columns_b ? 1 : stride_b)]);
      }
      Out* d = static_cast<Out*>(problems.d[expert]) + row * problems.stride_d[expert] + column;
      *d = narrow<Out>(accumulate ? widen(*d) + sum : sum);
    }
  }
}

// d = a b for each expert; or d += a b, where d is in the type that is computed in. Returns the list of these GEMMs.
template <bool kColumnsA, bool kColumnsB, bool kAccumulate>
ProblemMemory multiply_experts(const char* op, bool tma, ScalarType dtype, const Tensor& offsets, int64_t num_rows,
                      const Operand& a, const Operand& b, const Operand& d, int64_t n, int64_t k, bool sum_rows) {
  ProblemMemory made(op, offsets, num_rows, a, b, d, n, k, sum_rows);
  const cudaStream_t stream = current_stream(offsets);
  dispatch_device(dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Out = std::conditional_t<kAccumulate, Compute<T>, T>;
    if constexpr (sizeof(T) == 2) {
      if (tma) return multiply<T, kColumnsA, kColumnsB, Out, kAccumulate>(op, made.problems, offsets, stream);
    }
    launch({kBlocks, kThreads}, stream, gemm_kernel<T, Out>, made.problems, kColumnsA, kColumnsB, kAccumulate);
  });
  return made;
}

}  // namespace fastmp
