// Guards a model between steps: detects replaced or moved state by identity; see fastmp/cuda_graphs/snapshot.py.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace fastmp {

namespace py = pybind11;

// It owns no references, so that the garbage collector sees all of them: the caller keeps every argument alive.
class ModelGuard {
 public:
  // dicts: each with a copy of what is in it. modules: the attributes of each, its mode, and its numbers. tensors:
  // each with its attributes and its main gradient or None.
  ModelGuard(const py::list& dicts, const py::list& modules, const py::list& tensors) {
    for (const py::handle& each : dicts) {
      const auto [dict, copy] = pair_of(each);
      this->dicts.push_back({dict, PyDict_GET_SIZE(copy)});
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(copy, &at, &key, &value);) entries.push_back({key, value});
    }
    for (const py::handle& each : modules) {
      const auto row = py::reinterpret_borrow<py::tuple>(each);
      PyObject *attributes = PyTuple_GET_ITEM(row.ptr(), 0), *own = PyTuple_GET_ITEM(row.ptr(), 2);
      this->modules.push_back({attributes, PyTuple_GET_ITEM(row.ptr(), 1), PyDict_GET_SIZE(attributes)});
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(own, &at, &key, &value);) numbers.push_back({attributes, key, value});
    }
    for (const py::handle& each : tensors) {
      const auto row = py::reinterpret_borrow<py::tuple>(each);
      PyObject *tensor = PyTuple_GET_ITEM(row.ptr(), 0), *main = PyTuple_GET_ITEM(row.ptr(), 2);
      if (main == Py_None) main = nullptr;
      this->tensors.push_back({tensor, PyTuple_GET_ITEM(row.ptr(), 1), main, hooks_of(tensor), later_hooks_of(tensor),
                               address_of(tensor), main ? address_of(main) : nullptr,
                               THPVariable_Unpack(tensor).requires_grad()});
    }
  }

  // True if the numbers of each module are unchanged. The size of its attributes shows those that are new.
  bool same_numbers() const {
    for (const Module& each : modules)
      if (PyDict_GET_SIZE(each.attributes) != each.size) return false;
    for (const Number& each : numbers)
      if (PyDict_GetItemWithError(each.attributes, each.key) != each.value) return false;
    return true;
  }

  // True if the mode and the numbers of each module and `requires_grad` of each tensor are unchanged.
  bool same_modes() const {
    for (const Held& each : tensors)
      if (THPVariable_Unpack(each.tensor).requires_grad() != each.needs) return false;
    return same_training() && same_numbers();
  }

  // True if modes, numbers, the objects in all dicts, and the addresses of all tensors and main gradients are
  // unchanged.
  bool same() const {
    size_t at = 0;
    for (const Dict& each : dicts) {
      if (PyDict_GET_SIZE(each.dict) != each.size) return false;
      Py_ssize_t place = 0;
      for (const size_t end = at + each.size; at < end; at++) {
        PyObject *key, *value;
        PyDict_Next(each.dict, &place, &key, &value);
        if (key != entries[at].key || value != entries[at].value) return false;
      }
    }
    static PyObject* const name = PyUnicode_InternFromString("main_grad");
    for (const Held& each : tensors) {
      if (address_of(each.tensor) != each.address || hooks_of(each.tensor) != each.hooks ||
          later_hooks_of(each.tensor) != each.later_hooks ||
          THPVariable_Unpack(each.tensor).requires_grad() != each.needs)
        return false;
      PyObject* main = PyDict_GetItemWithError(each.attributes, name);
      if (main == Py_None) main = nullptr;
      if (main != each.main || (main && address_of(main) != each.main_address)) return false;
    }
    return same_training() && same_numbers();
  }

 private:
  struct Dict {
    PyObject* dict;
    Py_ssize_t size;
  };
  struct Entry {
    PyObject *key, *value;
  };
  struct Module {
    PyObject *attributes, *mode;
    Py_ssize_t size;
  };
  struct Number {
    PyObject *attributes, *key, *value;
  };
  struct Held {
    PyObject *tensor, *attributes, *main, *hooks, *later_hooks;
    const void *address, *main_address;
    bool needs;
  };

  bool same_training() const {
    static PyObject* const name = PyUnicode_InternFromString("training");
    for (const Module& each : modules)
      if (PyDict_GetItemWithError(each.attributes, name) != each.mode) return false;
    return true;
  }

  static std::pair<PyObject*, PyObject*> pair_of(const py::handle& each) {
    return {PyTuple_GET_ITEM(each.ptr(), 0), PyTuple_GET_ITEM(each.ptr(), 1)};
  }

  static PyObject* hooks_of(PyObject* tensor) { return reinterpret_cast<THPVariable*>(tensor)->backward_hooks; }

  // Hooks after the accumulation of the gradient.
  static PyObject* later_hooks_of(PyObject* tensor) {
    return reinterpret_cast<THPVariable*>(tensor)->post_accumulate_grad_hooks;
  }

  static const void* address_of(PyObject* object) {
    const at::TensorImpl* tensor = THPVariable_Unpack(object).unsafeGetTensorImpl();
    if (!tensor->has_storage()) return nullptr;
    const char* base = static_cast<const char*>(tensor->unsafe_storage().data());
    return base + tensor->storage_offset() * static_cast<int64_t>(tensor->itemsize());
  }

  std::vector<Dict> dicts;
  std::vector<Entry> entries;  // of all dicts, one after the other
  std::vector<Module> modules;
  std::vector<Number> numbers;  // of all modules, one after the other
  std::vector<Held> tensors;
};

}  // namespace fastmp
