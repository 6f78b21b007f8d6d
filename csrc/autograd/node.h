// Shared by the autograd nodes: construction, gradients in fixed buffers, and the check for forward mode.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/headeronly/version.h>

#include <utility>

namespace fastmp {

// Nodes are held by std::shared_ptr before torch 2.13 and by c10::intrusive_ptr since.
using Handle = decltype(torch::autograd::Edge::function);

template <typename T, typename... Arguments>
Handle make_node(Arguments&&... arguments) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return Handle(new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
#else
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
#endif
}

// A node that reads its gradients from fixed buffers, as the backward of a CUDA graph does.
struct Reader {
  virtual ~Reader() = default;
  // Returns the buffer for gradient `input` of this node, undefined if it takes any tensor. Called once in a backward,
  // just before the buffer is written.
  virtual at::Tensor place_of(uint32_t input) = 0;
};

// Raises for a tensor with a tangent: the ops have no forward-mode derivative.
inline void check_no_forward_mode(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), "fastmp ops have no forward-mode derivatives");
}

}  // namespace fastmp
