// Interpreter of autograd formulas: the backward of an op as data, without Python in either direction.
//
//   1. `declare` registers a kernel for the Autograd key of an op (`Recorder`).
//   2. Forward: it picks the branch of the formula, saves what the backward op needs in a node (`Backward`), and runs
//      the op below autograd.
//   3. Backward: the node calls the backward op and hands its results to the next nodes.
//
// The text of formulas, and its encoding as the numbers read here, are described in fastmp/ops/core/formulas.py.
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

// Kinds of arguments of the backward op, numbered as `ValueKind` in fastmp/ops/core/formulas.py.
enum class ValueKind : int64_t {
  INPUT = 0,    // input `index` of the forward op
  OUTPUT = 1,   // output `index`
  GRAD = 2,     // gradient of output `index`; if undefined zeros, or None if `extra`
  NONE = 3,     // None
  INTEGER = 4,  // the constant `index`
  BOOLEAN = 5,  // the constant `index`
  HAS = 6,      // true if input `index` is not None
  NOT = 7,      // not input `index`
  DTYPE = 8,    // dtype of input `index`
  SIZE = 9,     // size of input `index` in dimension `extra`
};

struct Value {
  ValueKind kind;
  int64_t index, extra;
};

// Origins of a gradient, numbered as `Source` in fastmp/ops/core/formulas.py.
enum class Source : int64_t {
  RESULT = 0,    // a result of the call
  GRAD = 1,      // the gradient of an output, passed on
  ARGUMENT = 2,  // an argument that the call has overwritten with a gradient
};

// The gradient of input `input`: entry `index` of its source, or row `row` of that unless it is negative.
// into: the "_into" form of the op may write it to the next node's buffer.
struct Target {
  int64_t input;
  Source source;
  int64_t index, row;
  bool into;
};

// A backward for calls whose input `condition` is neither None nor False; -1: for all calls.
struct FormulaBranch {
  int64_t condition;
  std::string op;  // the backward op; empty where gradients are only passed on
  std::vector<Value> arguments;
  std::vector<Target> targets;
  std::vector<int64_t> inputs;  // inputs that may get a gradient: the edges of the node
};

using Operator = std::optional<OperatorHandle>;

Operator find(const std::string& op) {
  if (op.empty()) return std::nullopt;
  const Operator found = c10::Dispatcher::singleton().findSchema({op, ""});
  TORCH_CHECK(found, op, " is not registered");
  return found;
}

struct AutogradFormula {
  std::string op;
  std::string node;   // name of the node in the autograd graph
  std::string range;  // name for profilers
  std::string error;  // message where a derivative does not exist
  std::vector<FormulaBranch> branches;
  std::vector<int64_t> differentiable;  // indices of outputs
};

// Raises in backward: the node of ops without a formula, backward ops among them.
struct NoDerivative : Node {
  explicit NoDerivative(std::string error) : error(std::move(error)) {}
  variable_list apply(variable_list&&) override { TORCH_CHECK(false, error); }
  std::string name() const override { return "NoDerivative"; }
  const std::string error;
};

// The arguments that an op overwrites, held while it runs.
struct Written {
  Written(const OperatorHandle& op, c10::ArrayRef<IValue> inputs) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite() && inputs[i].isTensor())
        tensors.emplace_back(i, inputs[i].toTensor());
  }

  // Returns input `input`, or null if it is not written.
  const at::Tensor* find(int64_t input) const {
    for (const auto& [each, tensor] : tensors)
      if (each == input) return &tensor;
    return nullptr;
  }

  // Lets autograd detect that a tensor it saved was overwritten. Kernels on the stable ABI do not bump versions.
  void bump_versions() const {
    for (const auto& [input, tensor] : tensors)
      if (!tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
  }

  std::vector<std::pair<int64_t, at::Tensor>> tensors;
};

struct Backward : Node {
  Backward(std::shared_ptr<const AutogradFormula> formula, const FormulaBranch& branch)
      : formula(std::move(formula)), branch(branch), op(find(branch.op)) {}

  std::string name() const override { return formula->node; }

  // Saves the inputs that the backward op needs, before the op runs; overwritten ones follow in `save_outputs`.
  void save_inputs(c10::ArrayRef<IValue> inputs, const Written& written) {
    for (const Value& value : branch.arguments) {
      saved.emplace_back();
      Saved& each = saved.back();
      switch (value.kind) {
        case ValueKind::INPUT:
          if (written.find(value.index)) {
            each.is_tensor = true;
          } else if (inputs[value.index].isTensor()) {
            each.tensor = SavedVariable(inputs[value.index].toTensor(), false);
            each.is_tensor = true;
          } else {
            each.value = inputs[value.index];
          }
          break;
        case ValueKind::INTEGER: each.value = value.index; break;
        case ValueKind::BOOLEAN: each.value = value.index != 0; break;
        case ValueKind::HAS: each.value = !inputs[value.index].isNone(); break;
        case ValueKind::NOT: each.value = !inputs[value.index].toBool(); break;
        case ValueKind::DTYPE: each.value = inputs[value.index].toTensor().scalar_type(); break;
        case ValueKind::SIZE: each.value = inputs[value.index].toTensor().sym_size(value.extra); break;
        default: break;
      }
    }
  }

  // Saves outputs and overwritten inputs, after the op has run and autograd knows their history.
  void save_outputs(c10::ArrayRef<IValue> outputs, const Written& written) {
    for (size_t i = 0; i < saved.size(); i++) {
      const Value& value = branch.arguments[i];
      const at::Tensor* overwritten = value.kind == ValueKind::INPUT ? written.find(value.index) : nullptr;
      if (overwritten) {
        saved[i].tensor = SavedVariable(overwritten->detach(), false);  // it may get this node for a history
      } else if (value.kind == ValueKind::OUTPUT) {
        const at::Tensor& output = outputs[value.index].toTensor();
        saved[i].tensor = SavedVariable(output, output.grad_fn() != nullptr);
        saved[i].is_tensor = true;
      }
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(branch.inputs.size());
    bool any = false, wanted = false;
    // 1. Without any gradient there is nothing to do; raise for a second backward after the first has handed out the
    // memory of an argument, and for a gradient of an overwritten input.
    for (const at::Tensor& grad : grads) any |= grad.defined();
    if (!any) return result;
    TORCH_CHECK(!spent, formula->op, ": its gradient lies in the memory of an argument and was handed out once: ",
                "there is no second backward; to run two, leave out grad_in_place or loss_grad");
    for (size_t i = formula->differentiable.size(); i < grads.size(); i++)
      TORCH_CHECK(!grads[i].defined(), formula->op, ": an argument is overwritten, but was used again afterwards");
    // 2. Call the backward op, unless all gradients are passed on.
    for (const Target& target : branch.targets) wanted |= target.source != Source::GRAD && is_wanted(target.input);
    Stack stack;
    std::vector<at::Tensor> written;  // for each target: the argument that the call overwrites, or undefined
    RECORD_FUNCTION(formula->range, c10::ArrayRef<const IValue>{});
    if (wanted) {
      stack.reserve(saved.size());
      for (size_t i = 0; i < saved.size(); i++) stack.push_back(argument(i, grads));
      for (const Target& target : branch.targets)
        written.push_back(target.source == Source::ARGUMENT ? stack[target.index].toTensor().detach() : at::Tensor());
      call(stack);
      spent = std::any_of(written.begin(), written.end(), [](const at::Tensor& each) { return each.defined(); });
    }
    // 3. Distribute results, gradients and overwritten arguments over the edges.
    for (size_t i = 0; i < branch.targets.size(); i++) {
      const Target& target = branch.targets[i];
      if (!is_wanted(target.input)) continue;
      at::Tensor grad = target.source == Source::RESULT ? stack[target.index].toTensor()
                        : target.source == Source::GRAD ? grads[grad_of(target.index)]
                                                        : written[i];
      result[edge_of(target.input)] = target.row >= 0 ? grad.select(0, target.row) : grad;
    }
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Saved& each : saved) each.tensor.reset_data();
  }

 private:
  struct Saved {
    SavedVariable tensor;
    IValue value;
    bool is_tensor = false;
  };

  // Replaces the arguments on the stack by the results of the backward op.
  void call(Stack& stack) {
    // "x!": the "_into" form takes one more argument, the next node's buffer, in place of that result.
    for (const Target& target : branch.targets) {
      if (!target.into || !is_wanted(target.input)) continue;
      const at::Tensor buffer = buffer_of(edge_of(target.input));
      if (!buffer.defined()) continue;
      stack.emplace_back(buffer);
      find(branch.op + "_into")->callBoxed(&stack);
      stack.insert(stack.begin() + target.index, buffer);
      return;
    }
    // An op that writes in place has no second derivative: nothing leads back from what it overwrites.
    TORCH_CHECK(!op->schema().is_mutable() || !at::GradMode::is_enabled(), formula->error);
    op->callBoxed(&stack);
  }

  // The buffer that the next node along an edge reads the gradient from; undefined if it takes any tensor.
  at::Tensor buffer_of(size_t edge) const {
    const torch::autograd::Edge& next = next_edge(edge);
    auto* reader = dynamic_cast<fastmp::Reader*>(next.function.get());
    return reader && !at::GradMode::is_enabled() ? reader->place_of(next.input_nr) : at::Tensor();
  }

  size_t edge_of(int64_t input) const {
    for (size_t i = 0; i < branch.inputs.size(); i++)
      if (branch.inputs[i] == input) return i;
    TORCH_INTERNAL_ASSERT(false);
  }

  size_t grad_of(int64_t output) const {
    for (size_t i = 0; i < formula->differentiable.size(); i++)
      if (formula->differentiable[i] == output) return i;
    TORCH_INTERNAL_ASSERT(false);
  }

  bool is_wanted(int64_t input) { return task_should_compute_output(edge_of(input)); }

  IValue argument(size_t i, const variable_list& grads) {
    const Value& value = branch.arguments[i];
    if (value.kind == ValueKind::GRAD) {
      const size_t index = grad_of(value.index);
      if (grads[index].defined()) return grads[index];
      return value.extra ? IValue() : IValue(zeros(index, grads));
    }
    if (!saved[i].is_tensor) return saved[i].value;
    return value.kind == ValueKind::OUTPUT ? saved[i].tensor.unpack(getptr()) : saved[i].tensor.unpack();
  }

  // Zeros for a gradient that did not arrive; for a DTensor made by another gradient, so that they are one too.
  at::Tensor zeros(size_t index, const variable_list& grads) const {
    const auto& metadata = input_metadata(index);
    if (!metadata.is_tensor_subclass()) return metadata.zeros_like();
    const auto other = std::find_if(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); });
    return other->new_zeros_symint(metadata.shape_as_dim_vector(), metadata.dtype());
  }

  const std::shared_ptr<const AutogradFormula> formula;
  const FormulaBranch& branch;
  const Operator op;  // none where gradients are only passed on
  std::vector<Saved> saved;
  bool spent = false;  // a backward has handed out the memory of an argument
};

// The Autograd kernel of an op: runs it below autograd and records its node.
class Recorder final : public c10::OperatorKernel {
 public:
  explicit Recorder(std::shared_ptr<const AutogradFormula> formula) : formula(std::move(formula)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t num_inputs = op.schema().arguments().size();
    const c10::ArrayRef<IValue> inputs(stack->data() + stack->size() - num_inputs, num_inputs);
    if (!at::GradMode::is_enabled() || !requires_grad(inputs)) return run(op, keys, stack);
    // 1. Choose the branch; without one the op runs with a node that raises.
    if (formula->branches.empty()) {
      TORCH_CHECK(!op.schema().is_mutable(), formula->op,
                  " writes into its arguments and has no derivative: use torch.no_grad()");
      return run_without_derivative(op, keys, stack, inputs);
    }
    const FormulaBranch* branch = nullptr;
    for (const FormulaBranch& each : formula->branches) {
      if (each.condition < 0 || is_set(inputs[each.condition])) {
        branch = &each;
        break;
      }
    }
    // 2. Make the node, and save inputs.
    const bool in_place = op.schema().returns().empty();  // the result is the argument that is written
    Handle handle = make_node<Backward>(formula, *branch);
    Backward& node = static_cast<Backward&>(*handle);
    torch::autograd::edge_list edges;
    for (int64_t input : branch->inputs) edges.push_back(edge(inputs[input]));
    node.set_next_edges(std::move(edges));
    const Written written(op, inputs);
    if (in_place) check_out(written.tensors.at(0).second);
    node.save_inputs(inputs, written);
    // 3. Run the op below autograd.
    run(op, keys, stack);
    written.bump_versions();
    // 4. Connect outputs to the node, and save them.
    if (in_place) return torch::autograd::set_history(written.tensors.at(0).second, handle);
    const size_t num_outputs = op.schema().returns().size();
    const c10::ArrayRef<IValue> outputs(stack->data() + stack->size() - num_outputs, num_outputs);
    for (int64_t output : formula->differentiable) torch::autograd::set_history(outputs[output].toTensor(), handle);
    for (const auto& [input, tensor] : written.tensors) add_output(tensor, handle);
    node.save_outputs(outputs, written);
  }

 private:
  static bool requires_grad(c10::ArrayRef<IValue> inputs) {
    bool any = false;
    for (const IValue& input : inputs) {
      if (!input.isTensor() || !input.toTensor().defined()) continue;
      any |= input.toTensor().requires_grad();
      fastmp::check_no_forward_mode(input.toTensor());
    }
    return any;
  }

  static bool is_set(const IValue& input) { return !input.isNone() && !(input.isBool() && !input.toBool()); }

  static torch::autograd::Edge edge(const IValue& input) {
    if (!input.isTensor()) return {};
    return torch::autograd::impl::gradient_edge(input.toTensor());
  }

  // A write to another view of the same tensor would silently take the history of a view from it.
  void check_out(const at::Tensor& out) const {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(out);
    TORCH_CHECK_VALUE(!out.requires_grad(), formula->op, ": out ", out.sizes(), " requires a gradient");
    TORCH_CHECK_VALUE(!view || !view->has_bw_view(), formula->op, ": out ", out.sizes(),
                      " is a view; pass out.detach()");
  }

  // Makes an overwritten tensor, or the base of the view that it is, one more output of the node: a later use of it
  // sends a gradient there, which is an error. Compilers functionalise the op and need no such output.
  static void add_output(const at::Tensor& written, const Handle& node) {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(written);
    const at::Tensor& base = view && view->has_bw_view() ? view->get_backward_view().base_ : written;
    const auto compiled = c10::DispatchKeySet({c10::DispatchKey::Functionalize, c10::DispatchKey::Python});
    if (base.numel() != written.numel() || base.is_leaf() || base.key_set().has_any(compiled)) return;
    torch::autograd::impl::rebase_history(base, {node, node->add_input_metadata(base)});
  }

  static void run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

  void run_without_derivative(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                              c10::ArrayRef<IValue> inputs) {
    torch::autograd::edge_list edges;
    for (const IValue& input : inputs)
      if (input.isTensor()) edges.push_back(edge(input));
    Handle node = make_node<NoDerivative>(formula->error);
    node->set_next_edges(std::move(edges));
    run(op, keys, stack);
    const size_t num_outputs = op.schema().returns().size();
    for (size_t i = stack->size() - num_outputs; i < stack->size(); i++) {
      const IValue& output = (*stack)[i];
      if (output.isTensor() && torch::autograd::isDifferentiableType(output.toTensor().scalar_type()))
        torch::autograd::set_history(output.toTensor(), node);
    }
  }

  const std::shared_ptr<const AutogradFormula> formula;
};

// Decodes one branch from `code`, from position `at` on: the inverse of `encode` in fastmp/ops/core/formulas.py.
FormulaBranch read_branch(const std::string& op, const c10::List<int64_t>& code, size_t& at) {
  auto next = [&] { return int64_t(code[at++]); };
  const int64_t condition = next();
  FormulaBranch branch{condition, op, {}, {}, {}};
  for (int64_t n = next(); n > 0; n--) {
    const ValueKind kind = ValueKind(next());
    const int64_t index = next(), extra = next();
    branch.arguments.push_back({kind, index, extra});
  }
  for (int64_t n = next(); n > 0; n--) {
    const int64_t input = next();
    const Source source = Source(next());
    const int64_t index = next(), row = next();
    const bool into = next();
    branch.targets.push_back({input, source, index, row, into});
    branch.inputs.push_back(input);
  }
  return branch;
}

// The ADInplaceOrView kernel of an op that writes into its arguments: runs it and bumps their versions.
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

// The library that holds the declared kernels until the process ends.
torch::Library& kernels() {
  static torch::Library library(torch::Library::IMPL, "fastmp", std::nullopt, __FILE__, __LINE__);
  return library;
}

void declare(std::string name, std::string node, std::string error, const c10::List<std::string>& ops,
             const c10::List<int64_t>& differentiable, const c10::List<int64_t>& code) {
  auto formula = std::make_shared<AutogradFormula>();
  formula->op = name;
  formula->node = std::move(node);
  formula->range = "fastmp." + name + "_backward";
  formula->error = std::move(error);
  formula->differentiable = differentiable.vec();
  size_t at = 0;
  for (size_t i = 0; i < ops.size(); i++) formula->branches.push_back(read_branch(ops.get(i), code, at));
  kernels().impl(name.c_str(), c10::DispatchKey::Autograd,
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>(formula)));
}

void declare_writes(std::string name) {
  kernels().impl(name.c_str(), c10::DispatchKey::ADInplaceOrView,
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VersionBump>()));
}

}  // namespace

TORCH_LIBRARY(fastmp_autograd, library) {
  library.def("declare(str name, str node, str error, str[] ops, int[] differentiable, int[] code) -> ()");
  library.impl("declare", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(declare));
  library.def("declare_writes(str name) -> ()");
  library.impl("declare_writes", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(declare_writes));
}
