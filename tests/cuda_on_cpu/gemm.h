// What gemm_sm90a.cuh leaves to CUTLASS and to the TMA unit, in loops. To be compiled with -include.
#pragma once

#include "ops.h"
#include "epilogue.cuh"
#include "problems.cuh"

#include <limits>

namespace fastmp {

// A number that the TMA unit reads: in row `row` and column `column` from `first` on, zero beyond the bound of rows.
template <class T>
float ragged_at(const Operand& rows, const FirstRow& first, int row, int64_t column) {
  if (first.row + row >= kMaxRows) return 0;
  const uint64_t lines[] = {static_cast<uint64_t>(first.row + row), static_cast<uint64_t>(first.end)};
  const uint64_t element = (lines[0] + lines[1]) * rows.pitch + uint64_t{kMaxRows} * back_stride(rows.pitch) + column;
  return widen(*reinterpret_cast<const T*>(reinterpret_cast<uint64_t>(rows.base) + sizeof(T) * element));
}

// One block for each tile of an expert. Sums that belong to nobody are NaN.
template <class T, bool kTerms, bool kColumnsB, class Store>
void tile_kernel(const Problems problems, int expert, const Operand a, const Operand b, const Store store) {
  const auto [m, n, k] = problems.shapes[expert];
  const int start = problems.starts[expert], thread = static_cast<int>(threadIdx.x);
  const FirstRow first(start, kTerms ? k : m);
  const int64_t first_row = int64_t{blockIdx.x} * SumsTile::kRows, first_column = blockIdx.y * Store::kWidth;
  const int width = n / (1 + Store::kGated);
  float sums[SumsTile::kElements];
  for (int i = 0; i < SumsTile::kElements; ++i) {
    const int64_t row = first_row + SumsTile::row(thread, i), in_tile = SumsTile::column(thread, i);
    const int64_t column = first_column + in_tile % Store::kWidth;
    const int64_t line = column + (in_tile >= Store::kWidth) * width;
    const bool inside = row < m && column < width;
    sums[i] = inside ? 0 : std::numeric_limits<float>::quiet_NaN();
    for (int64_t j = 0; inside && j < ceil_div(k, 64) * 64; ++j) {
      if constexpr (kTerms) {
        sums[i] += ragged_at<T>(a, first, j, row) * ragged_at<T>(b, first, j, column);
      } else if (j < k) {
        const T* weights = static_cast<const T*>(b.base) + expert * b.jump;
        sums[i] += ragged_at<T>(a, first, row, j) * widen(weights[kColumnsB ? j * b.pitch + line : line * b.pitch + j]);
      }
    }
  }
  store(sums, thread, expert, kTerms ? int64_t{expert} * m : start, m, first_row, first_column);
}

template <class T, bool kTerms, bool kColumnsB, class Store>
void multiply(const char* op, const Problems& problems, const Operand& a, const Operand& b, const Store& store,
              int64_t n, int64_t, const Tensor&, cudaStream_t stream) {
  for (const Operand& each : {a, b}) {
    FASTMP_CHECK(reinterpret_cast<uintptr_t>(each.base) % 16 == 0 && each.pitch * sizeof(T) % 16 == 0, op,
                 ": TMA needs addresses of 16 bytes");
  }
  for (int i = 0; i < problems.count; ++i) {
    cudaLaunchConfig_t config{};
    config.gridDim.x = static_cast<unsigned>(ceil_div(problems.shapes[i].m, SumsTile::kRows));
    config.gridDim.y = static_cast<unsigned>(ceil_div(problems.shapes[i].n, SumsTile::kColumns));
    config.blockDim.x = SumsTile::kThreads;
    config.stream = stream;
    if (config.gridDim.x > 0 && config.gridDim.y > 0) {
      FASTMP_CUDA_CHECK(cudaLaunchKernelEx(&config, tile_kernel<T, kTerms, kColumnsB, Store>, Problems{problems},
                                           int{i}, Operand{a}, Operand{b}, Store{store}));
    }
  }
}

}  // namespace fastmp
