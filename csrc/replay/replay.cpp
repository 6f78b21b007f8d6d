// The module _replay: replays the graphs of a training step from a flat program, with a node of autograd for each
// forward. No Python runs on the way but what launches a graph and what is hooked to it.
//
// It decides nothing: whatever differs from the program is left to fastmp/cuda_graphs/executor.py, which goes on from there or
// says what is wrong. So each function here answers None, or asks Python, where it does not know what to do. Whether a
// model is as it was is asked before each step, so that is here, too.
//
// It uses torch's C++ interfaces of autograd and of Python, which have no stable ABI: it serves the torch, and the
// Python, that it was compiled for.
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
#include "replay/watch.h"

namespace {

using namespace fastmp;
using torch::autograd::variable_list;

[[noreturn]] void raise_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// For its effect.
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

// Whether its values lie in memory as its strides say, and autograd does nothing else with it.
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

// Whether a backward is under way that is for all tensors alike: some may be asked for alone.
bool is_for_all() {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  return asked && asked->empty();
}

// One training step: where it stands in its program.
class Step {
 public:
  // before, after: for each graph of a forward, of a backward, whether Python is called beside its replay.
  // named: whether each replay goes through Python, which gives it a name for Nsight.
  Step(std::shared_ptr<const Program> program, at::Tensor anchor, std::vector<bool> before, std::vector<bool> after,
       bool named)
      : program(std::move(program)),
        anchor(std::move(anchor)),
        before(std::move(before)),
        after(std::move(after)),
        named(named),
        in_flight(this->program->slots.size()) {}

  PyObject* forward(const std::shared_ptr<Step>& self, PyObject* owner, int64_t chunk, int64_t run, PyObject* tensors,
                    PyObject* overwritten);

  // The gradients of the inputs of a forward; false where Python has to see to it.
  bool backward(size_t index, PyObject* owner, const variable_list& grads, variable_list& own) {
    const std::shared_ptr<const Program> program = this->program;  // a hook may end the step
    if (!program || at::GradMode::is_enabled() || !in_flight[index] || next >= program->slots.size()) return false;
    const Forward& forward = program->forwards[program->slots[index].graph];
    if (!forward.reached) {
      bool any = false;
      for (const at::Tensor& grad : grads) any |= grad.defined();
      if (!any) return true;
    }
    const Slot& slot = program->slots[next];
    if (slot.kind != Kind::BACKWARD || slot.forward != index) return false;
    if (forward.trained && !is_for_all()) return false;
    const Backward& backward = program->backwards[slot.graph];
    for (size_t i = 0; i < grads.size(); i++) {
      const at::Tensor& grad = grads[i];
      if (grad.defined() != backward.given[i] || (grad.defined() && !is_ordinary(grad))) return false;
      if (slot.in_place[i] && !(grad.defined() && lies_in(grad, slot.fixed[i]))) return false;
    }
    const size_t number = next++;
    in_flight[index] = false;
    replay(slot, number, owner, grads, backward.launch);
    forget_copied(backward.gradients);
    if (after[slot.graph]) {
      static PyObject* const name = name_of("after");
      call(owner, name, py::int_(number), py::int_(index));
    }
    for (size_t i = 0; i < backward.gradients.size(); i++)
      if (backward.gradients[i].defined()) own[i] = on_same_memory(backward.gradients[i]);
    return true;
  }

  // Where gradient `input` of the forward `index` is read by the next replay, if that is its backward: until then
  // nobody else uses the place. Whoever asks for the gradient itself, or gets it outside of the chain, may keep it.
  at::Tensor place_of(size_t index, size_t input) const {
    if (!program || !in_flight[index] || next >= program->slots.size()) return {};
    const Slot& slot = program->slots[next];
    if (slot.kind != Kind::BACKWARD || slot.forward != index || slot.in_place[input]) return {};
    if (program->forwards[program->slots[index].graph].leaves || !is_for_all()) return {};
    return program->backwards[slot.graph].given[input] ? on_same_memory(slot.fixed[input]) : at::Tensor();
  }

  void pass_over() { next++; }

  // Ends the step as far as this program goes; returns the forwards whose backward has not begun.
  std::vector<size_t> leave() {
    std::vector<size_t> left;
    for (size_t i = 0; i < in_flight.size(); i++)
      if (in_flight[i]) left.push_back(i);
    program.reset();
    return left;
  }

  size_t next = 0;
  bool aliased = false;  // of the last forward

  std::shared_ptr<const Program> program;

 private:
  // A number that a backward has copied: whence, and how often both places had been written to by then.
  struct Copied {
    int task;
    at::Tensor from;
    int64_t into_version, from_version;
  };

  // Copies what does not lie there yet into static buffers. A tensor that is not there is left out.
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
        copied.insert_or_assign(into[i].const_data_ptr(), Copied{task, from[i], into[i]._version(), from[i]._version()});
  }

  static Tensors aliases(const Tensors& tensors) {
    Tensors made;
    for (const at::Tensor& each : tensors) made.push_back(on_same_memory(each));
    return made;
  }

  static Tensors own_copies(const Forward& forward) {
    Tensors from, made;
    for (size_t i = 0; i < forward.made.size(); i++)
      if (forward.copied[i]) from.push_back(forward.made[i]);
    const Tensors copies = copies_of(from);
    for (size_t i = 0, at = 0; i < forward.made.size(); i++)
      made.push_back(forward.copied[i] ? copies[at++] : on_same_memory(forward.made[i]));
    return made;
  }

  static bool is_number(const at::Tensor& into, const at::Tensor& from) {
    return into.dim() == 0 && !is_lazy(from) && !from.is_inference();
  }

  // Whether this backward has copied the same number there: layers share the gradient of their auxiliary losses.
  bool was_copied(const at::Tensor& into, const at::Tensor& from) const {
    if (!is_number(into, from)) return false;
    const auto found = copied.find(into.const_data_ptr());
    if (found == copied.end()) return false;
    const Copied& last = found->second;
    return last.task == torch::autograd::get_current_graph_task_id() && last.into_version == into._version() &&
           last.from.is_alias_of(from) && last.from.const_data_ptr() == from.const_data_ptr() &&
           last.from_version == from._version();
  }

  // Forgets numbers in memory that a replay has written to, which raises no version.
  void forget_copied(const Tensors& written) {
    std::erase_if(copied, [&](const auto& each) {
      return std::any_of(written.begin(), written.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_alias_of(each.second.from);
      });
    });
  }

  void replay(const Slot& slot, size_t number, PyObject* owner, const variable_list& tensors,
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

// A run between the tensors of a step. Parameters are no inputs: they would cost more than the replay.
struct ReplayBackward : torch::autograd::Node, Reader {
  ReplayBackward(std::shared_ptr<Step> step, size_t index, PyObject* owner, const std::vector<bool>& differentiable)
      : step(std::move(step)), index(index), owner(Py_NewRef(owner)), differentiable(differentiable) {}

  ~ReplayBackward() override {
    if (!Py_IsInitialized()) {  // what Python made, it cannot take back any more
      owner.release();
      new std::shared_ptr<Step>(std::move(step));
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

  // Only the first that asks is told: what comes later is added to its gradient, elsewhere.
  at::Tensor place_of(uint32_t input) override {
    const py::gil_scoped_acquire gil;
    asked.resize(num_inputs());
    if (asked[input]) return {};
    asked[input] = true;
    return step->place_of(index, input);
  }

  std::vector<size_t> kept;  // inputs whose gradient is kept by what made them

 private:
  struct Release {
    void operator()(PyObject* object) const { Py_DECREF(object); }
  };

  void ask_python(const variable_list& grads, variable_list& own) const {
    py::list given;
    size_t at = 0;
    for (const bool has : differentiable) {
      const at::Tensor grad = has ? grads[at++] : at::Tensor();
      given.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(grad)));  // None where there is none
    }
    const py::object number = py::int_(index);
    static PyObject* const name = name_of("gradients");
    const py::object result = py::reinterpret_steal<py::object>(
        PyObject_CallMethodObjArgs(owner.get(), name, number.ptr(), given.ptr(), nullptr));
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

  std::shared_ptr<Step> step;
  const size_t index;
  std::vector<bool> asked;  // for each gradient, whether its place has been asked for
  std::unique_ptr<PyObject, Release> owner;
  const std::vector<bool> differentiable;
};

// The tensors that run `run` of a chunk hands on, and what it returns besides; None where Python has to see to it.
// overwritten: gets the addresses of storages that later replays write to.
PyObject* Step::forward(const std::shared_ptr<Step>& self, PyObject* owner, int64_t chunk, int64_t run,
                        PyObject* tensors, PyObject* overwritten) {
  const std::shared_ptr<const Program> program = this->program;  // a hook may end the step
  if (!program || next >= program->slots.size()) Py_RETURN_NONE;
  const Slot& slot = program->slots[next];
  if (slot.kind != Kind::FORWARD || slot.chunk != chunk || slot.run != run) Py_RETURN_NONE;
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
    static PyObject* const name = name_of("before");
    call(owner, name, py::int_(index));
  }
  Tensors made;
  {
    const at::NoGradGuard no_grad;
    replay(slot, index, owner, inputs, forward.launch);
    copied.clear();  // what a forward inside of a backward has written raises no version
    made = forward.leaves ? own_copies(forward) : aliases(forward.made);
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
    // A leaf, or a parameter behind a view, would keep the gradient as its own.
    if (forward.kept || inputs[i].is_leaf()) node.kept.push_back(i);
  }
  node.set_next_edges(std::move(edges));
  for (size_t i = 0; i < made.size(); i++)
    if (forward.differentiable[i]) torch::autograd::set_history(made[i], handle);
  py::tuple handed_on(forward.num_tensors), others(forward.outputs.size() - forward.num_tensors);
  size_t at = 0;
  for (size_t i = 0; i < forward.outputs.size(); i++) {
    const int64_t given = forward.outputs[i];
    PyObject* each = given < 0 ? THPVariable_Wrap(std::move(made[at++])) : Py_NewRef(PyTuple_GET_ITEM(tensors, given));
    if (i < forward.num_tensors) {
      PyTuple_SET_ITEM(handed_on.ptr(), i, each);
    } else {
      PyTuple_SET_ITEM(others.ptr(), i - forward.num_tensors, each);
    }
  }
  if (!forward.leaves) {
    PyObject* same = PyNumber_InPlaceOr(overwritten, forward.places.ptr());
    if (same == nullptr) raise_python_error();
    Py_DECREF(same);
  }
  return PyTuple_Pack(2, handed_on.ptr(), others.ptr());
}

}  // namespace

PYBIND11_MODULE(_replay, m) {
  m.doc() = "Replays of graphs by a flat program, with nodes of autograd in C++; what is checked before a step.";
  m.attr("torch_version") = TORCH_VERSION;
  py::class_<Watch>(m, "Watch")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("dicts"), py::arg("modes"),
           py::arg("tensors"))
      .def("same", &Watch::same)
      .def("same_modes", &Watch::same_modes);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<const py::list&, const py::list&, const py::list&>(), py::arg("forwards"), py::arg("backwards"),
           py::arg("slots"));
  py::class_<Step, std::shared_ptr<Step>>(m, "Step")
      .def(py::init([](const std::shared_ptr<Program>& program, at::Tensor anchor, std::vector<bool> before,
                       std::vector<bool> after, bool named) {
             return std::make_shared<Step>(program, std::move(anchor), std::move(before), std::move(after), named);
           }),
           py::arg("program"), py::arg("anchor"), py::arg("before"), py::arg("after"), py::arg("named"))
      .def("forward",
           [](const std::shared_ptr<Step>& step, const py::object& owner, int64_t chunk, int64_t run,
              const py::tuple& tensors, const py::set& overwritten) {
             HANDLE_TH_ERRORS
             return py::reinterpret_steal<py::object>(
                 step->forward(step, owner.ptr(), chunk, run, tensors.ptr(), overwritten.ptr()));
             END_HANDLE_TH_ERRORS_PYBIND
           })
      .def("pass_over", &Step::pass_over)
      .def("leave", &Step::leave)
      .def_readonly("next", &Step::next)
      .def_readonly("aliased", &Step::aliased);
}
