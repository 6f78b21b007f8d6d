// Derivatives of ops as data: a formula names the op that computes gradients, and from what.
//
// `declare` gives an op a kernel for autograd. In forward that runs the op below autograd and records a node
// with what the formula wants; in backward the node calls the other op. No Python runs in either. Formulas come
// from fastmp/ops/core/formulas.py, which describes their text and encodes it as the numbers read here.
//
// This library uses the C++ interface of autograd, which has no stable ABI: it serves the torch that it was
// compiled for.
#include "autograd/node.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using c10::OperatorHandle;
using fastmp::Handle;
using fastmp::make_node;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

// What an argument of the backward op is; `a` and `b` as each says.
enum Kind : int64_t {
  INPUT = 0,   // input a of the forward op
  OUTPUT = 1,  // output a
  GRAD = 2,    // gradient of output a; one that is not there is zeros, or None if b
  NONE = 3,
  INTEGER = 4,  // a
  BOOLEAN = 5,  // a
  HAS = 6,      // whether input a is not None
  NOT = 7,      // not input a
  DTYPE = 8,    // of input a
  SIZE = 9,     // of input a in dimension b
};

struct Value {
  Kind kind;
  int64_t a, b;
};

// Whence a gradient comes.
enum Source : int64_t {
  RESULT = 0,      // of the call
  GRADIENT = 1,    // of an output, handed on
  ARGUMENT = 2,    // of the call, which has written the gradient there
};

// The gradient of input `input` is the source with that index, or its row `row` unless that is negative.
// placed: the call may write it where it is wanted.
struct Target {
  int64_t input;
  Source source;
  int64_t index, row;
  bool placed;
};

// What is done where input `condition` is neither None nor False; -1: always.
struct Formula {
  int64_t condition;
  std::string op;
  std::vector<Value> arguments;
  std::vector<Target> targets;
  std::vector<int64_t> inputs;  // which may get a gradient: the edges of the node
};

using Operator = std::optional<OperatorHandle>;

Operator find(const std::string& op) {
  if (op.empty()) return std::nullopt;
  const Operator found = c10::Dispatcher::singleton().findSchema({op, ""});
  TORCH_CHECK(found, op, " is not registered");
  return found;
}

struct Derivative {
  std::string op;
  std::string name;   // of the node
  std::string range;  // for profilers
  std::vector<Formula> formulas;
  std::vector<int64_t> differentiable;  // outputs
  std::string refusal;                  // of an op that has no derivative
};

// Fails in backward: for ops without a derivative, among them those that compute gradients.
struct Refusal : Node {
  explicit Refusal(std::string why) : why(std::move(why)) {}
  variable_list apply(variable_list&&) override { TORCH_CHECK(false, why); }
  std::string name() const override { return "NoDerivative"; }
  const std::string why;
};

// The arguments that an op writes, held while it runs.
struct Written {
  Written(const OperatorHandle& op, c10::ArrayRef<IValue> inputs) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite() && inputs[i].isTensor())
        tensors.emplace_back(i, inputs[i].toTensor());
  }

  // Input `input`, or null if that is not written.
  const at::Tensor* find(int64_t input) const {
    for (const auto& [each, tensor] : tensors)
      if (each == input) return &tensor;
    return nullptr;
  }

  // So that a tensor which autograd saved and the op overwrote is noticed. A kernel on the stable ABI does not do it.
  void bump_versions() const {
    for (const auto& [input, tensor] : tensors)
      if (!tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
  }

  std::vector<std::pair<int64_t, at::Tensor>> tensors;
};

struct Backward : Node {
  Backward(std::shared_ptr<const Derivative> derivative, const Formula& formula)
      : derivative(std::move(derivative)), formula(formula), op(find(formula.op)) {}

  std::string name() const override { return derivative->name; }

  // Keeps what the formula takes of the inputs, before the op runs; not yet what it writes.
  void keep_inputs(c10::ArrayRef<IValue> inputs, const Written& written) {
    for (const Value& value : formula.arguments) {
      kept.emplace_back();
      Kept& each = kept.back();
      switch (value.kind) {
        case INPUT:
          if (written.find(value.a)) {
            each.is_tensor = true;
          } else if (inputs[value.a].isTensor()) {
            each.tensor = SavedVariable(inputs[value.a].toTensor(), false);
            each.is_tensor = true;
          } else {
            each.value = inputs[value.a];
          }
          break;
        case INTEGER: each.value = value.a; break;
        case BOOLEAN: each.value = value.a != 0; break;
        case HAS: each.value = !inputs[value.a].isNone(); break;
        case NOT: each.value = !inputs[value.a].toBool(); break;
        case DTYPE: each.value = inputs[value.a].toTensor().scalar_type(); break;
        case SIZE: each.value = inputs[value.a].toTensor().sym_size(value.b); break;
        default: break;
      }
    }
  }

  void keep_outputs(c10::ArrayRef<IValue> outputs, const Written& written) {
    for (size_t i = 0; i < kept.size(); i++) {
      const Value& value = formula.arguments[i];
      const at::Tensor* overwritten = value.kind == INPUT ? written.find(value.a) : nullptr;
      if (overwritten) {
        kept[i].tensor = SavedVariable(overwritten->detach(), false);  // it may get this node for a history
      } else if (value.kind == OUTPUT) {
        const at::Tensor& output = outputs[value.a].toTensor();
        kept[i].tensor = SavedVariable(output, output.grad_fn() != nullptr);
        kept[i].is_tensor = true;
      }
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(formula.inputs.size());
    bool any = false, wanted = false;
    for (const at::Tensor& grad : grads) any |= grad.defined();
    if (!any) return result;
    for (size_t i = derivative->differentiable.size(); i < grads.size(); i++)
      TORCH_CHECK(!grads[i].defined(), derivative->op, ": an argument is overwritten, but was used again afterwards");
    for (const Target& target : formula.targets) wanted |= target.source != GRADIENT && is_wanted(target.input);
    Stack stack;
    std::vector<at::Tensor> written;  // one for each target
    RECORD_FUNCTION(derivative->range, c10::ArrayRef<const IValue>{});
    if (wanted) {
      stack.reserve(kept.size());
      for (size_t i = 0; i < kept.size(); i++) stack.push_back(argument(i, grads));
      for (const Target& target : formula.targets)
        written.push_back(target.source == ARGUMENT ? stack[target.index].toTensor().detach() : at::Tensor());
      call(stack);
    }
    for (size_t i = 0; i < formula.targets.size(); i++) {
      const Target& target = formula.targets[i];
      if (!is_wanted(target.input)) continue;
      at::Tensor grad = target.source == RESULT     ? stack[target.index].toTensor()
                        : target.source == GRADIENT ? grads[grad_of(target.index)]
                                                    : written[i];
      result[edge_of(target.input)] = target.row >= 0 ? grad.select(0, target.row) : grad;
    }
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Kept& each : kept) each.tensor.reset_data();
  }

 private:
  struct Kept {
    SavedVariable tensor;
    IValue value;
    bool is_tensor = false;
  };

  void call(Stack& stack) {
    for (const Target& target : formula.targets) {
      if (!target.placed || !is_wanted(target.input)) continue;
      const at::Tensor place = place_of(edge_of(target.input));
      if (!place.defined()) continue;
      stack.emplace_back(place);
      find(formula.op + "_into")->callBoxed(&stack);
      stack.insert(stack.begin() + target.index, place);
      return;
    }
    // nothing would lead from what is written in place to a second derivative
    TORCH_CHECK(!op->schema().is_mutable() || !at::GradMode::is_enabled(), derivative->refusal);
    op->callBoxed(&stack);
  }

  // Where the next node along an edge wants the gradient; undefined: anywhere.
  at::Tensor place_of(size_t edge) const {
    const torch::autograd::Edge& next = next_edge(edge);
    auto* reader = dynamic_cast<fastmp::Reader*>(next.function.get());
    return reader && !at::GradMode::is_enabled() ? reader->place_of(next.input_nr) : at::Tensor();
  }

  size_t edge_of(int64_t input) const {
    for (size_t i = 0; i < formula.inputs.size(); i++)
      if (formula.inputs[i] == input) return i;
    TORCH_INTERNAL_ASSERT(false);
  }

  size_t grad_of(int64_t output) const {
    for (size_t i = 0; i < derivative->differentiable.size(); i++)
      if (derivative->differentiable[i] == output) return i;
    TORCH_INTERNAL_ASSERT(false);
  }

  bool is_wanted(int64_t input) { return task_should_compute_output(edge_of(input)); }

  IValue argument(size_t i, const variable_list& grads) {
    const Value& value = formula.arguments[i];
    if (value.kind == GRAD) {
      const size_t index = grad_of(value.a);
      if (grads[index].defined()) return grads[index];
      return value.b ? IValue() : IValue(zeros(index, grads));
    }
    if (!kept[i].is_tensor) return kept[i].value;
    return value.kind == OUTPUT ? kept[i].tensor.unpack(getptr()) : kept[i].tensor.unpack();
  }

  // Of a DTensor they have to be a DTensor: another gradient, which is there, makes them.
  at::Tensor zeros(size_t index, const variable_list& grads) const {
    const auto& metadata = input_metadata(index);
    if (!metadata.is_tensor_subclass()) return metadata.zeros_like();
    const auto there = std::find_if(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); });
    return there->new_zeros_symint(metadata.shape_as_dim_vector(), metadata.dtype());
  }

  const std::shared_ptr<const Derivative> derivative;
  const Formula& formula;
  const Operator op;  // none where gradients are only handed on
  std::vector<Kept> kept;
};

// The kernel of an op for autograd.
class Recorder final : public c10::OperatorKernel {
 public:
  explicit Recorder(std::shared_ptr<const Derivative> derivative) : derivative(std::move(derivative)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t num_inputs = op.schema().arguments().size();
    const c10::ArrayRef<IValue> inputs(stack->data() + stack->size() - num_inputs, num_inputs);
    if (!at::GradMode::is_enabled() || !requires_grad(inputs)) return run(op, keys, stack);
    if (derivative->formulas.empty()) {
      TORCH_CHECK(!op.schema().is_mutable(), derivative->op,
                  " writes into its arguments and has no derivative: use torch.no_grad()");
      return refuse(op, keys, stack, inputs);
    }
    const Formula* formula = nullptr;
    for (const Formula& each : derivative->formulas) {
      if (each.condition < 0 || is_there(inputs[each.condition])) {
        formula = &each;
        break;
      }
    }
    const bool in_place = op.schema().returns().empty();  // the result is the argument that is written
    Handle handle = make_node<Backward>(derivative, *formula);
    Backward& node = static_cast<Backward&>(*handle);
    torch::autograd::edge_list edges;
    for (int64_t input : formula->inputs) edges.push_back(edge(inputs[input]));
    node.set_next_edges(std::move(edges));
    const Written written(op, inputs);
    if (in_place) check_own(written.tensors.at(0).second);
    node.keep_inputs(inputs, written);
    run(op, keys, stack);
    written.bump_versions();
    if (in_place) return torch::autograd::set_history(written.tensors.at(0).second, handle);
    const size_t num_outputs = op.schema().returns().size();
    const c10::ArrayRef<IValue> outputs(stack->data() + stack->size() - num_outputs, num_outputs);
    for (int64_t output : derivative->differentiable)
      torch::autograd::set_history(outputs[output].toTensor(), handle);
    for (const auto& [input, tensor] : written.tensors) take_over(tensor, handle);
    node.keep_outputs(outputs, written);
  }

 private:
  static bool requires_grad(c10::ArrayRef<IValue> inputs) {
    bool any = false;
    for (const IValue& input : inputs) {
      if (!input.isTensor() || !input.toTensor().defined()) continue;
      any |= input.toTensor().requires_grad();
      fastmp::refuse_forward_mode(input.toTensor());
    }
    return any;
  }

  static bool is_there(const IValue& input) { return !input.isNone() && !(input.isBool() && !input.toBool()); }

  static torch::autograd::Edge edge(const IValue& input) {
    if (!input.isTensor()) return {};
    return torch::autograd::impl::gradient_edge(input.toTensor());
  }

  // A write to another view of the same tensor would silently take the history of a view from it.
  void check_own(const at::Tensor& out) const {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(out);
    TORCH_CHECK_VALUE(!out.requires_grad(), derivative->op, ": out ", out.sizes(), " requires a gradient");
    TORCH_CHECK_VALUE(!view || !view->has_bw_view(), derivative->op, ": out ", out.sizes(),
                      " is a view; pass out.detach()");
  }

  // Makes a tensor that the op has overwritten, or all that this is a view of, one more output of the node: whoever
  // computes with it afterwards sends a gradient there, which is an error. Compilers see for themselves.
  static void take_over(const at::Tensor& written, const Handle& node) {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(written);
    const at::Tensor& whole = view && view->has_bw_view() ? view->get_backward_view().base_ : written;
    const auto compiled = c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::Python});
    if (whole.numel() != written.numel() || whole.is_leaf() || whole.key_set().has_any(compiled)) return;
    torch::autograd::impl::rebase_history(whole, {node, node->add_input_metadata(whole)});
  }

  static void run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

  void refuse(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, c10::ArrayRef<IValue> inputs) {
    torch::autograd::edge_list edges;
    for (const IValue& input : inputs)
      if (input.isTensor()) edges.push_back(edge(input));
    Handle node = make_node<Refusal>(derivative->refusal);
    node->set_next_edges(std::move(edges));
    run(op, keys, stack);
    const size_t num_outputs = op.schema().returns().size();
    for (size_t i = stack->size() - num_outputs; i < stack->size(); i++) {
      const IValue& output = (*stack)[i];
      if (output.isTensor() && torch::autograd::isDifferentiableType(output.toTensor().scalar_type()))
        torch::autograd::set_history(output.toTensor(), node);
    }
  }

  const std::shared_ptr<const Derivative> derivative;
};

// See `encode` in fastmp/ops/core/formulas.py for the order of the numbers.
Formula read_formula(const std::string& op, const c10::List<int64_t>& code, size_t& at) {
  auto next = [&] { return int64_t(code[at++]); };
  const int64_t condition = next();
  Formula formula{condition, op, {}, {}, {}};
  for (int64_t n = next(); n > 0; n--) {
    const Kind kind = Kind(next());
    const int64_t a = next(), b = next();
    formula.arguments.push_back({kind, a, b});
  }
  for (int64_t n = next(); n > 0; n--) {
    const int64_t input = next();
    const Source source = Source(next());
    const int64_t index = next(), row = next();
    const bool placed = next();
    formula.targets.push_back({input, source, index, row, placed});
    formula.inputs.push_back(input);
  }
  return formula;
}

// Runs an op that writes, where no gradient is recorded.
class VersionBump final : public c10::OperatorKernel {
 public:
  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t num_inputs = op.schema().arguments().size();
    const Written written(op, c10::ArrayRef<IValue>(stack->data() + stack->size() - num_inputs, num_inputs));
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    written.bump_versions();
  }
};

// All kernels that have been declared; they stay until the process ends.
torch::Library& kernels() {
  static torch::Library library(torch::Library::IMPL, "fastmp", std::nullopt, __FILE__, __LINE__);
  return library;
}


void declare(std::string name, std::string node, std::string refusal, const c10::List<std::string>& ops,
             const c10::List<int64_t>& differentiable, const c10::List<int64_t>& code) {
  auto derivative = std::make_shared<Derivative>();
  derivative->op = name;
  derivative->name = std::move(node);
  derivative->range = "fastmp." + name + "_backward";
  derivative->refusal = std::move(refusal);
  derivative->differentiable = differentiable.vec();
  size_t at = 0;
  for (size_t i = 0; i < ops.size(); i++) derivative->formulas.push_back(read_formula(ops.get(i), code, at));
  kernels().impl(name.c_str(), c10::DispatchKey::Autograd,
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>(derivative)));
}

void declare_writes(std::string name) {
  kernels().impl(name.c_str(), c10::DispatchKey::ADInplaceOrView,
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VersionBump>()));
}

}  // namespace

TORCH_LIBRARY(fastmp_autograd, library) {
  library.def("declare(str name, str node, str refusal, str[] ops, int[] differentiable, int[] code) -> ()");
  library.impl("declare", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(declare));
  library.def("declare_writes(str name) -> ()");
  library.impl("declare_writes", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(declare_writes));
}
