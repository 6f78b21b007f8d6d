// cross_entropy with loss_grad: checks that the loss received the upstream gradient passed in forward.
#include <cmath>
#include <limits>

#include "op.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

template <typename A>
bool is_expected(const Tensor& received, const Tensor& expected, const Tensor& target, int64_t ignore_index) {
  const A margin = 8 * std::numeric_limits<A>::epsilon();
  const A* got = received.const_data_ptr<A>();
  const A* wanted = expected.const_data_ptr<A>();
  const int64_t* ids = target.const_data_ptr<int64_t>();
  const int64_t got_step = received.stride(0), wanted_step = expected.stride(0), step = target.stride(0);
  bool same = true;
  for (int64_t i = 0; i < target.size(0); ++i) {
    const A expected_i = wanted[i * wanted_step];
    const bool close = std::abs(got[i * got_step] - expected_i) <= margin * std::abs(expected_i);  // false for NaN
    same &= close || ids[i * step] == ignore_index;
  }
  return same;
}

// Checks the upstream gradient; `grad`, the gradient of the logits that forward has written, is left as it is.
void cross_entropy_promise_(Tensor& grad, const Tensor& grad_loss, const Tensor& loss_grad, const Tensor& target,
                            int64_t ignore_index) {
  constexpr const char* op = "cross_entropy_promise_";
  const ScalarType dtype = loss_grad.scalar_type();
  const auto fits = [&](const Tensor& tensor, ScalarType wanted) {
    return tensor.dim() == 1 && tensor.size(0) == grad.size(0) && tensor.scalar_type() == wanted;
  };
  dispatch_float(grad.scalar_type(), op, [](auto) {});
  FASTMP_CHECK(grad.dim() == 2 && (dtype == ScalarType::Float || dtype == ScalarType::Double) &&
                   fits(loss_grad, dtype) && fits(grad_loss, dtype) && fits(target, ScalarType::Long),
               op, ": grad is ", described(grad), ", grad_loss ", described(grad_loss), ", loss_grad ",
               described(loss_grad), " and target ", described(target), ", which do not fit");
  const auto same = dtype == ScalarType::Double ? is_expected<double> : is_expected<float>;
  if (!same(grad_loss, loss_grad, target, ignore_index)) {
    throw FunctionError("cross_entropy: the loss received an upstream gradient other than the loss_grad passed to it");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) { FASTMP_IMPL(m, "cross_entropy_promise_", cross_entropy_promise_); }

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
