// Keys and launches of compiled Triton kernels for fastmp/ops/core/launcher.py, through the CUDA driver API.
//
// The driver is loaded when Triton has compiled the first kernel, so the module is built and imported without CUDA.
// `key` and `launch` run at every launch and are plain C functions of Python: overload resolution and argument
// conversion in pybind11 would take as long as the functions themselves.

#include <dlfcn.h>
#if __has_include(<cuda.h>)
#include <cuda.h>
#endif
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Declarations from cuda.h of the functions used here; a CUresult is an int.
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};
#ifdef CUDA_VERSION
static_assert(sizeof(Config) == sizeof(CUlaunchConfig) &&
              offsetof(Config, grid) == offsetof(CUlaunchConfig, gridDimX) &&
              offsetof(Config, block) == offsetof(CUlaunchConfig, blockDimX) &&
              offsetof(Config, shared) == offsetof(CUlaunchConfig, sharedMemBytes) &&
              offsetof(Config, stream) == offsetof(CUlaunchConfig, hStream) &&
              offsetof(Config, attributes) == offsetof(CUlaunchConfig, attrs) &&
              offsetof(Config, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
#endif
constexpr int kMaxRank = 5;

struct Driver {
  int (*launch)(const Config*, void* function, void** parameters, void** extra);
  int (*encode)(TensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* pitches,
                const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill);
  int (*current_context)(void**);
  int (*set_context)(void*);
  int (*retain_context)(void**, int device);
  int (*exchange_capture_mode)(int* mode);
  int (*parameter)(void* function, size_t index, size_t* offset, size_t* size);  // null before CUDA 12.4
  int (*error_name)(int, const char**);
  int (*error_text)(int, const char**);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) throw std::runtime_error(std::string("launcher: no CUDA driver: ") + dlerror());
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("launcher: the CUDA driver has no ") + name);
    };
    find(launch, "cuLaunchKernelEx");
    find(encode, "cuTensorMapEncodeTiled");
    find(current_context, "cuCtxGetCurrent");
    find(set_context, "cuCtxSetCurrent");
    find(retain_context, "cuDevicePrimaryCtxRetain");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    parameter = reinterpret_cast<decltype(parameter)>(dlsym(library, "cuFuncGetParamInfo"));
    find(error_name, "cuGetErrorName");
    find(error_text, "cuGetErrorString");
  }

  void check(int code, const std::string& kernel) const {
    if (!code) return;
    const char *name, *text;
    if (error_name(code, &name)) name = "an error that it has no name for";
    if (error_text(code, &text)) text = "no more is known";
    throw std::runtime_error(kernel + ": the CUDA driver refuses the launch with " + name + " (" +
                             std::to_string(code) + "): " + text);
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }
PyObject *const kBase = interned("base"), *const kBlockShape = interned("block_shape"),
                *const kCounts = interned("counts"), *const kDataPtr = interned("data_ptr"),
                *const kDtype = interned("dtype"), *const kGetDevice = interned("get_device"),
                *const kNbytes = interned("nbytes"), *const kNumel = interned("numel"),
                *const kPadding = interned("padding"), *const kShape = interned("shape"),
                *const kUntypedStorage = interned("untyped_storage"), *const kSize = interned("size"),
                *const kStride = interned("stride"), *const kStrides = interned("strides");

py::object taken(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

py::object attribute(PyObject* of, PyObject* name) { return taken(PyObject_GetAttr(of, name)); }

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int32_t narrow(int64_t value) {
  if (value != static_cast<int32_t>(value)) throw std::overflow_error("launcher: a number needs more than 32 bits");
  return static_cast<int32_t>(value);
}

uint64_t address_of(PyObject* tensor) {
  const py::object address = taken(PyObject_CallMethodNoArgs(tensor, kDataPtr));
  const uint64_t value = PyLong_AsUnsignedLongLong(address.ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int64_t called(PyObject* object, PyObject* method) {
  return integer(taken(PyObject_CallMethodNoArgs(object, method)).ptr());
}

// The address of a tensor without memory is its offset in a storage that was freed. No allocator returns memory below
// this: whoever finds such an address asks `has_memory`, which takes ten times as long.
constexpr uint64_t kLowestMemory = uint64_t{1} << 33;

bool has_memory(PyObject* tensor) {
  return called(tensor, kNumel) == 0 ||
         called(taken(PyObject_CallMethodNoArgs(tensor, kUntypedStorage)).ptr(), kNbytes);
}

[[noreturn]] void refuse_without_memory(const std::string& kernel, const std::string& argument) {
  throw py::value_error(kernel + ": expected memory for the elements of " + argument +
                        ", got a tensor whose storage was freed (FSDP frees parameters outside of their forward)");
}

int64_t device_of(PyObject* tensor) { return called(tensor, kGetDevice); }

// Items of a list or tuple.
class Items {
 public:
  explicit Items(PyObject* sequence) : items_(taken(PySequence_Fast(sequence, "launcher: no list or tuple"))) {}
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(items_.ptr()); }
  PyObject* operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(items_.ptr(), i); }

 private:
  py::object items_;
};

// Calls `body` and converts its exceptions to Python's.
template <class Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::overflow_error& error) {
    PyErr_SetString(PyExc_OverflowError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Kinds of values in a key. The lowest byte of a value's first word is its kind, which implies the number of words.
enum Kind : uint64_t { kNone, kFloat, kCount, kInteger, kTensor, kDescriptor, kText, kObject };

uint64_t identity(PyObject* object) { return reinterpret_cast<uintptr_t>(object); }

// Adds a tensor of a kernel, its argument `position`.
void add_tensor(std::vector<uint64_t>& key, PyObject* tensor, PyObject* kernel, Py_ssize_t position) {
  const uint64_t address = address_of(tensor);
  if (address < kLowestMemory && !has_memory(tensor)) [[unlikely]] {
    const auto named = py::handle(kernel);
    refuse_without_memory(py::str(named.attr("fn").attr("__name__")),
                          py::str(named.attr("arg_names")[py::int_(position)]));
  }
  key.push_back(kTensor | (address & 15) << 8 | device_of(tensor) << 16);
  key.push_back(identity(attribute(tensor, kDtype).ptr()));
}

void add_argument(std::vector<uint64_t>& key, PyObject* kernel, Py_ssize_t position, PyObject* argument, bool counts,
                  PyTypeObject* descriptor) {
  if (argument == Py_None) {
    key.push_back(kNone);
  } else if (PyLong_CheckExact(argument)) {
    const int64_t value = integer(argument);
    if (counts) {
      key.push_back(kCount | (value != static_cast<int32_t>(value)) << 8);
    } else {
      key.insert(key.end(), {kInteger, static_cast<uint64_t>(value)});
    }
  } else if (PyFloat_CheckExact(argument)) {
    key.push_back(kFloat);
  } else if (Py_TYPE(argument) == descriptor) {
    const py::object base = attribute(argument, kBase), block = attribute(argument, kBlockShape);
    const Items sizes(block.ptr());
    key.push_back(kDescriptor | sizes.size() << 8 | device_of(base.ptr()) << 16);
    key.push_back(identity(attribute(base.ptr(), kDtype).ptr()));
    for (Py_ssize_t i = 0; i < sizes.size(); ++i) key.push_back(integer(sizes[i]));
  } else {
    add_tensor(key, argument, kernel, position);
  }
}

void add_constant(std::vector<uint64_t>& key, PyObject* value) {
  if (PyLong_CheckExact(value)) {
    key.insert(key.end(), {kInteger, static_cast<uint64_t>(integer(value))});
  } else if (PyFloat_CheckExact(value)) {
    key.insert(key.end(), {kFloat, std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value))});
  } else if (PyUnicode_CheckExact(value)) {  // by content: torch's dispatcher makes a new object at each call
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) throw py::error_already_set();
    key.push_back(kText | size << 8);
    const size_t at = key.size();
    key.resize(at + (size + 7) / 8);
    std::memcpy(key.data() + at, text, size);
  } else {
    key.insert(key.end(), {kObject, identity(value)});
  }
}

void expect(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) throw std::runtime_error("launcher: called with " + std::to_string(given) + " arguments");
}

// key(kernel, arguments, constants): bytes. Objects enter by address, so a plan must keep them alive with its key.
PyObject* make_key(PyObject* descriptor, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    expect(count, 3);
    std::vector<uint64_t> key;
    key.reserve(96);
    key.push_back(identity(given[0]));
    const py::object counts = attribute(given[0], kCounts);
    const Items arguments(given[1]), counted(counts.ptr());
    for (Py_ssize_t i = 0; i < std::min(arguments.size(), counted.size()); ++i)
      add_argument(key, given[0], i, arguments[i], counted[i] == Py_True, reinterpret_cast<PyTypeObject*>(descriptor));
    PyObject* value;
    for (Py_ssize_t i = 0; PyDict_Next(given[2], &i, nullptr, &value);) add_constant(key, value);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key.data()), key.size() * sizeof key[0]);
  });
}

// Encoding of a tensor map argument.
struct Descriptor {
  int swizzle, item_size, dtype;
  std::vector<uint32_t> block;  // from the last dimension to the first, as in the driver API
};

struct Plan {
  std::string name;
  void* function;
  int device, architecture;
  unsigned num_threads, shared;
  std::string kinds;
  std::vector<Descriptor> descriptors;
  py::object stream, device_number;
  std::vector<std::pair<Py_ssize_t, int64_t>> limits;  // (argument position, bound); -1 is the number of programs
  py::object refuse;
};

constexpr size_t kMaxParameters = 96, kMaxDescriptors = 8;

// Returns the bytes from a tensor's first element to the end of its last.
int64_t bytes_of(PyObject* tensor, int item_size) {
  const Items sizes(taken(PyObject_CallMethodNoArgs(tensor, kSize)).ptr()),
      strides(taken(PyObject_CallMethodNoArgs(tensor, kStride)).ptr());
  int64_t elements = 1;
  for (Py_ssize_t i = 0; i < sizes.size(); ++i) elements += (integer(sizes[i]) - 1) * integer(strides[i]);
  return elements * item_size;
}

// Storage for the parameters of a launch, and their addresses.
struct Parameters {
  std::array<TensorMap, kMaxDescriptors> maps;
  std::array<uint64_t, kMaxParameters> values;
  std::array<void*, kMaxParameters + kMaxDescriptors> all;
  size_t num_maps = 0, num_values = 0, size = 0;

  template <class T>
  void add(T value) {
    std::memcpy(&values[num_values], &value, sizeof value);
    all[size++] = &values[num_values++];
  }

  void add_descriptor(const Plan& plan, PyObject* argument) {
    const Descriptor& how = plan.descriptors[num_maps];
    const py::object base = attribute(argument, kBase), padding = attribute(argument, kPadding);
    const Items shape(attribute(argument, kShape).ptr()), strides(attribute(argument, kStrides).ptr());
    const uint32_t rank = how.block.size(), steps[kMaxRank] = {1, 1, 1, 1, 1};
    if (shape.size() != rank || strides.size() != rank)
      throw std::runtime_error(plan.name + ": a descriptor has not the rank that the kernel was compiled for");
    uint64_t sizes[kMaxRank], pitches[kMaxRank];
    for (uint32_t i = 0; i < rank; ++i) {
      sizes[rank - 1 - i] = integer(shape[i]);
      pitches[rank - 1 - i] = integer(strides[i]);
    }
    for (uint32_t i = 1; i < rank; ++i) pitches[i] *= how.item_size;
    TensorMap& map = maps[num_maps++];
    const uint64_t start = address_of(base.ptr());
    if (start < kLowestMemory && !has_memory(base.ptr())) [[unlikely]]
      refuse_without_memory(plan.name, "a descriptor");
    void* address = reinterpret_cast<void*>(start);
    const int fill_with_nan = PyUnicode_CompareWithASCIIString(padding.ptr(), "nan") == 0;
    constexpr int kNoInterleave = 0, kPromotionTo128Bytes = 2;
    driver().check(driver().encode(&map, how.dtype, rank, address, sizes, pitches + 1, how.block.data(), steps,
                                   kNoInterleave, how.swizzle, kPromotionTo128Bytes, fill_with_nan),
                   plan.name);
    // On Blackwell, bit 85 lets the TMA unit read up to 128 KiB from the base address, beyond a smaller tensor. Drivers
    // clear it by the shape: not before CUDA 13.2 (release notes of 595.71.05), and wrongly for ragged maps.
    if (plan.architecture >= 100 && bytes_of(base.ptr(), how.item_size) < 128 * 1024)
      map.opaque[1] &= ~(uint64_t{1} << 21);
    all[size++] = &map;
    for (uint32_t i = 0; i < rank; ++i) add(narrow(integer(shape[i])));
    for (uint32_t i = 0; i < rank; ++i) add(integer(strides[i]));
  }

  void add_argument(const Plan& plan, char kind, PyObject* argument) {
    switch (kind) {
      case 'P': return add(address_of(argument));
      case 'i': return add(narrow(integer(argument)));
      case 'q': return add(integer(argument));
      case 'f': return add(static_cast<float>(number(argument)));
      case 'd': return add(number(argument));
      case 'T': return add_descriptor(plan, argument);
    }
  }
};

void enter_context(const Plan& plan) {  // a new thread has no context
  void* context = nullptr;
  driver().check(driver().current_context(&context), plan.name);
  if (context) return;
  driver().check(driver().retain_context(&context, plan.device), plan.name);
  driver().check(driver().set_context(context), plan.name);
}

// launch(programs, arguments) of a plan: check the limits, convert the arguments, launch on the current stream without
// the GIL.
PyObject* launch(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    expect(count, 2);
    const Plan& plan = *static_cast<const Plan*>(PyCapsule_GetPointer(self, nullptr));
    const int32_t programs = narrow(integer(given[0]));
    const Items arguments(given[1]);
    if (static_cast<size_t>(arguments.size()) != plan.kinds.size())
      throw std::runtime_error(plan.name + ": the kernel was compiled for another number of arguments");
    for (const auto& [position, bound] : plan.limits)
      if ((position < 0 ? programs : integer(arguments[position])) > bound) {
        PyObject* const all[] = {given[0], given[1]};
        taken(PyObject_Vectorcall(plan.refuse.ptr(), all, 2, nullptr));
      }
    enter_context(plan);
    Parameters parameters;
    for (Py_ssize_t i = 0; i < arguments.size(); ++i) parameters.add_argument(plan, plan.kinds[i], arguments[i]);
    for (int i = 0; i < 2; ++i) parameters.add(uint64_t{0});  // scratch memory of Triton's kernel and profiler
    if (programs > 0) {
      const py::object stream = taken(PyObject_CallOneArg(plan.stream.ptr(), plan.device_number.ptr()));
      Config config{{static_cast<unsigned>(programs), 1, 1},
                    {plan.num_threads, 1, 1},
                    plan.shared,
                    reinterpret_cast<void*>(integer(stream.ptr())),
                    nullptr,
                    0};
      int code;
      Py_BEGIN_ALLOW_THREADS;  // a launch blocks while the stream's queue is full
      code = driver().launch(&config, plan.function, parameters.all.data(), nullptr);
      Py_END_ALLOW_THREADS;
      driver().check(code, plan.name);
    }
    Py_RETURN_NONE;
  });
}

PyMethodDef definition(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef key_definition = definition("key", make_key), launch_definition = definition("launch", launch);

py::object launch_keys(const py::object& descriptor) {
  return taken(PyCFunction_New(&key_definition, descriptor.ptr()));
}

// Returns true if the driver reports exactly the parameters that a launch passes; `unasked` if the driver is too old to
// report them.
bool parameters_match(const Plan& plan, bool unasked) {
  if (!driver().parameter) return unasked;
  std::vector<size_t> sizes;
  auto descriptor = plan.descriptors.begin();
  for (const char kind : plan.kinds) {
    if (kind == 'T') {
      const size_t rank = (descriptor++)->block.size();
      sizes.push_back(sizeof(TensorMap));
      sizes.insert(sizes.end(), rank, sizeof(int32_t));
      sizes.insert(sizes.end(), rank, sizeof(int64_t));
    } else if (kind != '-') {
      sizes.push_back(kind == 'i' || kind == 'f' ? 4 : 8);
    }
  }
  sizes.insert(sizes.end(), 2, sizeof(void*));  // scratch memory
  size_t offset, size;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (driver().parameter(plan.function, i, &offset, &size) || size != sizes[i]) return false;
  return driver().parameter(plan.function, sizes.size(), &offset, &size) != 0;
}

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

int exchange_capture_mode(int mode) {
  driver().check(driver().exchange_capture_mode(&mode), "launcher");
  return mode;
}

py::object planned(std::string name, uintptr_t function, int device, int architecture, int num_warps, int shared,
                   std::string kinds, const std::vector<std::tuple<int, int, int, std::vector<uint32_t>>>& descriptors,
                   py::object stream, bool unasked, std::vector<std::pair<Py_ssize_t, int64_t>> limits,
                   py::object refuse) {
  auto plan = std::make_unique<Plan>(Plan{std::move(name),
                                          reinterpret_cast<void*>(function),
                                          device,
                                          architecture,
                                          32u * num_warps,
                                          static_cast<unsigned>(shared),
                                          std::move(kinds),
                                          {},
                                          std::move(stream),
                                          py::int_(device),
                                          std::move(limits),
                                          std::move(refuse)});
  size_t num_values = plan->kinds.size() + 2;
  for (const auto& [swizzle, item_size, dtype, block] : descriptors) {
    if (block.empty() || block.size() > kMaxRank)
      throw std::invalid_argument(plan->name + ": a descriptor has 1 to 5 dimensions");
    plan->descriptors.push_back({swizzle, item_size, dtype, {block.rbegin(), block.rend()}});
    num_values += 2 * block.size();
  }
  if (num_values > kMaxParameters || descriptors.size() > kMaxDescriptors)
    throw std::invalid_argument(plan->name + ": the kernel has more parameters than a plan holds");
  if (!parameters_match(*plan, unasked)) return py::none();
  const py::capsule owner(plan.release(), [](void* plan) { delete static_cast<Plan*>(plan); });
  return taken(PyCFunction_New(&launch_definition, owner.ptr()));
}

}  // namespace

void add_launches(py::module_& m) {
  m.attr("RELAXED") = kRelaxed;
  m.def("exchange_capture_mode", &exchange_capture_mode, py::arg("mode"),
        "Set this thread's stream capture mode and return the previous one.");
  m.def("launch_keys", &launch_keys, py::arg("descriptor"),
        "Return key(kernel, arguments, constants); `descriptor` is the class of tensor descriptors.");
  m.def("planned", &planned, py::arg("name"), py::arg("function"), py::arg("device"), py::arg("architecture"),
        py::arg("num_warps"), py::arg("shared"), py::arg("kinds"), py::arg("descriptors"), py::arg("stream"),
        py::arg("unasked"), py::arg("limits"), py::arg("refuse"),
        "Return launch(programs, arguments) for a loaded function, or None if its parameters do not match.\n\n"
        "unasked: the result of the comparison where the driver (before CUDA 12.4) cannot report parameters.\n"
        "kinds: a letter per argument: P pointer, i int32, q int64, f float, d double, T tensor map, - none.\n"
        "descriptors: (swizzle, itemsize, dtype number of the driver, block) of each tensor map.\n"
        "limits: (position, bound) of arguments, and of the number of programs at -1; beyond one, a launch calls\n"
        "refuse(programs, arguments), which raises.\n"
        "stream: function of the device number, called at each launch.");
}
