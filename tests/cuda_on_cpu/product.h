// What product_sm90a.cuh leaves to CUTLASS, in loops. To be compiled with -include.
#pragma once

#include "ops.h"
#include "problems.cuh"

namespace fastmp {

template <bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
void multiply(const char* op, const Problems& problems, const Tensor&, cudaStream_t) {
  for (int i = 0; i < problems.count; ++i) {
    const auto [m, n, k] = problems.shapes[i];
    const int64_t a_stride = problems.stride_a[i], b_stride = problems.stride_b[i];
    const auto* a = static_cast<const __nv_bfloat16*>(problems.a[i]);
    const auto* b = static_cast<const __nv_bfloat16*>(problems.b[i]);
    auto* d = static_cast<Out*>(problems.d[i]);
    for (const auto pointer : {problems.a[i], problems.b[i], static_cast<const void*>(problems.d[i])}) {
      FASTMP_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, op, ": TMA needs addresses of 16 bytes");
    }
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        float sum = kAccumulate ? static_cast<float>(d[row * problems.stride_d[i] + column]) : 0;
        for (int64_t j = 0; j < k; ++j) {
          sum += __bfloat162float(a[kColumnsA ? j * a_stride + row : row * a_stride + j]) *
                 __bfloat162float(b[kColumnsB ? column * b_stride + j : j * b_stride + column]);
        }
        d[row * problems.stride_d[i] + column] = sum;
      }
    }
  }
}

}  // namespace fastmp
