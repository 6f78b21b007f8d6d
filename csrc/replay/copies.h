// Copies of several tensors in one launch, as fastmp/cuda_graphs/graph_set.py makes them.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace fastmp {

using Tensors = std::vector<at::Tensor>;

constexpr size_t SMALL = 1 << 16;  // bytes; above it torch's copy is as fast, and divides the work over threads

inline bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// True for a small CPU copy that is a plain memcpy and need not pass the dispatcher.
inline bool is_bytes(const at::Tensor& into, const at::Tensor& from) {
  return into.is_cpu() && from.is_cpu() && into.nbytes() <= SMALL && into.is_non_overlapping_and_dense() &&
         into.sizes() == from.sizes() && into.strides() == from.strides() && into.scalar_type() == from.scalar_type() &&
         !is_lazy(into) && !is_lazy(from);
}

inline bool has_dispatch_mode() { return c10::impl::TorchDispatchModeTLS::any_modes_set(); }

inline bool is_words(const at::Tensor& tensor) {
  const size_t offset = tensor.storage_offset() * tensor.element_size();
  return tensor.is_contiguous() && !is_lazy(tensor) && tensor.nbytes() % 4 == 0 && offset % 4 == 0 &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 4 == 0;
}

// Copies `from` into `into`, of the same shapes and dtypes. On a device one launch copies all dtypes as four-byte
// words; unaligned tensors take one launch for each dtype.
inline void copy_together(const Tensors& into, const Tensors& from) {
  if (!has_dispatch_mode()) {
    bool bytes = true;
    for (size_t i = 0; i < into.size(); i++) bytes &= is_bytes(into[i], from[i]);
    if (bytes) {
      for (size_t i = 0; i < into.size(); i++) {
        if (into[i].numel()) std::memcpy(into[i].mutable_data_ptr(), from[i].const_data_ptr(), into[i].nbytes());
        into[i].unsafeGetTensorImpl()->bump_version();
      }
      return;
    }
  }
  if (into.size() == 1) {
    into[0].copy_(from[0]);
    return;
  }
  std::map<at::ScalarType, std::pair<Tensors, Tensors>> groups;
  bool same_dtype = true;
  for (const at::Tensor& each : into) same_dtype &= each.scalar_type() == into[0].scalar_type();
  for (size_t i = 0; i < into.size(); i++) {
    const bool words = !same_dtype && is_words(into[i]) && is_words(from[i]);
    auto& [buffers, sources] = groups[words ? at::kInt : into[i].scalar_type()];
    buffers.push_back(words ? into[i].view(-1).view(at::kInt) : into[i]);
    sources.push_back(words ? from[i].view(-1).view(at::kInt) : from[i]);
  }
  for (const auto& [dtype, group] : groups) at::_foreach_copy_(group.first, group.second);
}

inline at::Tensor empty_as(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense() && !has_dispatch_mode())
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  return at::empty_like(tensor);
}

inline Tensors copies_of(const Tensors& tensors) {
  if (tensors.empty()) return {};
  if (tensors.size() == 1 && (has_dispatch_mode() || !is_bytes(tensors[0], tensors[0]))) return {tensors[0].clone()};
  Tensors own;
  for (const at::Tensor& tensor : tensors) own.push_back(empty_as(tensor));
  copy_together(own, tensors);
  return own;
}

// Returns an alias of `tensor` without passing the dispatcher.
inline at::Tensor on_same_memory(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

}  // namespace fastmp
