// linear with the weight gradient accumulated into `main_grad`, as an autograd node: no Python runs in either
// direction. fastmp/ops/wgrad.py documents it, and implements it in Python for installs without this library.
#include "autograd/node.h"

#include <ATen/OpMathType.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <string>

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::Tensor in_rows(const at::Tensor& x) { return x.dim() == 2 ? x : x.reshape_symint({-1, x.sym_size(-1)}); }

// The states of FirstGradient in fastmp/ops/wgrad.py.
constexpr uint8_t kZeros = 1, kUndefined = 2, kStored = 3;

// True if the gradient has to overwrite main_grad; `flag`: one byte on the CPU, or none.
bool is_first(const std::optional<at::Tensor>& flag) {
  if (!flag) return false;
  const uint8_t state = *flag->const_data_ptr<uint8_t>();
  return state == kZeros || state == kUndefined;
}

void accumulate(const at::Tensor& total, const at::Tensor& grad, const at::Tensor& x, bool add) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastmp::accumulate_weight_grad_", "")
                             .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>();
  op.call(total, grad, x, add);
}

struct LinearBackward : torch::autograd::Node {
  LinearBackward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 at::Tensor main_grad, std::optional<at::Tensor> flag)
      : main_grad(std::move(main_grad)), flag(std::move(flag)) {
    using torch::autograd::impl::gradient_edge;
    set_next_edges({gradient_edge(x), gradient_edge(weight), bias ? gradient_edge(*bias) : torch::autograd::Edge()});
    this->x = SavedVariable(x, false);
    if (x.requires_grad()) this->weight = SavedVariable(weight, false);
  }

  std::string name() const override { return "LinearBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(3);  // of x, weight and bias; none for the weight
    if (!grads[0].defined()) return result;
    // 1. Nothing leads back from what is added to main_grad: there is no second derivative.
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear: its backward is not differentiable (create_graph=True is not supported)");
    RECORD_FUNCTION("fastmp.linear_backward", c10::ArrayRef<const c10::IValue>{});
    // 2. dgrad, the bias gradient, and wgrad added to main_grad.
    const at::Tensor input = x.unpack(), grad = in_rows(grads[0]);
    if (task_should_compute_output(0)) result[0] = at::mm(grad, weight.unpack()).view_symint(input.sym_sizes());
    if (task_should_compute_output(2)) result[2] = grad.sum(0);
    const bool first = is_first(flag);
    accumulate(main_grad, grad, in_rows(input), !first);
    if (first) *flag->mutable_data_ptr<uint8_t>() = kStored;
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
  }

 private:
  const at::Tensor main_grad;  // not a SavedVariable: every microbatch changes it, which autograd would report
  const std::optional<at::Tensor> flag;
  SavedVariable x, weight;
};

// Computes x W^T + b with the ops that autograd would dispatch, so that op recorders see the same ones. For x with gaps
// between rows torch folds the batch into one GEMM if the weight requires grad, which it cannot see below autograd; a
// batched GEMM would have other bits.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (x.dim() < 3 || x.is_contiguous()) return at::compositeimplicitautograd::linear(x, weight, bias);
  const at::Tensor rows = at::mm(in_rows(x), weight.t());
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  const at::Tensor y = rows.view_symint(sizes);
  return bias ? at::add(y, *bias) : y;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const at::Tensor& main_grad, const std::optional<at::Tensor>& flag) {
  if (!at::GradMode::is_enabled() || !weight.requires_grad()) return at::linear(x, weight, bias);
  const at::ScalarType dtype = weight.scalar_type(), sums = main_grad.scalar_type();
  TORCH_CHECK_VALUE(main_grad.sym_sizes() == weight.sym_sizes() && main_grad.device() == weight.device() &&
                        (sums == dtype || sums == at::toOpMathType(dtype)),
                    "linear: main_grad differs from weight in shape, device or dtype");
  fastmp::check_no_forward_mode(x);
  fastmp::check_no_forward_mode(weight);
  if (bias) fastmp::check_no_forward_mode(*bias);
  // Activation recomputation stops at the last saved tensor; saving before the GEMM lets it skip the GEMM.
  const fastmp::Handle node = fastmp::make_node<LinearBackward>(x, weight, bias, main_grad, flag);
  at::Tensor output;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    output = product(x, weight, bias);
  }
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastmp_autograd, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor main_grad, Tensor? flag=None) -> Tensor",
              TORCH_FN(linear));
}
