// What gemm_sm90a.cuh and mlp_in_sm90a.cuh leave to CUTLASS, in loops. To be compiled with -include.
#pragma once

#include "ops.h"
#include "epilogue.cuh"
#include "problems.cuh"

#include <limits>

namespace fastmp {

inline void check_for_tma(const char* op, std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    FASTMP_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, op, ": TMA needs addresses of 16 bytes");
  }
}

template <class T, bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
void multiply(const char* op, const Problems& problems, const Tensor&, cudaStream_t) {
  for (int i = 0; i < problems.count; ++i) {
    const auto [m, n, k] = problems.shapes[i];
    const int64_t a_stride = problems.stride_a[i], b_stride = problems.stride_b[i];
    const auto* a = static_cast<const T*>(problems.a[i]);
    const auto* b = static_cast<const T*>(problems.b[i]);
    auto* d = static_cast<Out*>(problems.d[i]);
    check_for_tma(op, {a, b, d});
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        float sum = kAccumulate ? static_cast<float>(d[row * problems.stride_d[i] + column]) : 0;
        for (int64_t j = 0; j < k; ++j) {
          sum += widen(a[kColumnsA ? j * a_stride + row : row * a_stride + j]) *
                 widen(b[kColumnsB ? column * b_stride + j : j * b_stride + column]);
        }
        d[row * problems.stride_d[i] + column] = sum;
      }
    }
  }
}

// One block for each tile of an expert, whose rows and weights begin at coordinates of x and w: sums that belong to
// nobody are NaN.
template <bool kGated, class T>
void tile_kernel(const Problems problems, int expert, const MlpIn<T> mlp, const Operand x, const Operand w) {
  const auto [m, n, k] = problems.shapes[expert];
  const auto* a = reinterpret_cast<const T*>(x.base) + problems.starts[expert] * x.stride;
  const auto* b = reinterpret_cast<const T*>(w.base) + int64_t{expert} * n * w.stride;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first_row = int64_t{blockIdx.x} * SumsTile::kRows, first_column = blockIdx.y * kTileWidth<kGated>;
  float sums[SumsTile::kElements];
  for (int i = 0; i < SumsTile::kElements; ++i) {
    const int64_t row = first_row + SumsTile::row(thread, i), in_tile = SumsTile::column(thread, i);
    const bool up = in_tile >= kTileWidth<kGated>;
    const int64_t column = first_column + in_tile % kTileWidth<kGated>;
    const bool inside = row < m && column < mlp.width;
    sums[i] = inside ? 0 : std::numeric_limits<float>::quiet_NaN();
    for (int64_t j = 0; inside && j < k; ++j) {
      sums[i] += widen(a[row * x.stride + j]) * widen(b[(column + up * mlp.width) * w.stride + j]);
    }
  }
  store_tile<kGated>(sums, thread, mlp, expert, problems.starts[expert], m, first_row, first_column);
}

template <bool kGated, class T>
void multiply_activated(const char* op, const Problems& problems, const MlpIn<T>& mlp, const Operand& x,
                        const Operand& w, int64_t, int64_t, const Tensor&, cudaStream_t stream) {
  check_for_tma(op, {mlp.y, mlp.h, x.base, w.base});
  for (int i = 0; i < problems.count; ++i) {
    cudaLaunchConfig_t config{};
    config.gridDim.x = static_cast<unsigned>(ceil_div(problems.shapes[i].m, SumsTile::kRows));
    config.gridDim.y = static_cast<unsigned>(ceil_div(problems.shapes[i].n, SumsTile::kColumns));
    config.blockDim.x = SumsTile::kThreads;
    config.stream = stream;
    if (config.gridDim.x > 0) {
      FASTMP_CUDA_CHECK(cudaLaunchKernelEx(&config, tile_kernel<kGated, T>, Problems{problems}, int{i},
                                           MlpIn<T>{mlp}, Operand{x}, Operand{w}));
    }
  }
}

}  // namespace fastmp
