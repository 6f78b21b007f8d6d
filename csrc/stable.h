// Wrapper of torch's stable ABI as of 2.10: the only part of torch that kernels use.
//
// A library built on this header runs on torch 2.10 and later and contains no Python symbol. Kernels
//   - take and return `fastmp::Tensor`, and check arguments with FASTMP_CHECK;
//   - allocate with `fastmp::empty` and `fastmp::empty_like` (huge pages for large tensors; qualify the names, for
//     torch::stable has the same ones);
//   - run on torch's threads with `parallel_for`, and in .cu files on `current_stream`;
//   - select the element type with `dispatch_float`;
//   - are registered with FASTMP_IMPL of op.h.
//
// A file in csrc/cpu is compiled once per instruction set (see CMakeLists.txt), which FASTMP_ISA names (`base`, `avx2`,
// `avx512`). Code that differs between them is in `namespace fastmp::FASTMP_ISA`; registration and the choice at run
// time are under `#ifdef FASTMP_ISA_BASE`.
#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION 0x020a000000000000ULL
#endif

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

// Throws fastmp::Error (RuntimeError in Python) with the streamed message and nothing else.
#define FASTMP_CHECK(condition, ...)                     \
  do {                                                   \
    if (!(condition)) [[unlikely]]                       \
      throw fastmp::Error(fastmp::message(__VA_ARGS__)); \
  } while (0)

namespace fastmp {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// The exception of FASTMP_CHECK; its message is for users.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

inline const char* dtype_name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

// Minimum size of outputs on huge pages: faulting in fresh 4 KiB pages costs more than most kernels.
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

// Advises the system to back a large CPU tensor with huge pages; failure is ignored. Call it before the first write.
inline void advise_huge_pages(const Tensor& tensor) {
#ifdef MADV_HUGEPAGE
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (bytes < kHugePageBytes || !tensor.is_cpu()) return;
  constexpr uintptr_t kPage = 4096;
  const auto start = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t first = (start + kPage - 1) / kPage * kPage;
  const uintptr_t last = (start + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

// If true, outputs are allocated through torch's dispatcher, which fills them with NaN under torch.utils.deterministic,
// as tests need (see memory.cpp), and takes 0.4 us longer.
inline std::atomic<bool> outputs_by_dispatcher{false};

// Returns an uninitialised contiguous tensor on the device of `like`.
inline Tensor empty(IntHeaderOnlyArrayRef sizes, ScalarType dtype, const Tensor& like) {
#ifndef __CUDACC__
  constexpr size_t kMaxDims = 8;
  if (sizes.size() <= kMaxDims && !outputs_by_dispatcher.load(std::memory_order_relaxed)) {
    int64_t strides[kMaxDims], step = 1;
    for (size_t dim = sizes.size(); dim-- > 0;) {
      strides[dim] = step;
      step *= std::max<int64_t>(sizes[dim], 1);
    }
    int32_t device = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
    const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, code,
                                                    device, like.get_device_index(), &handle));
    Tensor out(handle);
    if (step * static_cast<int64_t>(sizeof(double)) >= kHugePageBytes) advise_huge_pages(out);
    return out;
  }
#endif
  Tensor out = torch::stable::empty(sizes, dtype, std::nullopt, like.device());
  advise_huge_pages(out);
  return out;
}

// Returns an uninitialised tensor of the same shape, dtype and device.
inline Tensor empty_like(const Tensor& tensor) {
  if (tensor.is_contiguous()) return empty(tensor.sizes(), tensor.scalar_type(), tensor);
  Tensor out = torch::stable::empty_like(tensor);
  advise_huge_pages(out);
  return out;
}

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Calls body(begin, end) on torch's threads for disjoint ranges of at least `grain` that cover [begin, end). If bodies
// throw, one of the exceptions is rethrown after all have ended.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  std::exception_ptr thrown;
  std::atomic_flag taken;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {  // torch's C interface would lose its message
      if (!taken.test_and_set()) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

template <class T>
struct TypeTag {
  using type = T;
};

// Returns the dtype of arithmetic and accumulation: float64 for float64, else float32.
inline ScalarType compute_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls body(TypeTag<T>{}) with the C++ type of a floating-point dtype: `using T = typename decltype(tag)::type`.
template <class Bf16 = BFloat16, class Fp16 = Half, class Body>
auto dispatch_float(ScalarType dtype, const char* op, const Body& body) {
  switch (dtype) {
    case ScalarType::Float: return body(TypeTag<float>{});
    case ScalarType::Double: return body(TypeTag<double>{});
    case ScalarType::BFloat16: return body(TypeTag<Bf16>{});
    case ScalarType::Half: return body(TypeTag<Fp16>{});
    default: throw Error(message(op, ": dtype must be float64, float32, bfloat16 or float16, got ", dtype_name(dtype)));
  }
}

#ifdef __CUDACC__

#define FASTMP_CUDA_CHECK(call)                                                   \
  do {                                                                            \
    const cudaError_t error_ = (call);                                            \
    FASTMP_CHECK(error_ == cudaSuccess, #call, ": ", cudaGetErrorString(error_)); \
  } while (0)

// Returns torch's current stream on the tensor's device.
inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes the tensor's device current in a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) : guard_(tensor.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

#endif  // __CUDACC__

}  // namespace fastmp
