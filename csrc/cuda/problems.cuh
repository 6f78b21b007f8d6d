// Grouped GEMMs: pointers and sizes of one GEMM for each expert, computed on the device from the ends of the experts'
// rows, and helpers that the ops of grouped GEMMs share.
#pragma once

#include "common.cuh"
#include "op.h"
#include "rows.h"

#include <utility>

namespace fastmp {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 132;  // of kernels whose blocks walk over all there is

// Arrays of `count`, in device memory. A stride is the distance of rows, or of columns where those are contiguous;
// `starts` are the experts' first rows.
struct Problems {
  struct Shape {
    int m, n, k;
  };
  int count;
  Shape* shapes;
  const void **a, **b;
  void** d;
  int64_t *stride_a, *stride_b, *stride_d, *starts;
};

// A matrix of expert e begins at base + start of its rows * row_bytes + e * expert_bytes.
struct Operand {
  char* base;
  int64_t row_bytes, expert_bytes, stride;

  __device__ void* of(int64_t start, int64_t expert) const { return base + start * row_bytes + expert * expert_bytes; }
};

// m x n x k where rows are m, or n x k summed over rows. An expert without rows has no GEMM. An end before its start,
// or beyond all rows, is moved there. One block lists the problems, one a thread.
static __global__ void __launch_bounds__(kThreads)
    make_problems_kernel(const Problems problems, const int* offsets, int64_t num_rows, Operand a, Operand b, Operand d,
                         int n, int k, bool sum_rows) {
  __shared__ int rounds[2][kThreads];  // a round reads one half and writes the other
  const int thread = static_cast<int>(threadIdx.x);
  int before = 0;  // the last end of the experts before these
  for (int first = 0; first < problems.count; first += kThreads) {
    // 1. Ends that do not decrease: the greatest of all ends up to each, over twice as many of them at a time.
    const int expert = first + thread;
    int* ends = rounds[0];
    int* next = rounds[1];
    ends[thread] = expert < problems.count ? static_cast<int>(min(int64_t{offsets[expert]}, num_rows)) : 0;
    for (int distance = 1; distance < kThreads; distance *= 2) {
      __syncthreads();
      next[thread] = max(ends[thread], thread >= distance ? ends[thread - distance] : 0);
      int* const read = ends;
      ends = next;
      next = read;
    }
    __syncthreads();
    const int start = max(before, thread ? ends[thread - 1] : 0), end = max(before, ends[thread]);
    before = max(before, ends[kThreads - 1]);
    __syncthreads();
    if (expert >= problems.count) continue;
    // 2. The expert's rows give the sizes of its GEMM.
    const int rows = end - start;
    problems.shapes[expert] = {0, 0, 0};
    if (rows > 0) problems.shapes[expert] = sum_rows ? Problems::Shape{n, k, rows} : Problems::Shape{rows, n, k};
    // 3. Addresses and strides of its operands.
    problems.a[expert] = a.of(start, expert);
    problems.b[expert] = b.of(start, expert);
    problems.d[expert] = d.of(start, expert);
    problems.stride_a[expert] = a.stride;
    problems.stride_b[expert] = b.stride;
    problems.stride_d[expert] = d.stride;
    problems.starts[expert] = start;
  }
}

// Writes zeros to the rows of y (num_rows, row_units) after those of the last expert.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    zero_rest_kernel(Unit* y, int64_t row_units, const Problems problems, int64_t num_rows) {
  const int64_t end = problems.starts[problems.count - 1] + problems.shapes[problems.count - 1].m;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = end * row_units + blockIdx.x * blockDim.x + threadIdx.x; i < num_rows * row_units; i += step) {
    y[i] = Unit{};
  }
}

inline int64_t itemsize(const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

// Calls body(TypeTag<Unit>{}, number of units) for pieces of `bytes` bytes: 16 at a time, or two.
template <class Body>
void in_units(int64_t bytes, const Body& body) {
  bytes % kVectorBytes == 0 ? body(TypeTag<uint4>{}, bytes / kVectorBytes)
                            : body(TypeTag<unsigned short>{}, bytes / static_cast<int64_t>(sizeof(short)));
}

inline void zero_rest(const Tensor& y, const Problems& problems) {
  in_units(y.size(1) * itemsize(y), [&](auto tag, int64_t units) {
    using Unit = typename decltype(tag)::type;
    launch({kBlocks, kThreads}, current_stream(y), zero_rest_kernel<Unit>, mutable_data<Unit>(y), units,
           problems, y.size(0));
  });
}

inline bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

// Rows as TMA reads them: a view where it can, else a copy.
inline Rows aligned_rows(const Tensor& tensor) {
  const Rows rows(tensor);
  if (is_aligned(rows.tensor) && rows.pitch * itemsize(tensor) % kVectorBytes == 0) return rows;
  Tensor copy = fastmp::empty(tensor.sizes(), tensor.scalar_type(), tensor);
  torch::stable::copy_(copy, tensor);
  return Rows(copy);
}

// Whether CUTLASS supports these operands: 16-bit, with rows of a multiple of 16 bytes.
inline bool suits_tma(const Tensor& x, int64_t n, int64_t k) {
  const bool half = x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half;
  return half && n % kLanes<__half> == 0 && k % kLanes<__half> == 0;
}

inline void check_offsets(const char* op, const Tensor& offsets, int64_t num_experts) {
  FASTMP_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.size(0) == num_experts, op,
               ": offsets must be int32, one for each of ", num_experts, " experts, got ", described(offsets));
}

inline Operand operand(const Rows& rows) {
  return {const_cast<char*>(data<char>(rows.tensor)), rows.pitch * itemsize(rows.tensor), 0, rows.pitch};
}
inline Operand operand_of_experts(const Tensor& each) {
  return {const_cast<char*>(data<char>(each)), 0, each.size(1) * each.size(2) * itemsize(each), each.size(2)};
}

// The problems of the experts, in one piece of memory, which lives as long as they are used.
struct ProblemMemory {
  Tensor memory;
  Problems problems;

  ProblemMemory(const char* op, const Tensor& offsets, int64_t num_rows, const Operand& a, const Operand& b,
                const Operand& d, int64_t n, int64_t k, bool sum_rows)
      : memory(fastmp::empty({8 * size(offsets.numel())}, ScalarType::Byte, offsets)) {
    FASTMP_CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9, op, ": this kernel is for devices of sm_90");
    const int64_t count = offsets.numel();
    char* next = mutable_data<char>(memory);
    const auto take = [&] { return std::exchange(next, next + size(count)); };
    problems.count = static_cast<int>(count);
    problems.shapes = reinterpret_cast<Problems::Shape*>(take());
    problems.a = reinterpret_cast<const void**>(take());
    problems.b = reinterpret_cast<const void**>(take());
    problems.d = reinterpret_cast<void**>(take());
    problems.stride_a = reinterpret_cast<int64_t*>(take());
    problems.stride_b = reinterpret_cast<int64_t*>(take());
    problems.stride_d = reinterpret_cast<int64_t*>(take());
    problems.starts = reinterpret_cast<int64_t*>(take());
    launch({1, kThreads}, current_stream(offsets), make_problems_kernel, problems, data<int>(offsets), num_rows, a, b,
           d, static_cast<int>(n), static_cast<int>(k), sum_rows);
  }
  // Bytes of an array, a multiple of what TMA asks of addresses.
  static int64_t size(int64_t count) { return ceil_div(count * 16, 128) * 128; }
};

}  // namespace fastmp
