// The weight gradient of grouped_mm in CUDA C++, for sm_90a: CUTLASS multiplies, small kernels tell it on the device
// which rows are whose, so that no host waits. The semantics are those of the references in fastmp/ops/grouped_mm.py.
#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "gemm_sm90a.cuh"
#endif
#include "epilogue.cuh"
#include "problems.cuh"

namespace fastmp {
namespace {

// Stores grad^T x over the rows of every expert, or adds it to `total` (experts, n, k), one thread an element; for
// operands that CUTLASS does not support.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    terms_kernel(const Problems problems, const Operand grad, const Operand x, Out* total, bool accumulate) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t expert = 0; expert < problems.count; ++expert) {
    const auto [m, n, k] = problems.shapes[expert];
    const int64_t size = int64_t{m} * n, start = problems.starts[expert];
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
      const T* a = grad.of<T>(start, expert) + i / n;
      const T* b = x.of<T>(start, expert) + i % n;
      Compute<T> sum = 0;
      for (int64_t row = 0; row < k; ++row) sum += widen(a[row * grad.pitch]) * widen(b[row * x.pitch]);
      Out* d = total + expert * size + i;
      *d = narrow<Out>(accumulate ? widen(*d) + sum : sum);
    }
  }
}

// grad (M, N), x (M, K) and offsets fit together.
void check_wgrad(const char* op, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  check_offsets(op, offsets, offsets.numel());
  FASTMP_CHECK(grad.dim() == 2 && x.dim() == 2 && grad.size(0) == x.size(0) && grad.scalar_type() == x.scalar_type(),
               op, ": grad is ", described(grad), ", which does not fit x, ", described(x));
}

// Stores the gradient of every expert, or adds it to `total`, where that is in the type that is computed in.
template <bool kAccumulate>
void sum_terms(const char* op, const Tensor& total, const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  const int64_t n = grad.size(1), k = x.size(1);
  const bool tma = suits_tma(x, n, k) && is_aligned(total);
  const Rows left = tma ? aligned_rows(grad) : Rows(grad), right = tma ? aligned_rows(x) : Rows(x);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  const ProblemMemory made(op, offsets, left.num_rows, n, k,
                           kAccumulate ? RowsAre::kAddedTerms : RowsAre::kStoredTerms);
  const cudaStream_t stream = current_stream(x);
  dispatch_device(x.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Out = std::conditional_t<kAccumulate, Compute<T>, T>;
    Out* const out = mutable_data<Out>(total);
    if constexpr (sizeof(T) == 2) {
      const auto store = [&] {
        if constexpr (kAccumulate) return AddTile{out, k};
        if constexpr (!kAccumulate) return StoreTile<false, T>{{nullptr, nullptr, out, k, k, Form{}}};
      }();
      if (tma) {
        return multiply<T, true, true>(op, made.problems, operand(left), operand(right), store, n, k, x, stream);
      }
    }
    launch({kBlocks, kThreads}, stream, terms_kernel<T, Out>, made.problems, operand(left), operand(right), out,
           kAccumulate);
  });
}

Tensor wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad";
  check_wgrad(kOp, grad, x, offsets_any);
  const DeviceGuard guard(x);
  const int64_t num_experts = offsets_any.numel(), num_rows = x.size(0);
  Tensor sums = fastmp::empty({num_experts, grad.size(1), x.size(1)}, x.scalar_type(), x);
  if (sums.numel() == 0 || num_rows == 0) return torch::stable::zero_(sums);
  sum_terms<false>(kOp, sums, grad, x, offsets_any);
  return sums;
}

void wgrad_in_place(Tensor& total, const Tensor& grad, const Tensor& x, const Tensor& offsets_any, bool add) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  check_wgrad(kOp, grad, x, offsets_any);
  const bool fits = total.dim() == 3 && total.size(0) == offsets_any.numel() && total.size(1) == grad.size(1) &&
                    total.size(2) == x.size(1);
  const ScalarType dtype = compute_dtype(x.scalar_type());
  const bool wide = total.scalar_type() == dtype;
  FASTMP_CHECK(fits && (wide || total.scalar_type() == x.scalar_type()) && total.is_contiguous(), kOp,
               ": total must be contiguous ", dtype_name(dtype), " or ", dtype_name(x.scalar_type()), ", one (",
               grad.size(1), ", ", x.size(1), ") for each of ", offsets_any.numel(), " experts, got ",
               described(total));
  const DeviceGuard guard(x);
  if (!add) torch::stable::zero_(total);
  if (total.numel() == 0 || x.size(0) == 0) return;
  Tensor sums = total;
  if (!wide) {  // accumulate in a wider copy, which is rounded once
    sums = fastmp::empty(total.sizes(), dtype, x);
    torch::stable::copy_(sums, total);
  }
  sum_terms<true>(kOp, sums, grad, x, offsets_any);
  if (!wide) torch::stable::copy_(total, sums);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("grouped_mm_wgrad(Tensor grad, Tensor x, Tensor offsets) -> Tensor");
  m.def("grouped_mm_wgrad_(Tensor(a!) total, Tensor grad, Tensor x, Tensor offsets, bool add=True) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "grouped_mm_wgrad", fastmp::wgrad);
  FASTMP_IMPL(m, "grouped_mm_wgrad_", fastmp::wgrad_in_place);
}
