// The gradient of a linear layer's weight, added to a sum that goes on, on the CPU, by product.cpp.
// The semantics are those of the reference in fastmp/ops/wgrad.py.
#include "product.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void accumulate_weight_grad_(Tensor& total, const Tensor& grad, const Tensor& x) {
  constexpr const char* kOp = "accumulate_weight_grad_";
  check_operands(kOp, grad, x, 2, 2);
  check_sum(kOp, total, x);
  FASTMP_CHECK(total.dim() == 2 && grad.size(0) == x.size(0) && total.size(0) == grad.size(1) &&
                   total.size(1) == x.size(1),
               kOp, ": shapes do not fit");
  if (total.numel() == 0 || grad.size(0) == 0) return;
  const bool swapped = total.stride(1) != 1 && total.stride(0) == 1;  // of a parameter that lies transposed
  const Tensor left = along_rows(swapped ? x : grad), right = along_rows(swapped ? grad : x);
  const Tensor sums = swapped || total.stride(1) == 1 ? total : torch::stable::contiguous(total);
  run_products({weight_gradient_of(left, right, 0, grad.size(0), place(sums, 0), sums.stride(swapped ? 1 : 0),
                                   sums.scalar_type(), Epilogue::kAdd)},
               x, sums);
  if (!swapped && total.stride(1) != 1) torch::stable::copy_(total, sums);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "accumulate_weight_grad_", fastmp::accumulate_weight_grad_);
}

#endif  // FASTMP_ISA_BASE
