// Pointers and sizes of one product for each expert, made on the device from where the experts' rows end.
#pragma once

#include "common.cuh"

namespace fastmp {

// Arrays of `count`, in device memory. A stride is the distance of rows, or of columns where those are contiguous.
struct Problems {
  struct Shape {
    int m, n, k;
  };
  int count;
  Shape* shapes;
  const void **a, **b;
  void** d;
  int64_t *stride_a, *stride_b, *stride_d;
};

// A matrix of expert e begins at base + start of its rows * row_bytes + e * expert_bytes.
struct Operand {
  char* base;
  int64_t row_bytes, expert_bytes, stride;

  __device__ void* of(int64_t start, int64_t expert) const { return base + start * row_bytes + expert * expert_bytes; }
};

struct Span {
  int64_t start, end;
};

// The rows of one expert. An end before its start, or beyond all rows, is moved there.
__device__ inline Span span_of(const int* offsets, int64_t expert, int64_t num_rows) {
  int64_t start = 0;
  for (int64_t i = 0; i < expert; ++i) start = max(start, min(static_cast<int64_t>(offsets[i]), num_rows));
  return {start, max(start, min(static_cast<int64_t>(offsets[expert]), num_rows))};
}

// m x n x k where rows are m, or n x k summed over rows. An expert without rows has no product.
__global__ inline void make_problems_kernel(const Problems problems, const int* offsets, int64_t num_rows, Operand a,
                                            Operand b, Operand d, int n, int k, bool sum_rows) {
  const int64_t expert = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (expert >= problems.count) return;
  const Span span = span_of(offsets, expert, num_rows);
  const int rows = static_cast<int>(span.end - span.start);
  problems.shapes[expert] = {0, 0, 0};
  if (rows > 0) problems.shapes[expert] = sum_rows ? Problems::Shape{n, k, rows} : Problems::Shape{rows, n, k};
  problems.a[expert] = a.of(span.start, expert);
  problems.b[expert] = b.of(span.start, expert);
  problems.d[expert] = d.of(span.start, expert);
  problems.stride_a[expert] = a.stride;
  problems.stride_b[expert] = b.stride;
  problems.stride_d[expert] = d.stride;
}

}  // namespace fastmp
