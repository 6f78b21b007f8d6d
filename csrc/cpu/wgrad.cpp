// The gradient of a linear layer's weight, added to a sum that goes on, and a linear layer of a few rows, on the CPU,
// by gemm.cpp. The semantics are those of the references in fastmp/ops/wgrad.py.
#include "gemm.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void accumulate_weight_grad_(Tensor& total, const Tensor& grad, const Tensor& x, bool add) {
  constexpr const char* kOp = "accumulate_weight_grad_";
  check_operands(kOp, grad, x, 2, 2);
  check_sum(kOp, total, x);
  FASTMP_CHECK(
      total.dim() == 2 && grad.size(0) == x.size(0) && total.size(0) == grad.size(1) && total.size(1) == x.size(1), kOp,
      ": shapes do not fit");
  if (!add) torch::stable::zero_(total);
  if (total.numel() == 0 || grad.size(0) == 0) return;
  const bool swapped = total.stride(1) != 1 && total.stride(0) == 1;  // of a parameter that lies transposed
  const Tensor left = along_rows(swapped ? x : grad), right = along_rows(swapped ? grad : x);
  const Tensor sums = swapped || total.stride(1) == 1 ? total : torch::stable::contiguous(total);
  run_gemms({wgrad_desc(left, right, 0, grad.size(0), place(sums, 0), sums.stride(swapped ? 1 : 0), sums.scalar_type(),
                        Epilogue::kAdd)},
            x, sums);
  if (!swapped && total.stride(1) != 1) torch::stable::copy_(total, sums);
}

Tensor few_rows_linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
  constexpr const char* kOp = "few_rows_linear";
  check_operands(kOp, x, weight, 2, 2);
  FASTMP_CHECK(x.size(1) == weight.size(1), kOp, ": shapes do not fit");
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 1 && bias->size(0) == weight.size(0)),
               kOp, ": bias must be ", dtype_name(x.scalar_type()), " (", weight.size(0), ",)");
  Tensor y = fastmp::empty({x.size(0), weight.size(0)}, x.scalar_type(), x);
  if (y.numel() == 0) return y;
  const Tensor left = along_rows(x), right = along_rows(weight);
  GemmDesc gemm{};
  if (bias) gemm.bias = place(*(bias = torch::stable::contiguous(*bias)), 0);
  gemm.a = {place(left, 0), left.stride(0), 1}, gemm.b = {place(right, 0), right.stride(0), 1};
  gemm.rows = y.size(0), gemm.cols = y.size(1), gemm.terms = x.size(1);
  gemm.out = place(y, 0), gemm.out_pitch = gemm.cols;
  gemm.dtype = gemm.out_dtype = x.scalar_type(), gemm.epilogue = Epilogue::kStore;
  run_gemms({gemm}, x, y);
  return y;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "accumulate_weight_grad_", fastmp::accumulate_weight_grad_);
  FASTMP_IMPL(m, "few_rows_linear", fastmp::few_rows_linear);
}

#endif  // FASTMP_ISA_BASE
