// grouped_mm and its weight gradient in CUDA C++, for sm_90a and bf16: CUTLASS multiplies, small kernels tell it on the
// device which rows are whose, so that no host waits.
//
// The semantics are those of the references in fastmp/ops/grouped_mm.py. Rows and columns are multiples of 16 bytes.
#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "product_sm90a.cuh"
#endif
#include "op.h"
#include "problems.cuh"
#include "rows.h"

#include <algorithm>

namespace fastmp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 132;  // that fill with zeros
using Element = __nv_bfloat16;

// Rows of y (num_rows, vectors of 16 bytes) that belong to nobody.
__global__ void __launch_bounds__(kThreads)
    zero_rest_kernel(uint4* y, int64_t row_vectors, const int* offsets, int64_t num_experts, int64_t num_rows) {
  __shared__ int64_t end;
  if (threadIdx.x == 0) end = span_of(offsets, num_experts - 1, num_rows).end;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = end * row_vectors + blockIdx.x * blockDim.x + threadIdx.x; i < num_rows * row_vectors; i += step) {
    y[i] = uint4{0, 0, 0, 0};
  }
}

// Sums of experts without rows; `num_blocks` blocks for each expert.
__global__ void __launch_bounds__(kThreads)
    zero_empty_kernel(uint4* sums, int64_t expert_vectors, const int* offsets, int64_t num_blocks, int64_t num_rows) {
  const int64_t expert = blockIdx.x / num_blocks, step = num_blocks * blockDim.x;
  const Span span = span_of(offsets, expert, num_rows);
  if (span.start != span.end) return;
  for (int64_t i = blockIdx.x % num_blocks * blockDim.x + threadIdx.x; i < expert_vectors; i += step) {
    sums[expert * expert_vectors + i] = uint4{0, 0, 0, 0};
  }
}

int64_t itemsize(const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

// Rows as TMA reads them: a view where it can, else a copy.
Rows aligned_rows(const Tensor& tensor) {
  const Rows rows(tensor);
  if (is_aligned(rows.tensor) && rows.pitch * itemsize(tensor) % kVectorBytes == 0) return rows;
  Tensor copy = fastmp::empty(tensor.sizes(), tensor.scalar_type(), tensor);
  torch::stable::copy_(copy, tensor);
  return Rows(copy);
}

void check_operand(const char* op, const char* name, const Tensor& tensor, int64_t dims) {
  FASTMP_CHECK(tensor.dim() == dims && tensor.scalar_type() == ScalarType::BFloat16, op, ": ", name, " must have ", dims,
               " dimensions and be bfloat16, got ", described(tensor));
  const int64_t columns = tensor.size(dims - 1);
  FASTMP_CHECK(columns % kLanes<Element> == 0, op, ": ", name, " has ", columns, " columns, which is no multiple of ",
               kLanes<Element>);
}

void check_offsets(const char* op, const Tensor& offsets, int64_t num_experts) {
  FASTMP_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.size(0) == num_experts, op,
               ": offsets must be int32, one for each of ", num_experts, " experts, got ", described(offsets));
}

// The arrays of `count` problems in one piece of memory, which lives as long as they are used.
struct ProblemMemory {
  Tensor memory;
  Problems problems;

  ProblemMemory(int64_t count, const Tensor& like)
      : memory(fastmp::empty({7 * size(count)}, ScalarType::Byte, like)) {
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
  }
  // Bytes of an array, a multiple of what TMA asks of addresses.
  static int64_t size(int64_t count) { return ceil_div(count * 16, 128) * 128; }
};

// d = a b for each expert.
template <bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
void multiply_experts(const char* op, const Tensor& offsets, int64_t num_rows, const Operand& a, const Operand& b,
                      const Operand& d, int64_t n, int64_t k, bool sum_rows) {
  FASTMP_CHECK(device_attribute(cudaDevAttrComputeCapabilityMajor) == 9, op, ": this kernel is for devices of sm_90");
  const int64_t num_experts = offsets.numel();
  const ProblemMemory made(num_experts, offsets);
  const cudaStream_t stream = current_stream(offsets);
  launch({ceil_div(num_experts, kThreads), kThreads}, stream, make_problems_kernel, made.problems, data<int>(offsets),
         num_rows, a, b, d, static_cast<int>(n), static_cast<int>(k), sum_rows);
  multiply<kColumnsA, kColumnsB, Out, kAccumulate>(op, made.problems, offsets, stream);
}

Operand operand(const Rows& rows) {
  return {const_cast<char*>(data<char>(rows.tensor)), rows.pitch * itemsize(rows.tensor), 0, rows.pitch};
}
Operand operand_of_experts(const Tensor& each) {
  return {const_cast<char*>(data<char>(each)), 0, each.size(1) * each.size(2) * itemsize(each), each.size(2)};
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets_any, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  check_operand(kOp, "x", x, 2);
  check_operand(kOp, "w", w, 3);
  check_offsets(kOp, offsets_any, w.size(0));
  const int64_t n = w.size(transposed ? 2 : 1), k = w.size(transposed ? 1 : 2);
  FASTMP_CHECK(x.size(1) == k && n % kLanes<Element> == 0, kOp, ": x is ", described(x), " but w is ", described(w),
               ", of which both sizes must be multiples of ", kLanes<Element>);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty({x.size(0), n}, x.scalar_type(), x);
  if (y.numel() == 0) return y;
  if (w.size(0) == 0 || k == 0) return torch::stable::zero_(y);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  const Tensor weights = aligned_rows(torch::stable::contiguous(w)).tensor;
  const Rows rows = aligned_rows(x), out(y);
  const Operand a = operand(rows), b = operand_of_experts(weights), d = operand(out);
  transposed ? multiply_experts<false, false, Element, false>(kOp, offsets, rows.num_rows, a, b, d, n, k, false)
             : multiply_experts<false, true, Element, false>(kOp, offsets, rows.num_rows, a, b, d, n, k, false);
  launch({kBlocks, kThreads}, current_stream(x), zero_rest_kernel, mutable_data<uint4>(y), n / kLanes<Element>,
         data<int>(offsets), w.size(0), rows.num_rows);
  return y;
}

// The shapes of grad (M, N), x (M, K) and offsets, and the place of the result (experts, N, K).
void check_wgrad(const char* op, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  check_operand(op, "grad", grad, 2);
  check_operand(op, "x", x, 2);
  check_offsets(op, offsets, offsets.numel());
  FASTMP_CHECK(grad.size(0) == x.size(0), op, ": grad is ", described(grad), " but x is ", described(x));
}

template <class Out, bool kAccumulate>
void add_wgrad(const char* op, const Tensor& total, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  const Rows left = aligned_rows(grad), right = aligned_rows(x);
  multiply_experts<true, false, Out, kAccumulate>(op, offsets, left.num_rows, operand(left), operand(right),
                                                  operand_of_experts(total), grad.size(1), x.size(1), true);
}

Tensor wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad";
  check_wgrad(kOp, grad, x, offsets_any);
  const DeviceGuard guard(x);
  const int64_t num_experts = offsets_any.numel(), num_rows = x.size(0);
  Tensor sums = fastmp::empty({num_experts, grad.size(1), x.size(1)}, x.scalar_type(), x);
  if (sums.numel() == 0 || num_rows == 0) return torch::stable::zero_(sums);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  add_wgrad<Element, false>(kOp, sums, grad, x, offsets);
  launch({kBlocks * num_experts, kThreads}, current_stream(x), zero_empty_kernel, mutable_data<uint4>(sums),
         grad.size(1) * x.size(1) / kLanes<Element>, data<int>(offsets), kBlocks, num_rows);
  return sums;
}

void wgrad_in_place(Tensor& total, const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  check_wgrad(kOp, grad, x, offsets_any);
  const bool fits = total.dim() == 3 && total.size(0) == offsets_any.numel() && total.size(1) == grad.size(1) &&
                    total.size(2) == x.size(1);
  FASTMP_CHECK(fits && total.scalar_type() == ScalarType::Float && total.is_contiguous() && is_aligned(total), kOp,
               ": total must be contiguous float32, one (", grad.size(1), ", ", x.size(1), ") for each of ",
               offsets_any.numel(), " experts, got ", described(total));
  if (total.numel() == 0 || x.size(0) == 0) return;
  const DeviceGuard guard(x);
  add_wgrad<float, true>(kOp, total, grad, x, torch::stable::contiguous(offsets_any));
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("grouped_mm(Tensor x, Tensor w, Tensor offsets, bool transposed) -> Tensor");
  m.def("grouped_mm_wgrad(Tensor grad, Tensor x, Tensor offsets) -> Tensor");
  m.def("grouped_mm_wgrad_(Tensor(a!) total, Tensor grad, Tensor x, Tensor offsets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "grouped_mm", fastmp::grouped_mm);
  FASTMP_IMPL(m, "grouped_mm_wgrad", fastmp::wgrad);
  FASTMP_IMPL(m, "grouped_mm_wgrad_", fastmp::wgrad_in_place);
}
