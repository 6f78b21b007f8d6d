// What is common to all ops, around their kernels: checks of tensors, and errors that name the op.
//
// Raw calls of torch.ops.fastmp.* reach kernels without the checks of fastmp/ops. What a kernel itself has to check are
// shapes, dtypes and indices.
#pragma once

#include "stable.h"

#include <algorithm>
#include <array>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

// Torch's message for the last error in this thread, which does not cross its C interface. Null before torch 2.13.
extern "C" __attribute__((weak, visibility("default"))) const char* torch_exception_get_what_without_backtrace();

namespace fastmp {

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// "Float (2, 3)"
inline std::string described(const Tensor& tensor) {
  std::string text = message(dtype_name(tensor.scalar_type()), " (");
  const auto sizes = tensor.sizes();
  for (size_t dim = 0; dim < sizes.size(); ++dim) text += (dim ? ", " : "") + std::to_string(sizes[dim]);
  return text + ")";
}

// `tensor`, called `name`, has the dtype and the sizes of `like`, called `like_name`.
inline void check_same(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                       const Tensor& like) {
  FASTMP_CHECK(tensor.scalar_type() == like.scalar_type() && same_sizes(tensor, like), op, ": ", like_name, " is ",
               described(like), " but ", name, " is ", described(tensor));
}

// `bias`, if there is one, has one number of x's dtype for each column of x.
inline void check_bias(const char* op, const std::optional<Tensor>& bias, const Tensor& x) {
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 1 &&
                         bias->size(0) == x.size(x.dim() - 1)),
               op, ": x is ", described(x), ", which does not fit a bias of ", described(*bias));
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto x = a.strides(), y = b.strides();
  return a.scalar_type() == b.scalar_type() && same_sizes(a, b) && std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// Where the elements of a tensor lie: bytes [begin, end); `distinct` if no two elements share memory, `gapless` if
// they also fill it.
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

// Whether two tensors share memory, or one has elements between those of the other.
inline bool overlaps(const Tensor& a, const Tensor& b) {
  const Extent x(a), y(b);
  return x.begin < y.end && y.begin < x.end;
}

// A tensor that an op is given, and whether the op writes to it.
struct Argument {
  const Tensor* tensor = nullptr;  // null: not a tensor, or None
  bool written = false;
};

// What holds for all tensors of every op: they are on the device that the kernel runs on; what is written has no two
// elements in one place, as an expanded tensor has, and shares memory with another tensor only where it is that very
// tensor and not written as well. As in torch, tensors with gaps that reach into each other are not looked at closely.
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
    FASTMP_CHECK(here(*arguments[i].tensor), op, ": all tensors must be on ", kDevice, ", but argument ", i, " is not");
    writes |= arguments[i].written;
  }
  for (size_t i = 0; writes && i < count; ++i) {
    if (!arguments[i].written) continue;
    const Tensor& out = *arguments[i].tensor;
    const Extent mine(out);
    FASTMP_CHECK(mine.distinct, op, ": argument ", i, " is written to, but several of its elements may lie in one place",
                 " (an expanded tensor?); pass a copy");
    for (size_t j = 0; j < count; ++j) {
      if (j == i || !arguments[j].tensor) continue;
      const Tensor& other = *arguments[j].tensor;
      const Extent its(other);
      if (mine.end <= its.begin || its.end <= mine.begin || !mine.gapless || !its.gapless) continue;
      const bool same = mine.begin == its.begin && mine.end == its.end && same_layout(out, other);
      FASTMP_CHECK(same && !arguments[j].written, op, ": argument ", i, " is written to, but shares memory with argument ",
                   j, "; pass a copy of one");
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

// A kernel takes a text as std::string. Torch hands over a handle; its own conversion (stableivalue_conversions.h of
// 2.13) forgets to delete a copy of the text, 48 bytes a call.
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

// `function` behind what is common to all ops: check_tensors, where parameters of type Tensor& or std::optional<Tensor>&
// are what it writes to, and errors that name the op. An error of torch itself is thrown with torch's message.
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
    try {
      return function(parameters...);
    } catch (const Error&) {
      throw;
    } catch (const std::runtime_error& error) {
      const bool kept = torch_exception_get_what_without_backtrace != nullptr;
      throw Error(message(name, ": ", kept ? torch_exception_get_what_without_backtrace() : error.what()));
    } catch (const std::bad_alloc&) {
      throw Error(message(name, ": not enough memory to work in"));
    }
  }
};

}  // namespace fastmp

// Makes `function` the implementation of the op called `name`, in a STABLE_TORCH_LIBRARY_IMPL block.
#define FASTMP_IMPL(library, op, function)                                                                    \
  do {                                                                                                        \
    static constexpr char kName[] = op;                                                                       \
    using Guarded = fastmp::Guarded<kName, std::remove_pointer_t<decltype(&function)>, &function>;             \
    library.impl(kName, TORCH_BOX(&Guarded::call));                                                           \
  } while (0)
