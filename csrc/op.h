// Registration of kernels with the checks common to all ops, and errors that name the op.
//
// Raw calls of torch.ops.fastmp.* bypass the checks of fastmp/ops. `FASTMP_IMPL` checks that tensors are on the
// kernel's device, have memory and do not overlap, and that numbers are finite; kernels themselves check shapes, dtypes
// and indices.
#pragma once

#include "stable.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

// Torch's message for the last error in this thread, which its C interface does not return. Null before torch 2.13.
extern "C" __attribute__((weak, visibility("default"))) const char* torch_exception_get_what_without_backtrace();

namespace fastmp {

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// Returns e.g. "Float (2, 3)".
inline std::string described(const Tensor& tensor) {
  std::string text = message(dtype_name(tensor.scalar_type()), " (");
  const auto sizes = tensor.sizes();
  for (size_t dim = 0; dim < sizes.size(); ++dim) text += (dim ? ", " : "") + std::to_string(sizes[dim]);
  return text + ")";
}

// Checks that `tensor` has the dtype and sizes of `like`; the names are for the message.
inline void check_same(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                       const Tensor& like) {
  FASTMP_CHECK(tensor.scalar_type() == like.scalar_type() && same_sizes(tensor, like), op, ": ", like_name, " is ",
               described(like), " but ", name, " is ", described(tensor));
}

// Checks that `bias`, if present, has one element of x's dtype per column of x.
inline void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& x) {
  FASTMP_CHECK(
      !bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 1 && bias->size(0) == x.size(x.dim() - 1)), op,
      ": x is ", described(x), ", which does not fit a bias of ", described(*bias));
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto x = a.strides(), y = b.strides();
  return a.scalar_type() == b.scalar_type() && same_sizes(a, b) && std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// The memory of a tensor: bytes [begin, end). `distinct`: no two elements share memory; `gapless`: they also fill it.
struct Extent {
  const char *begin, *end;
  bool distinct, gapless;

  explicit Extent(const Tensor& tensor) {
    const auto itemsize = static_cast<int64_t>(tensor.element_size());
    std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) != 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(dims.begin(), dims.end());
    int64_t span = 1;  // elements from the first to the last of the dimensions so far
    distinct = true;
    for (const auto& [stride, size] : dims) {
      distinct = distinct && stride >= span;
      span += (size - 1) * stride;
    }
    const int64_t numel = tensor.numel();
    begin = static_cast<const char*>(tensor.const_data_ptr());
    end = numel == 0 ? begin : begin + span * itemsize;
    distinct = distinct || numel == 0;
    gapless = distinct && end - begin == numel * itemsize;
  }
};

// Returns true if the byte ranges of two tensors intersect.
inline bool overlaps(const Tensor& a, const Tensor& b) {
  const Extent x(a), y(b);
  return x.begin < y.end && y.begin < x.end;
}

// Names of the arguments of each op, for messages. fastmp/ops/core/registry.py hands them over: schemas are not part of
// the stable ABI.
inline std::map<std::string, std::vector<std::string>>& argument_names() {
  static std::map<std::string, std::vector<std::string>> names;
  return names;
}

inline std::string argument_name(const char* op, size_t position) {
  const auto found = argument_names().find(op);
  const bool known = found != argument_names().end() && position < found->second.size();
  return known ? found->second[position] : message("argument ", position);
}

inline int64_t storage_bytes(const Tensor& tensor) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes;
}

// Returns true if the storage holds all elements: not if it was freed or shrunk (`untyped_storage().resize_`).
inline bool has_memory(const Tensor& tensor) {
  const int64_t numel = tensor.numel();
  if (numel == 0) return true;
  int64_t end = tensor.storage_offset() + numel;  // in elements
  if (!tensor.is_contiguous()) [[unlikely]] {
    end -= numel - 1;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) end += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return end * static_cast<int64_t>(tensor.element_size()) <= storage_bytes(tensor);
}

// An argument of an op, and whether the op writes to it.
struct Argument {
  const Tensor* tensor = nullptr;  // null if it is None or not a tensor
  bool written = false;
};

// Checks the tensors of an op:
//   1. All are on the kernel's device.
//   2. All have memory for their elements.
//   3. A written tensor has distinct elements (it is not expanded).
//   4. A written tensor shares no memory with another one, unless that is the same view and not written.
// As in torch, tensors with gaps that interleave are not examined further.
inline void check_tensors(const char* op, const Argument* arguments, size_t count) {
#ifdef __CUDACC__
  constexpr const char* kDevice = "one CUDA device";
  const Tensor* first = nullptr;
  for (size_t i = 0; i < count && !first; ++i) first = arguments[i].tensor;
  const auto here = [&](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == first->get_device_index();
  };
#else
  constexpr const char* kDevice = "the CPU";
  const auto here = [](const Tensor& tensor) { return tensor.is_cpu(); };
#endif
  bool writes = false;
  for (size_t i = 0; i < count; ++i) {
    if (!arguments[i].tensor) continue;
    const Tensor& tensor = *arguments[i].tensor;
    FASTMP_CHECK(tensor.defined(), op, ": expected ", argument_name(op, i), " to be a tensor, got None");
    FASTMP_CHECK(here(tensor), op, ": all tensors must be on ", kDevice, ", but ", argument_name(op, i), " is not");
    FASTMP_CHECK(has_memory(tensor), op, ": expected memory for all elements of ", argument_name(op, i), " ",
                 described(tensor), ", got a storage of ", storage_bytes(tensor),
                 " bytes, freed or shrunk after the tensor was made (FSDP frees parameters outside of their forward)");
    writes |= arguments[i].written;
  }
  for (size_t i = 0; writes && i < count; ++i) {
    if (!arguments[i].written) continue;
    const Tensor& out = *arguments[i].tensor;
    const Extent mine(out);
    FASTMP_CHECK(mine.distinct, op, ": ", argument_name(op, i),
                 " is written to, but several of its elements may lie in one place (an expanded tensor?); pass a copy");
    for (size_t j = 0; j < count; ++j) {
      if (j == i || !arguments[j].tensor) continue;
      const Tensor& other = *arguments[j].tensor;
      const Extent its(other);
      if (mine.end <= its.begin || its.end <= mine.begin || !mine.gapless || !its.gapless) continue;
      const bool same = mine.begin == its.begin && mine.end == its.end && same_layout(out, other);
      FASTMP_CHECK(same && !arguments[j].written, op, ": ", argument_name(op, i),
                   " is written to, but shares memory with ", argument_name(op, j), "; pass a copy of one");
    }
  }
}

inline Argument argument_of(const Tensor& tensor, bool written) { return {&tensor, written}; }
inline Argument argument_of(const std::optional<Tensor>& tensor, bool written) {
  return tensor ? Argument{&*tensor, written} : Argument{};
}
template <class Other>
Argument argument_of(const Other&, bool) {
  return {};
}

// Checks that a number is finite in the dtype of arithmetic: float64 if a tensor of the op has it, else float32.
inline void check_number(const char* op, size_t position, double value, const Argument* arguments, size_t count) {
  if (std::abs(value) <= std::numeric_limits<float>::max()) [[likely]]
    return;
  const bool wide = std::any_of(arguments, arguments + count, [](const Argument& each) {
    return each.tensor && each.tensor->scalar_type() == ScalarType::Double;
  });
  FASTMP_CHECK(wide && std::isfinite(value), op, ": expected ", argument_name(op, position), " to be finite in ",
               wide ? "float64" : "float32", ", got ", value);
}
inline void check_number(const char* op, size_t position, const std::optional<double>& value, const Argument* arguments,
                         size_t count) {
  if (value) check_number(op, position, *value, arguments, count);
}
template <class Other>
void check_number(const char*, size_t, const Other&, const Argument*, size_t) {}

// Kernels take strings as std::string; torch passes a handle. Torch's own conversion (stableivalue_conversions.h
// of 2.13) leaks a copy of the string, 48 bytes per call.
template <class Parameter>
using Boxed = std::conditional_t<std::is_same_v<Parameter, std::string>, StringHandle, Parameter>;

template <class Parameter>
Parameter& unboxed(Parameter& parameter) {
  return parameter;
}
inline std::string unboxed(StringHandle& handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// An error of the public function that the op serves, which the message names in place of the op.
struct FunctionError : Error {
  using Error::Error;
};

// Wraps `function` with check_tensors, check_number and errors that name the op. Parameters of type Tensor& or
// std::optional<Tensor>& are written. An error of torch is rethrown with torch's message.
template <const char* name, class Function, Function* function>
struct Guarded;
template <const char* name, class Result, class... Parameters, Result (*function)(Parameters...)>
struct Guarded<name, Result(Parameters...), function> {
  template <class Parameter>
  static constexpr bool kWrites =
      std::is_lvalue_reference_v<Parameter> && !std::is_const_v<std::remove_reference_t<Parameter>>;

  static Result call(Boxed<Parameters>... parameters) { return checked(unboxed(parameters)...); }

 private:
  static Result checked(Parameters... parameters) {
    const std::array<Argument, sizeof...(Parameters)> given{argument_of(parameters, kWrites<Parameters>)...};
    check_tensors(name, given.data(), given.size());
    size_t position = 0;
    (check_number(name, position++, parameters, given.data(), given.size()), ...);
    try {
      return function(parameters...);
    } catch (const FunctionError&) {
      throw;
    } catch (const Error& error) {
      const std::string text = error.what();
      if (text.rfind(message(name, ":"), 0) == 0) throw;
      throw Error(message(name, ": ", text));  // of a helper that serves several ops
    } catch (const std::runtime_error& error) {
      const bool kept = torch_exception_get_what_without_backtrace != nullptr;
      throw Error(message(name, ": ", kept ? torch_exception_get_what_without_backtrace() : error.what()));
    } catch (const std::bad_alloc&) {
      throw Error(message(name, ": not enough memory to work in"));
    }
  }
};

}  // namespace fastmp

// Registers `function` as the kernel of `op`, in a STABLE_TORCH_LIBRARY_IMPL block.
#define FASTMP_IMPL(library, op, function)                                                         \
  do {                                                                                             \
    static constexpr char kName[] = op;                                                            \
    using Guarded = fastmp::Guarded<kName, std::remove_pointer_t<decltype(&function)>, &function>; \
    library.impl(kName, TORCH_BOX(&Guarded::call));                                                \
  } while (0)
