// What the nodes of autograd here share: how they are made, and what they refuse.
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

// A node that reads gradients at a place of its own, in memory that it has had all along.
struct Reader {
  virtual ~Reader() = default;
  // Where gradient `input` of this node is to be written, asked just before that is done, once in a backward.
  // Undefined where it may lie anywhere.
  virtual at::Tensor place_of(uint32_t input) = 0;
};

inline void refuse_forward_mode(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), "fastmp ops have no forward-mode derivatives");
}

}  // namespace fastmp
