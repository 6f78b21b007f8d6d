// The module _replay: runs the replay program of a training step, with one autograd node for each forward. Python runs
// only to launch a graph and to call hooks.
//
// It decides nothing: where a step differs from the program, fastmp/cuda_graphs/executor.py continues the step or
// raises the error. So each function here returns None, or calls Python, for anything the program does not hold. The
// guard of the model, which is checked before each step, is here as well.
//
// It uses torch's C++ interfaces of autograd and of Python, which have no stable ABI: a build serves one version of
// torch and of Python.
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include "autograd/node.h"
#include "replay/program.h"
#include "replay/model_guard.h"

namespace {

using namespace fastmp;
using torch::autograd::variable_list;

[[noreturn]] void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Calls `function` and drops the result.
void call(const py::object& function) {
  PyObject* result = PyObject_CallNoArgs(function.ptr());
  if (result == nullptr) raise_python_error();
  Py_DECREF(result);
}

template <typename... Arguments>
void call(PyObject* self, PyObject* method, const Arguments&... arguments) {
  PyObject* result = PyObject_CallMethodObjArgs(self, method, arguments.ptr()..., nullptr);
  if (result == nullptr) raise_python_error();
  Py_DECREF(result);
}

PyObject* name_of(const char* name) { return PyUnicode_InternFromString(name); }

// True for a plain strided tensor: no subclass, symbolic sizes, zero tensor or forward-mode tangent.
bool is_ordinary(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.layout() == at::kStrided &&
         tensor.has_storage() && !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined();
}

bool fits(const at::Tensor& tensor, const Expected& expected) {
  return tensor.scalar_type() == expected.dtype && tensor.requires_grad() == expected.needs &&
         tensor.sizes() == expected.sizes &&
         (tensor.strides() == expected.strides ||
          (expected.plain && (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense())));
}

bool lies_in(const at::Tensor& tensor, const at::Tensor& buffer) {
  return tensor.const_data_ptr() == buffer.const_data_ptr() && tensor.strides() == buffer.strides() && !is_lazy(tensor);
}

// True inside a backward() that accumulates into all leaves, as opposed to one with inputs=.
bool is_for_all() {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  return asked && asked->empty();
}

// The position of one training step in its program.
class StepReplay {
 public:
  // before, after: for each forward graph, for each backward graph, true if Python is called with its replay.
  // named: each replay goes through Python, which names it for Nsight.
  StepReplay(std::shared_ptr<const ReplayProgram> program, at::Tensor anchor, std::vector<bool> before,
             std::vector<bool> after, bool named)
      : program(std::move(program)),
        anchor(std::move(anchor)),
        before(std::move(before)),
        after(std::move(after)),
        named(named),
        in_flight(this->program->slots.size()) {}

  PyObject* forward(const std::shared_ptr<StepReplay>& self, PyObject* owner, int64_t chunk, int64_t span,
                    PyObject* tensors, PyObject* overwritten);

  // Replays the backward of forward `index` into `own`, the input gradients; returns false to fall back to Python.
  bool backward(size_t index, PyObject* owner, const variable_list& grads, variable_list& own) {
    const std::shared_ptr<const ReplayProgram> program = this->program;  // a hook may end the step
    if (!program || at::GradMode::is_enabled() || !in_flight[index] || next >= program->slots.size()) return false;
    const Forward& forward = program->forwards[program->slots[index].graph];
    if (!forward.has_backward) {
      bool any = false;
      for (const at::Tensor& grad : grads) any |= grad.defined();
      if (!any) return true;
    }
    const ReplaySlot& slot = program->slots[next];
    if (slot.kind != Kind::BACKWARD || slot.forward != index) return false;
    if (forward.trained && !is_for_all()) return false;
    const Backward& backward = program->backwards[slot.graph];
    for (size_t i = 0; i < grads.size(); i++) {
      const at::Tensor& grad = grads[i];
      if (grad.defined() != backward.grad_mask[i] || (grad.defined() && !is_ordinary(grad))) return false;
      if (slot.in_place[i] && !(grad.defined() && lies_in(grad, slot.fixed[i]))) return false;
    }
    const size_t number = next++;
    in_flight[index] = false;
    replay(slot, number, owner, grads, backward.launch);
    forget_copied(backward.input_grads);
    if (after[slot.graph]) {
      static PyObject* const name = name_of("after_backward");
      call(owner, name, py::int_(number), py::int_(index));
    }
    for (size_t i = 0; i < backward.input_grads.size(); i++)
      if (backward.input_grads[i].defined()) own[i] = on_same_memory(backward.input_grads[i]);
    return true;
  }

  // Returns the static buffer from which the next replay reads output gradient `input` of forward `index`, if that
  // replay is its backward: until then the buffer is free. Undefined for gradients that leave the chain, which may be
  // kept.
  at::Tensor place_of(size_t index, size_t input) const {
    if (!program || !in_flight[index] || next >= program->slots.size()) return {};
    const ReplaySlot& slot = program->slots[next];
    if (slot.kind != Kind::BACKWARD || slot.forward != index || slot.in_place[input]) return {};
    if (program->forwards[program->slots[index].graph].is_last || !is_for_all()) return {};
    return program->backwards[slot.graph].grad_mask[input] ? on_same_memory(slot.fixed[input]) : at::Tensor();
  }

  void pass_over() { next++; }

  // Leaves the program; returns the forwards whose backward has not begun.
  std::vector<size_t> leave() {
    std::vector<size_t> left;
    for (size_t i = 0; i < in_flight.size(); i++)
      if (in_flight[i]) left.push_back(i);
    program.reset();
    return left;
  }

  size_t next = 0;
  bool aliased = false;  // of the last forward

  std::shared_ptr<const ReplayProgram> program;

 private:
  // A scalar gradient that a backward has copied: its source, and the versions of source and destination.
  struct Copied {
    int task;
    at::Tensor from;
    int64_t into_version, from_version;
  };

  // Copies into static buffers the tensors that are not there yet; skips undefined tensors.
  void fill(const Tensors& fixed, const Tensors& tensors) {
    Tensors into, from;
    for (size_t i = 0; i < fixed.size(); i++) {
      if (!tensors[i].defined() || lies_in(tensors[i], fixed[i]) || was_copied(fixed[i], tensors[i])) continue;
      into.push_back(fixed[i]);
      const bool moved = tensors[i].is_alias_of(fixed[i]);  // a hook returns another view of what was written there
      from.push_back(moved ? tensors[i].clone() : tensors[i]);
    }
    if (into.empty()) return;
    copy_together(into, from);
    const int task = torch::autograd::get_current_graph_task_id();
    for (size_t i = 0; i < into.size() && task >= 0; i++)
      if (is_number(into[i], from[i]))
        copied.insert_or_assign(into[i].const_data_ptr(),
                                Copied{task, from[i], into[i]._version(), from[i]._version()});
  }

  static Tensors aliases(const Tensors& tensors) {
    Tensors made;
    for (const at::Tensor& each : tensors) made.push_back(on_same_memory(each));
    return made;
  }

  static Tensors own_copies(const Forward& forward) {
    Tensors from, made;
    for (size_t i = 0; i < forward.made.size(); i++)
      if (forward.copied_out[i]) from.push_back(forward.made[i]);
    const Tensors copies = copies_of(from);
    for (size_t i = 0, at = 0; i < forward.made.size(); i++)
      made.push_back(forward.copied_out[i] ? copies[at++] : on_same_memory(forward.made[i]));
    return made;
  }

  static bool is_number(const at::Tensor& into, const at::Tensor& from) {
    return into.dim() == 0 && !is_lazy(from) && !from.is_inference();
  }

  // True if this backward has copied the same scalar there: layers share the gradient of their auxiliary losses.
  bool was_copied(const at::Tensor& into, const at::Tensor& from) const {
    if (!is_number(into, from)) return false;
    const auto found = copied.find(into.const_data_ptr());
    if (found == copied.end()) return false;
    const Copied& last = found->second;
    return last.task == torch::autograd::get_current_graph_task_id() && last.into_version == into._version() &&
           last.from.is_alias_of(from) && last.from.const_data_ptr() == from.const_data_ptr() &&
           last.from_version == from._version();
  }

  // Forgets scalars in memory that a replay has overwritten: replays raise no version counter.
  void forget_copied(const Tensors& written) {
    std::erase_if(copied, [&](const auto& each) {
      return std::any_of(written.begin(), written.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_alias_of(each.second.from);
      });
    });
  }

  void replay(const ReplaySlot& slot, size_t number, PyObject* owner, const variable_list& tensors,
              const py::object& launch) {
    RECORD_USER_SCOPE(slot.region);
    fill(slot.fixed, tensors);
    if (named) {
      static PyObject* const name = name_of("launch");
      call(owner, name, py::int_(number), launch);
    } else {
      call(launch);
    }
  }

  const at::Tensor anchor;
  const std::vector<bool> before, after;
  const bool named;
  std::vector<bool> in_flight;
  std::unordered_map<const void*, Copied> copied;  // by the address of the static buffer
};

// The autograd node of a captured span. Parameters are no inputs: they would cost more than the replay.
struct ReplayBackward : torch::autograd::Node, Reader {
  ReplayBackward(std::shared_ptr<StepReplay> step, size_t index, PyObject* owner,
                 const std::vector<bool>& differentiable)
      : step(std::move(step)), index(index), owner(Py_NewRef(owner)), differentiable(differentiable) {}

  ~ReplayBackward() override {
    if (!Py_IsInitialized()) {  // at interpreter exit: leak the Python objects
      owner.release();
      new std::shared_ptr<StepReplay>(std::move(step));
      return;
    }
    const py::gil_scoped_acquire gil;
    step.reset();
    owner.reset();
  }

  std::string name() const override { return "ReplayBackward"; }

  variable_list apply(variable_list&& grads) override {
    const py::gil_scoped_acquire gil;
    variable_list own(num_outputs() - 1);
    if (!step->backward(index, owner.get(), grads, own)) ask_python(grads, own);
    copy_kept(own);
    own.insert(own.begin(), at::Tensor());  // of the anchor
    return own;
  }

  // Only the first writer gets the buffer: later gradients are added to it elsewhere.
  at::Tensor place_of(uint32_t input) override {
    const py::gil_scoped_acquire gil;
    asked.resize(num_inputs());
    if (asked[input]) return {};
    asked[input] = true;
    return step->place_of(index, input);
  }

  std::vector<size_t> kept;  // inputs whose producer may keep the gradient

 private:
  struct Release {
    void operator()(PyObject* object) const { Py_DECREF(object); }
  };

  void ask_python(const variable_list& grads, variable_list& own) const {
    py::list all_grads;
    size_t at = 0;
    for (const bool has : differentiable) {
      const at::Tensor grad = has ? grads[at++] : at::Tensor();
      all_grads.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(grad)));  // None where there is none
    }
    const py::object number = py::int_(index);
    static PyObject* const name = name_of("input_gradients");
    const py::object result = py::reinterpret_steal<py::object>(
        PyObject_CallMethodObjArgs(owner.get(), name, number.ptr(), all_grads.ptr(), nullptr));
    if (!result) raise_python_error();
    size_t i = 0;
    for (const py::handle& each : result) {
      if (!each.is_none()) own[i] = THPVariable_Unpack(each.ptr());
      i++;
    }
  }

  void copy_kept(variable_list& own) const {
    Tensors shared;
    for (const size_t i : kept)
      if (own[i].defined()) shared.push_back(own[i]);
    if (shared.empty()) return;
    const Tensors copies = copies_of(shared);
    size_t at = 0;
    for (const size_t i : kept)
      if (own[i].defined()) own[i] = copies[at++];
  }

  std::shared_ptr<StepReplay> step;
  const size_t index;
  std::vector<bool> asked;  // for each output gradient, whether its buffer was handed out
  std::unique_ptr<PyObject, Release> owner;
  const std::vector<bool> differentiable;
};

// Replays the forward of span `span` of a chunk: returns (hidden tensors, auxiliary outputs), or None to fall back to
// Python. overwritten: gets the addresses of storages that later replays write to.
PyObject* StepReplay::forward(const std::shared_ptr<StepReplay>& self, PyObject* owner, int64_t chunk, int64_t span,
                              PyObject* tensors, PyObject* overwritten) {
  const std::shared_ptr<const ReplayProgram> program = this->program;  // a hook may end the step
  if (!program || next >= program->slots.size()) Py_RETURN_NONE;
  const ReplaySlot& slot = program->slots[next];
  if (slot.kind != Kind::FORWARD || slot.chunk != chunk || slot.span != span) Py_RETURN_NONE;
  const Forward& forward = program->forwards[slot.graph];
  const size_t num_inputs = forward.expected.size();
  if (size_t(PyTuple_GET_SIZE(tensors)) != num_inputs) Py_RETURN_NONE;
  Tensors inputs;
  inputs.reserve(num_inputs);
  for (size_t i = 0; i < num_inputs; i++) {
    PyObject* each = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_Check(each)) Py_RETURN_NONE;
    inputs.push_back(THPVariable_Unpack(each));
    if (!is_ordinary(inputs[i]) || !fits(inputs[i], forward.expected[i]) ||
        inputs[i].device() != slot.fixed[i].device())
      Py_RETURN_NONE;
  }
  const size_t index = next++;
  if (before[slot.graph]) {
    static PyObject* const name = name_of("before_forward");
    call(owner, name, py::int_(index));
  }
  Tensors made;
  {
    const at::NoGradGuard no_grad;
    replay(slot, index, owner, inputs, forward.launch);
    copied.clear();  // what a forward inside of a backward has written raises no version
    made = forward.is_last ? own_copies(forward) : aliases(forward.made);
  }
  in_flight[index] = true;
  aliased = forward.aliased;
  const Handle handle = make_node<ReplayBackward>(self, index, owner, forward.differentiable);
  ReplayBackward& node = static_cast<ReplayBackward&>(*handle);
  torch::autograd::edge_list edges;
  edges.reserve(num_inputs + 1);
  edges.push_back(torch::autograd::impl::gradient_edge(anchor));
  for (size_t i = 0; i < num_inputs; i++) {
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    // A leaf, or a parameter under a view, would keep the gradient without a copy.
    if (forward.may_alias_grads || inputs[i].is_leaf()) node.kept.push_back(i);
  }
  node.set_next_edges(std::move(edges));
  for (size_t i = 0; i < made.size(); i++)
    if (forward.differentiable[i]) torch::autograd::set_history(made[i], handle);
  py::tuple handed_on(forward.num_tensors), others(forward.output_sources.size() - forward.num_tensors);
  size_t at = 0;
  for (size_t i = 0; i < forward.output_sources.size(); i++) {
    const int64_t source = forward.output_sources[i];
    PyObject* each =
        source < 0 ? THPVariable_Wrap(std::move(made[at++])) : Py_NewRef(PyTuple_GET_ITEM(tensors, source));
    if (i < forward.num_tensors) {
      PyTuple_SET_ITEM(handed_on.ptr(), i, each);
    } else {
      PyTuple_SET_ITEM(others.ptr(), i - forward.num_tensors, each);
    }
  }
  if (!forward.is_last) {
    PyObject* same = PyNumber_InPlaceOr(overwritten, forward.storages.ptr());
    if (same == nullptr) raise_python_error();
    Py_DECREF(same);
  }
  return PyTuple_Pack(2, handed_on.ptr(), others.ptr());
}

}  // namespace

PYBIND11_MODULE(_replay, m) {
  m.doc() = "Replay programs of training steps with C++ autograd nodes, and the guard of a model between steps.";
  py::class_<ModelGuard>(m, "ModelGuard")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("dicts"), py::arg("modules"),
           py::arg("tensors"))
      .def("same", &ModelGuard::same)
      .def("same_numbers", &ModelGuard::same_numbers)
      .def("same_modes", &ModelGuard::same_modes);
  py::class_<ReplayProgram, std::shared_ptr<ReplayProgram>>(m, "ReplayProgram")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("forwards"), py::arg("backwards"),
           py::arg("slots"));
  py::class_<StepReplay, std::shared_ptr<StepReplay>>(m, "StepReplay")
      .def(py::init([](const std::shared_ptr<ReplayProgram>& program, at::Tensor anchor, std::vector<bool> before,
                       std::vector<bool> after, bool named) {
             return std::make_shared<StepReplay>(program, std::move(anchor), std::move(before), std::move(after),
                                                 named);
           }),
           py::arg("program"), py::arg("anchor"), py::arg("before"), py::arg("after"), py::arg("named"))
      .def("forward",
           [](const std::shared_ptr<StepReplay>& step, const py::object& owner, int64_t chunk, int64_t span,
              const py::tuple& tensors, const py::set& overwritten) {
             HANDLE_TH_ERRORS
             return py::reinterpret_steal<py::object>(
                 step->forward(step, owner.ptr(), chunk, span, tensors.ptr(), overwritten.ptr()));
             END_HANDLE_TH_ERRORS_PYBIND
           })
      .def("pass_over", &StepReplay::pass_over)
      .def("leave", &StepReplay::leave)
      .def_readonly("next", &StepReplay::next)
      .def_readonly("aliased", &StepReplay::aliased);
}
