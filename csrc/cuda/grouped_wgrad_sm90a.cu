// The weight gradient of grouped_mm in CUDA C++, for sm_90a: CUTLASS multiplies, small kernels tell it on the device
// which rows are whose, so that no host waits. The semantics are those of the references in fastmp/ops/grouped_mm.py.
#include "grouped_gemm.cuh"

namespace fastmp {
namespace {

// Writes zeros to the sums of experts without rows, which have no GEMM; `num_blocks` blocks for each expert.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    zero_empty_kernel(Unit* sums, int64_t expert_units, const Problems problems, int64_t num_blocks) {
  const int64_t expert = blockIdx.x / num_blocks, step = num_blocks * blockDim.x;
  if (problems.shapes[expert].k != 0) return;
  for (int64_t i = blockIdx.x % num_blocks * blockDim.x + threadIdx.x; i < expert_units; i += step) {
    sums[expert * expert_units + i] = Unit{};
  }
}

// grad (M, N), x (M, K) and offsets fit together.
void check_wgrad(const char* op, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  check_offsets(op, offsets, offsets.numel());
  FASTMP_CHECK(grad.dim() == 2 && x.dim() == 2 && grad.size(0) == x.size(0) && grad.scalar_type() == x.scalar_type(), op,
               ": grad is ", described(grad), ", which does not fit x, ", described(x));
}

template <bool kAccumulate>
ProblemMemory add_wgrad(const char* op, bool tma, const Tensor& total, const Tensor& grad, const Tensor& x,
                        const Tensor& offsets) {
  const Rows left = tma ? aligned_rows(grad) : Rows(grad), right = tma ? aligned_rows(x) : Rows(x);
  return multiply_experts<true, false, kAccumulate>(op, tma, x.scalar_type(), offsets, left.num_rows, operand(left),
                                                    operand(right), operand_of_experts(total), grad.size(1), x.size(1),
                                                    true);
}

Tensor wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets_any) {
  constexpr const char* kOp = "grouped_mm_wgrad";
  check_wgrad(kOp, grad, x, offsets_any);
  const DeviceGuard guard(x);
  const int64_t num_experts = offsets_any.numel(), num_rows = x.size(0);
  Tensor sums = fastmp::empty({num_experts, grad.size(1), x.size(1)}, x.scalar_type(), x);
  if (sums.numel() == 0 || num_rows == 0) return torch::stable::zero_(sums);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  const ProblemMemory made = add_wgrad<false>(kOp, suits_tma(x, grad.size(1), x.size(1)), sums, grad, x, offsets);
  in_units(grad.size(1) * x.size(1) * itemsize(x), [&](auto tag, int64_t units) {
    using Unit = typename decltype(tag)::type;
    launch({kBlocks * num_experts, kThreads}, current_stream(x), zero_empty_kernel<Unit>, mutable_data<Unit>(sums),
           units, made.problems, kBlocks);
  });
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
  const bool tma = suits_tma(x, grad.size(1), x.size(1)) && is_aligned(sums);
  add_wgrad<true>(kOp, tma, sums, grad, x, torch::stable::contiguous(offsets_any));
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
