// Epilogues of an expert's GEMM: h = a b + bias and y = form(h), or form(gate) * up where h is [gate | up]; and sums
// that are added to float32 ones.
#pragma once

#include "common.cuh"
#include "form.h"

namespace fastmp {

// y (rows, width) or null; h (rows, num_columns) or null; bias (experts, num_columns) or null.
template <class T>
struct Output {
  const T* bias;
  T* y;
  T* h;
  int64_t width, num_columns;
  Form form;
};

// h = form(h), of several at once: one after another they would wait for each other's exponentials.
template <int kCount, class C>
__device__ inline void activate(C (&h)[kCount], Form form) {
  if (form == Form::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) h[i] *= fast_reciprocal(1 + fast_exp(-h[i]));
  } else if (form == Form::kGelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) h[i] *= C(0.5) + C(0.5) * std::erf(h[i] * C(0.7071067811865476));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      h[i] *= fast_reciprocal(1 + fast_exp(h[i] * (C(-1.5957691216057308) - C(0.071354816272600265) * h[i] * h[i])));
    }
  }
}

constexpr int kQuad = 4;                         // threads that share rows of a tile
constexpr int kQuadColumns = 2 * kQuad * kQuad;  // columns that a quad stores at once, 16 bytes a thread

// Word j of thread i becomes word i of thread j, in each quad of a warp.
__device__ inline void transpose_in_quad(unsigned (&words)[kQuad]) {
#pragma unroll
  for (int distance = 1; distance < kQuad; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int low = 0; low < kQuad; ++low) {
      if (low & distance) continue;
      const int high = low | distance;
      const unsigned other = __shfl_xor_sync(0xffffffff, upper ? words[low] : words[high], distance);
      (upper ? words[low] : words[high]) = other;
    }
  }
}

// Stores the 32 columns that a quad has in one row: values 2 j and 2 j + 1 of thread i are columns 8 j + 2 i and
// 8 j + 2 i + 1. Each thread stores eight neighbours at `to`, unless they are `outside`. All threads of a warp must
// come.
template <class T>
__device__ inline void store_in_quad(T* to, const float (&values)[2 * kQuad], bool outside) {
  static_assert(sizeof(T) == 2);
  unsigned words[kQuad];
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    store_vector(reinterpret_cast<T*>(&words[j]), {values[2 * j], values[2 * j + 1]});
  }
  transpose_in_quad(words);
  if (!outside) store_words(to, words);
}

// A tile of sums, as wgmma leaves it in the registers of two warp groups: each has 64 rows, and a thread has two
// neighbouring columns of every eight, in two rows.
struct SumsTile {
  static constexpr int kRows = 128, kColumns = 256, kThreads = 256;
  static constexpr int kElements = kRows * kColumns / kThreads;  // of a thread

  static constexpr int row(int thread, int element) {
    return thread / 128 * 64 + thread / 32 % 4 * 16 + element / 2 % 2 * 8 + thread / 4 % 8;
  }
  static constexpr int column(int thread, int element) { return element / 4 * 8 + thread % 4 * 2 + element % 2; }
};

// Stores a tile of sums. If kGated, gates are in the tile's left half and ups in its right half: a thread has both of a
// column.
template <bool kGated_, class T>
struct StoreTile {
  static constexpr bool kGated = kGated_;
  static constexpr int kWidth = SumsTile::kColumns / (1 + kGated);  // columns of y
  Output<T> out;

  // Stores a thread's sums of the tile whose first row is `first_row` of the expert's `num_rows`, which begin with row
  // `start` of y, and whose first column in y is `first_column`.
  __device__ void operator()(const float (&sums)[SumsTile::kElements], int thread, int64_t expert, int64_t start,
                             int64_t num_rows, int64_t first_row, int64_t first_column) const {
    const int place = thread % kQuad;
#pragma unroll
    for (int block = 0; block < kWidth / kQuadColumns; ++block) {
      const int64_t column = first_column + block * kQuadColumns, stored = column + place * 2 * kQuad;
      float shift[1 + kGated][2 * kQuad] = {};
      if (out.bias) {
        const T* bias = out.bias + expert * out.num_columns;
#pragma unroll
        for (int i = 0; i < 2 * kQuad; ++i) {
          const int64_t at = column + SumsTile::column(thread, 4 * (i / 2) + i % 2);
          if (at >= out.width) continue;
          shift[0][i] = widen(bias[at]);
          if constexpr (kGated) shift[1][i] = widen(bias[out.width + at]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + SumsTile::row(thread, 2 * half);
        const bool outside = row >= num_rows || stored >= out.width;
        float h[1 + kGated][2 * kQuad], y[2 * kQuad];
#pragma unroll
        for (int i = 0; i < 2 * kQuad; ++i) {
          const int element = block * 4 * kQuad + 4 * (i / 2) + 2 * half + i % 2;
#pragma unroll
          for (int part = 0; part <= kGated; ++part) {
            h[part][i] = sums[element + part * SumsTile::kElements / 2] + shift[part][i];
          }
          y[i] = h[0][i];
        }
        if (out.y) {
          activate(y, out.form);
#pragma unroll
          for (int i = 0; kGated && i < 2 * kQuad; ++i) y[i] *= h[kGated][i];
          store_in_quad(out.y + (start + row) * out.width + stored, y, outside);
        }
        if (!out.h) continue;
        T* const kept = out.h + (start + row) * out.num_columns + stored;
        store_in_quad(kept, h[0], outside);
        if constexpr (kGated) store_in_quad(kept + out.width, h[1], outside);
      }
    }
  }
};

// Adds a tile of sums to float32 ones. The memory adds, so that no thread waits; each number gets one addition, so that
// results are deterministic.
struct AddTile {
  static constexpr bool kGated = false;
  static constexpr int kWidth = SumsTile::kColumns;
  float* total;
  int64_t width;

  __device__ void operator()(const float (&sums)[SumsTile::kElements], int thread, int64_t, int64_t start,
                             int64_t num_rows, int64_t first_row, int64_t first_column) const {
#pragma unroll
    for (int i = 0; i < SumsTile::kElements; i += 2) {
      const int64_t row = first_row + SumsTile::row(thread, i), column = first_column + SumsTile::column(thread, i);
      if (row < num_rows && column < width) add_pair(total + (start + row) * width + column, sums[i], sums[i + 1]);
    }
  }
};

}  // namespace fastmp
