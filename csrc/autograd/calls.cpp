// Calls of ops from Python, as the Python module that this library is.
//
// OpOverload._op, torch's own way into the dispatcher, examines each argument for overloads and overrides: 4 us for an
// op of 11 arguments, which is more than many kernels take on the host. Ops are registered once and have no overloads,
// so `caller(name, otherwise)` reads plain tensors and numbers by the schema, and hands any other call to `otherwise`.
//
// `signature(*arguments)` is the key of a memoized check: properties of three tensors cost Python 3 us, and here 0.3
// us.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using c10::TypeKind;
using torch::jit::Stack;

struct Argument {
  TypeKind kind;
  bool optional;
  std::optional<IValue> value;  // the default
};

class Caller {
 public:
  Caller(c10::OperatorHandle op, PyObject* otherwise) : op_(op), otherwise_(Py_NewRef(otherwise)) {
    for (const auto& result : op.schema().returns())
      TORCH_CHECK(result.type()->kind() == TypeKind::TensorType, op.schema(), ": expected tensors to return");
    for (const auto& argument : op.schema().arguments()) {
      TORCH_CHECK(!argument.kwarg_only(), op.schema(), ": expected arguments by position");
      const auto optional = argument.type()->cast<c10::OptionalType>();
      const auto type = optional ? optional->getElementType() : argument.type();
      arguments_.push_back({type->kind(), optional != nullptr, argument.default_value()});
    }
  }
  ~Caller() { Py_DECREF(otherwise_); }

  PyObject* operator()(PyObject* const* given, size_t count) const {
    Stack stack;
    stack.reserve(arguments_.size());
    if (!read(given, count, stack)) return PyObject_Vectorcall(otherwise_, given, count, nullptr);
    HANDLE_TH_ERRORS {
      pybind11::gil_scoped_release others_run;
      op_.callBoxed(stack);
    }
    return result(stack);
    END_HANDLE_TH_ERRORS
  }

 private:
  // Copies the arguments to `stack`; returns false if one is missing or not plain, or if a mode of torch must see them.
  bool read(PyObject* const* given, size_t count, Stack& stack) const {
    if (count > arguments_.size() || at::impl::torch_function_mode_enabled()) return false;
    for (size_t i = 0; i < count; ++i)
      if (!push(given[i], arguments_[i], stack)) return false;
    for (size_t i = count; i < arguments_.size(); ++i) {
      if (!arguments_[i].value) return false;
      stack.push_back(*arguments_[i].value);
    }
    return true;
  }

  static bool push(PyObject* given, const Argument& argument, Stack& stack) {
    if (given == Py_None) {
      if (!argument.optional) return false;
      stack.emplace_back();
      return true;
    }
    switch (argument.kind) {
      case TypeKind::TensorType:
        if (!THPVariable_CheckTypeExact(Py_TYPE(given))) return false;
        stack.emplace_back(THPVariable_Unpack(given));
        return true;
      case TypeKind::IntType: {
        int overflow = 0;
        if (!PyLong_CheckExact(given)) return false;
        stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(given, &overflow)));
        return overflow == 0;
      }
      case TypeKind::FloatType: {
        if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
        const double value = PyFloat_AsDouble(given);
        if (PyErr_Occurred()) return PyErr_Clear(), false;  // an integer beyond them
        stack.emplace_back(value);
        return true;
      }
      case TypeKind::BoolType:
        if (!PyBool_Check(given)) return false;
        stack.emplace_back(given == Py_True);
        return true;
      case TypeKind::StringType: {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &size) : nullptr;
        if (text == nullptr) return PyErr_Clear(), false;
        stack.emplace_back(std::string(text, size));
        return true;
      }
      default: return false;
    }
  }

  static PyObject* result(const Stack& stack) {
    if (stack.empty()) Py_RETURN_NONE;
    if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
    THPObjectPtr tuple(PyTuple_New(stack.size()));
    for (size_t i = 0; tuple && i < stack.size(); ++i) {
      PyObject* output = THPVariable_Wrap(stack[i].toTensor());
      if (output == nullptr) return nullptr;
      PyTuple_SET_ITEM(tuple.get(), i, output);
    }
    return tuple.release();
  }

  const c10::OperatorHandle op_;
  PyObject* const otherwise_;
  std::vector<Argument> arguments_;
};

constexpr const char* kCaller = "fastmp.caller";

Caller* caller_of(PyObject* capsule) { return static_cast<Caller*>(PyCapsule_GetPointer(capsule, kCaller)); }

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) { return (*caller_of(self))(given, count); }

PyMethodDef kCall = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr};

PyObject* caller(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  PyObject* otherwise = nullptr;
  if (!PyArg_ParseTuple(arguments, "sO", &name, &otherwise)) return nullptr;
  auto made = std::make_unique<Caller>(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), otherwise);
  PyObject* capsule = PyCapsule_New(made.get(), kCaller, [](PyObject* self) { delete caller_of(self); });
  if (capsule == nullptr) return nullptr;
  made.release();
  PyObject* function = PyCFunction_New(&kCall, capsule);
  Py_DECREF(capsule);
  return function;
  END_HANDLE_TH_ERRORS
}

// Returns the arguments as a tuple, and at its end, as bytes, the place, dtype, device and shape of each tensor, in
// place of which there is None. Returns None if a tensor is not plain: a subclass, nested, or of symbolic sizes.
PyObject* signature(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  THPObjectPtr key(PyTuple_New(count + 1));
  if (!key) return nullptr;
  std::vector<int64_t> described;
  described.reserve(8 * count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* argument = given[i];
    PyTypeObject* type = Py_TYPE(argument);
    if (THPVariable_CheckTypeExact(type)) {
      const at::Tensor& tensor = THPVariable_Unpack(argument);
      if (tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) Py_RETURN_NONE;
      const c10::Device device = tensor.device();
      const int64_t kind =
          int64_t(tensor.scalar_type()) << 24 | int64_t(device.type()) << 16 | uint16_t(device.index());
      described.push_back(int64_t(i) << 48 | tensor.dim() << 32 | kind);
      for (int64_t size : tensor.sizes()) described.push_back(size);
      argument = Py_None;
    } else if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
      Py_RETURN_NONE;
    }
    PyTuple_SET_ITEM(key.get(), i, Py_NewRef(argument));
  }
  const auto* bytes = reinterpret_cast<const char*>(described.data());
  PyObject* tensors = PyBytes_FromStringAndSize(bytes, described.size() * sizeof(int64_t));
  if (tensors == nullptr) return nullptr;
  PyTuple_SET_ITEM(key.get(), count, tensors);
  return key.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef kFunctions[] = {
    {"caller", caller, METH_VARARGS,
     "caller(name, otherwise): return a function that calls op `name` with plain arguments, else `otherwise`."},
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(signature)), METH_FASTCALL,
     "signature(*arguments): return a hashable key of plain tensors and other arguments, or None."},
    {},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_C_autograd",
                       "Calls and derivatives of ops.",
                       -1,
                       kFunctions,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_autograd() { return PyModule_Create(&kModule); }
