// grouped_mm and its weight gradient in CUDA C++, for sm_90a: CUTLASS multiplies, small kernels tell it on the device
// which rows are whose, so that no host waits.
//
// It takes bf16 with sizes that are multiples of 8. For everything else there is a kernel that is as right, and slow.
// The semantics are those of the references in fastmp/ops/grouped_mm.py.
#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "product_sm90a.cuh"
#endif
#include "problems.cuh"

namespace fastmp {
namespace {

// d = a b, or d += a b, of every problem, one thread an element.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    product_kernel(const Problems problems, bool columns_a, bool columns_b, bool accumulate) {
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

// Sums of experts without rows; `num_blocks` blocks for each expert.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    zero_empty_kernel(Unit* sums, int64_t expert_units, const int* offsets, int64_t num_blocks, int64_t num_rows) {
  const int64_t expert = blockIdx.x / num_blocks, step = num_blocks * blockDim.x;
  const Span span = span_of(offsets, expert, num_rows);
  if (span.start != span.end) return;
  for (int64_t i = blockIdx.x % num_blocks * blockDim.x + threadIdx.x; i < expert_units; i += step) {
    sums[expert * expert_units + i] = Unit{};
  }
}

// d = a b for each expert; or d += a b, where d is in the type that is computed in.
template <bool kColumnsA, bool kColumnsB, bool kAccumulate>
void multiply_experts(const char* op, bool tma, ScalarType dtype, const Tensor& offsets, int64_t num_rows,
                      const Operand& a, const Operand& b, const Operand& d, int64_t n, int64_t k, bool sum_rows) {
  const ProblemMemory made(op, offsets, num_rows, a, b, d, n, k, sum_rows);
  const cudaStream_t stream = current_stream(offsets);
  if (tma) {
    using Out = std::conditional_t<kAccumulate, float, __nv_bfloat16>;
    return multiply<kColumnsA, kColumnsB, Out, kAccumulate>(op, made.problems, offsets, stream);
  }
  dispatch_device(dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Out = std::conditional_t<kAccumulate, Compute<T>, T>;
    launch({kBlocks, kThreads}, stream, product_kernel<T, Out>, made.problems, kColumnsA, kColumnsB, kAccumulate);
  });
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets_any, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  FASTMP_CHECK(x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(transposed ? 1 : 2) &&
                   x.scalar_type() == w.scalar_type(),
               kOp, ": x is ", described(x), ", which does not fit w, ", described(w));
  check_offsets(kOp, offsets_any, w.size(0));
  const int64_t n = w.size(transposed ? 2 : 1), k = x.size(1);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty({x.size(0), n}, x.scalar_type(), x);
  if (y.numel() == 0) return y;
  if (w.size(0) == 0 || k == 0) return torch::stable::zero_(y);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  const bool tma = suits_tma(x, n, k);
  const Tensor whole = torch::stable::contiguous(w), weights = tma ? aligned_rows(whole).tensor : whole;
  const Rows rows = tma ? aligned_rows(x) : Rows(x), out(y);
  const auto multiply_by = [&](auto columns) {
    multiply_experts<false, columns, false>(kOp, tma, x.scalar_type(), offsets, rows.num_rows, operand(rows),
                                            operand_of_experts(weights), operand(out), n, k, false);
  };
  transposed ? multiply_by(std::false_type{}) : multiply_by(std::true_type{});
  zero_rest(y, offsets);
  return y;
}

// grad (M, N), x (M, K) and offsets fit together.
void check_wgrad(const char* op, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  check_offsets(op, offsets, offsets.numel());
  FASTMP_CHECK(grad.dim() == 2 && x.dim() == 2 && grad.size(0) == x.size(0) && grad.scalar_type() == x.scalar_type(), op,
               ": grad is ", described(grad), ", which does not fit x, ", described(x));
}

template <bool kAccumulate>
void add_wgrad(const char* op, bool tma, const Tensor& total, const Tensor& grad, const Tensor& x,
               const Tensor& offsets) {
  const Rows left = tma ? aligned_rows(grad) : Rows(grad), right = tma ? aligned_rows(x) : Rows(x);
  multiply_experts<true, false, kAccumulate>(op, tma, x.scalar_type(), offsets, left.num_rows, operand(left),
                                             operand(right), operand_of_experts(total), grad.size(1), x.size(1), true);
}

Tensor wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad";
  check_wgrad(kOp, grad, x, offsets_any);
  const DeviceGuard guard(x);
  const int64_t num_experts = offsets_any.numel(), num_rows = x.size(0);
  Tensor sums = fastmp::empty({num_experts, grad.size(1), x.size(1)}, x.scalar_type(), x);
  if (sums.numel() == 0 || num_rows == 0) return torch::stable::zero_(sums);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  add_wgrad<false>(kOp, suits_tma(x, grad.size(1), x.size(1)), sums, grad, x, offsets);
  in_units(grad.size(1) * x.size(1) * itemsize(x), [&](auto tag, int64_t units) {
    using Unit = typename decltype(tag)::type;
    launch({kBlocks * num_experts, kThreads}, current_stream(x), zero_empty_kernel<Unit>, mutable_data<Unit>(sums),
           units, data<int>(offsets), kBlocks, num_rows);
  });
  return sums;
}

void wgrad_in_place(Tensor& total, const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  check_wgrad(kOp, grad, x, offsets_any);
  const bool fits = total.dim() == 3 && total.size(0) == offsets_any.numel() && total.size(1) == grad.size(1) &&
                    total.size(2) == x.size(1);
  const ScalarType dtype = compute_dtype(x.scalar_type());
  FASTMP_CHECK(fits && total.scalar_type() == dtype && total.is_contiguous(), kOp, ": total must be contiguous ",
               dtype_name(dtype), ", one (", grad.size(1), ", ", x.size(1), ") for each of ", offsets_any.numel(),
               " experts, got ", described(total));
  if (total.numel() == 0 || x.size(0) == 0) return;
  const DeviceGuard guard(x);
  const bool tma = suits_tma(x, grad.size(1), x.size(1)) && is_aligned(total);
  add_wgrad<true>(kOp, tma, total, grad, x, torch::stable::contiguous(offsets_any));
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
