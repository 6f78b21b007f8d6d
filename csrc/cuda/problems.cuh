// Grouped GEMMs: sizes and first rows of one GEMM for each expert, computed on the device from the ends of the experts'
// rows; how tensor maps address those rows; and helpers that the ops of grouped GEMMs share.
#pragma once

#include "common.cuh"
#include "op.h"
#include "rows.h"

namespace fastmp {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 132;  // of kernels whose blocks walk over all there is

// Arrays of `count`, in device memory.
struct Problems {
  struct Shape {
    int m, n, k;
  };
  int count;
  Shape* shapes;
  int* starts;  // the experts' first rows
};

// The matrices of all experts, with rows `pitch` elements apart. Weights are `jump` elements from expert to expert;
// rows of tokens follow each other, and their jump is 0.
struct Operand {
  const void* base;
  int64_t pitch, jump;

  template <class T>
  __device__ const T* of(int64_t start, int64_t expert) const {
    return static_cast<const T*>(base) + start * (jump ? 0 : pitch) + expert * jump;
  }
};

// A tensor map has the same bounds for all experts. Two further dimensions move an expert's last row to the bound
// kMaxRows, so that the TMA unit reads zeros beyond it: kMaxRows steps of back_stride, which wrap around 64-bit
// addresses, lead kMaxRows rows back, and `end` steps of a row lead to the expert's end.
constexpr int kMaxRows = 1 << 30, kMaxSteps = 0x7fff0000;
constexpr int64_t back_stride(int64_t pitch) {
  constexpr int64_t around = int64_t{1} << 34;
  return around - pitch % around;
}

// Coordinates of an expert's first row in these dimensions.
struct FirstRow {
  int row, back, end;

  __host__ __device__ FirstRow(int start, int num_rows)
      : row(kMaxRows - num_rows), back(kMaxRows), end(start + num_rows) {}
};

// Role of an expert's rows: rows of the result, or the terms of its sums, which are stored or added.
enum class RowsAre { kRows, kStoredTerms, kAddedTerms };

// rows x n x k, or n x k summed over rows; an expert without rows adds nothing. An end before its start, or beyond all
// rows, is moved there. One block lists the problems, one a thread.
static __global__ void __launch_bounds__(kThreads)
    make_problems_kernel(const Problems problems, const int* offsets, int64_t num_rows, int n, int k, RowsAre are) {
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
    problems.starts[expert] = start;
    problems.shapes[expert] = are == RowsAre::kRows ? Problems::Shape{rows, n, k} : Problems::Shape{n, k, rows};
    if (are == RowsAre::kAddedTerms && rows == 0) problems.shapes[expert] = {0, 0, 0};
  }
}

// Writes zeros to the rows of y (num_rows, row_units) after those of the last expert.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    zero_rest_kernel(Unit* y, int64_t row_units, const Problems problems, int64_t num_rows) {
  const int64_t end = int64_t{problems.starts[problems.count - 1]} + problems.shapes[problems.count - 1].m;
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
    launch({kBlocks, kThreads}, current_stream(y), zero_rest_kernel<Unit>, mutable_data<Unit>(y), units, problems,
           y.size(0));
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

// Whether CUTLASS supports these operands: 16-bit, with rows of a multiple of 16 bytes, as many as a tensor map moves.
inline bool suits_tma(const Tensor& x, int64_t n, int64_t k) {
  const bool half = x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half;
  return half && n % kLanes<__half> == 0 && k % kLanes<__half> == 0 && x.size(0) <= kMaxRows;
}

inline void check_offsets(const char* op, const Tensor& offsets, int64_t num_experts) {
  FASTMP_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.size(0) == num_experts, op,
               ": offsets must be int32, one for each of ", num_experts, " experts, got ", described(offsets));
}

inline Operand operand(const Rows& rows) { return {data<void>(rows.tensor), rows.pitch, 0}; }
inline Operand operand_of_experts(const Tensor& each) {
  return {data<void>(each), each.size(2), each.size(1) * each.size(2)};
}

// The problems of the experts, in memory that lives as long as they are used.
struct ProblemMemory {
  Tensor memory;
  Problems problems;

  ProblemMemory(const char* op, const Tensor& offsets, int64_t num_rows, int64_t n, int64_t k, RowsAre are)
      : memory(fastmp::empty({4 * offsets.numel()}, ScalarType::Int, offsets)) {
    FASTMP_CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9, op, ": this kernel is for devices of sm_90");
    const auto count = static_cast<int>(offsets.numel());
    problems = {count, mutable_data<Problems::Shape>(memory), mutable_data<int>(memory) + 3 * count};
    launch({1, kThreads}, current_stream(offsets), make_problems_kernel, problems, data<int>(offsets), num_rows,
           static_cast<int>(n), static_cast<int>(k), are);
  }
};

}  // namespace fastmp
