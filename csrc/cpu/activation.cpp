// bias_gelu and its backward on the CPU.
//
// Threads share tiles of at most 64 rows and 8192 columns. In the backward each strip of rows sums its columns into one
// row of partial sums (32 KiB per tile, which stays in cache), and `sum_rows` adds the strips in order. Tiles depend on
// the shape alone, so results do not depend on the number of threads. 16-bit types are computed in fp32 and rounded
// once. Reference: fastmp/ops/activation.py.
#include "activations.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace fastmp {

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileCols = 8192;

// A tile (num_rows, num_cols) of all tensors; pitches are in elements.
struct GeluTile {
  const void* grad;  // backward only
  const void* x;
  const void* bias;  // (num_cols,), or null
  void* out;         // y or dx
  void* partials;    // (num_cols,) in the compute type, or null without a bias
  int64_t num_rows, num_cols, grad_pitch, x_pitch, out_pitch;
  ScalarType dtype;
  bool tanh;
};

FASTMP_DECLARE(void bias_gelu_tile(const GeluTile&); void bias_gelu_backward_tile(const GeluTile&);)

namespace FASTMP_ISA {

template <Form form>
using FormTag = std::integral_constant<Form, form>;

// Calls body(TypeTag<T>, FormTag) for the tile's element type and form.
template <class Body>
FASTMP_INLINE void dispatch_tile(const GeluTile& tile, const Body& body) {
  dispatch_float(tile.dtype, "bias_gelu", [&](auto tag) {
    tile.tanh ? body(tag, FormTag<Form::kGeluTanh>{}) : body(tag, FormTag<Form::kGelu>{});
  });
}

void bias_gelu_tile(const GeluTile& tile) {
  dispatch_tile(tile, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    using V = lanes_of<T>;
    constexpr int64_t kStep = num_lanes<V>;
    const T* bias = static_cast<const T*>(tile.bias);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      const T* x = static_cast<const T*>(tile.x) + row * tile.x_pitch;
      T* y = static_cast<T*>(tile.out) + row * tile.out_pitch;
      int64_t col = 0;
      for (; col + kStep <= tile.num_cols; col += kStep) {
        // y = gelu(x + bias), one vector at a time
        prefetch(x + col);
        V h = load(x + col);
        if (bias) h += load(bias + col);
        store(y + col, activation<form>(h));
      }
      if (const int64_t rest = tile.num_cols - col; rest > 0) {
        V h = load(x + col, rest, 0);
        if (bias) h += load(bias + col, rest, 0);
        store(y + col, activation<form>(h), rest);
      }
    }
  });
}

void bias_gelu_backward_tile(const GeluTile& tile) {
  dispatch_tile(tile, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    using V = lanes_of<T>;
    constexpr int64_t kStep = num_lanes<V>;
    const T* bias = static_cast<const T*>(tile.bias);
    auto* partials = static_cast<scalar_of<T>*>(tile.partials);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      const T* grad = static_cast<const T*>(tile.grad) + row * tile.grad_pitch;
      const T* x = static_cast<const T*>(tile.x) + row * tile.x_pitch;
      T* dx = static_cast<T*>(tile.out) + row * tile.out_pitch;
      int64_t col = 0;
      for (; col + kStep <= tile.num_cols; col += kStep) {
        // 1. h = x + bias.
        V h = load(x + col);
        if (bias) h += load(bias + col);
        prefetch(x + col);
        prefetch(grad + col);
        // 2. dx = grad (p + h q), where gelu(h) = h p.
        const auto [p, q] = activation_parts<form>(h);
        const V dh = load(grad + col) * (p + h * q);
        store(dx + col, dh);
        // 3. Add to the strip's column sums; its first row opens them.
        if (partials) store(partials + col, row == 0 ? dh : load(partials + col) + dh);
      }
      if (const int64_t rest = tile.num_cols - col; rest > 0) {
        V h = load(x + col, rest, 0);
        if (bias) h += load(bias + col, rest, 0);
        const auto [p, q] = activation_parts<form>(h);
        const V dh = load(grad + col, rest, 0) * (p + h * q);
        store(dx + col, dh, rest);
        if (partials) store(partials + col, row == 0 ? dh : load(partials + col, rest, 0) + dh, rest);
      }
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void check_arguments(const char* op, const Tensor& x, const std::optional<Tensor>& bias,
                     const std::string& approximate) {
  FASTMP_CHECK(approximate == "tanh" || approximate == "none", op, ": approximate must be 'tanh' or 'none', got '",
               approximate, "'");
  FASTMP_CHECK(x.dim() > 0, op, ": x must have at least one dimension");
  dispatch_float(x.scalar_type(), op, [](auto) {});
  check_bias(op, bias, x);
}

// Calls kernel(tile) on every tile, over all threads. `partials` has one row per strip of kTileRows rows.
template <class Kernel>
void for_tiles(const Kernel& kernel, const Rows* grad, const Rows& x, const Tensor* bias, const Tensor& out,
               const Tensor* partials, const std::string& approximate) {
  const auto itemsize = static_cast<int64_t>(x.tensor.element_size());
  const int64_t strips = (x.num_rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (x.num_cols + kTileCols - 1) / kTileCols;
  const auto run = [&](int64_t index) {
    const int64_t strip = index / blocks, row = strip * kTileRows, col = index % blocks * kTileCols;
    GeluTile tile{};
    tile.num_rows = std::min(kTileRows, x.num_rows - row);
    tile.num_cols = std::min(kTileCols, x.num_cols - col);
    tile.x_pitch = x.pitch;
    tile.x = at(x.tensor.const_data_ptr(), row * x.pitch + col, itemsize);
    if (grad) {
      tile.grad_pitch = grad->pitch;
      tile.grad = at(grad->tensor.const_data_ptr(), row * grad->pitch + col, itemsize);
    }
    if (bias) tile.bias = at(bias->const_data_ptr(), col, itemsize);
    tile.out_pitch = x.num_cols;
    tile.out = const_cast<char*>(at(out.mutable_data_ptr(), row * x.num_cols + col, itemsize));
    if (partials) {
      const auto size = static_cast<int64_t>(partials->element_size());
      tile.partials = const_cast<char*>(at(partials->mutable_data_ptr(), strip * x.num_cols + col, size));
    }
    tile.dtype = x.tensor.scalar_type();
    tile.tanh = approximate == "tanh";
    kernel(tile);
  };
  const int64_t elements = std::min(kTileRows, x.num_rows) * std::min(kTileCols, x.num_cols);
  parallel_for(0, strips * blocks, std::max<int64_t>(1, 16384 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) run(index);
  });
}

Tensor bias_gelu(const Tensor& x, std::optional<Tensor> bias, std::string approximate) {
  check_arguments("bias_gelu", x, bias, approximate);
  Tensor y = fastmp::empty(x.sizes(), x.scalar_type(), x);
  if (x.numel() == 0) return y;
  const Rows rows(x);
  if (bias) bias = torch::stable::contiguous(*bias);
  for_tiles(FASTMP_BEST(bias_gelu_tile), nullptr, rows, bias ? &*bias : nullptr, y, nullptr, approximate);
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad, const Tensor& x, std::optional<Tensor> bias,
                                              std::string approximate) {
  constexpr const char* kOp = "bias_gelu_backward";
  check_arguments(kOp, x, bias, approximate);
  check_same(kOp, "grad", grad, "x", x);
  Tensor dx = fastmp::empty(x.sizes(), x.scalar_type(), x);
  Tensor dbias = fastmp::empty({bias ? x.size(x.dim() - 1) : 0}, x.scalar_type(), x);
  if (x.numel() == 0) {
    if (dbias.numel() > 0) torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  const Rows x_rows(x), grad_rows(grad);
  if (!bias) {
    for_tiles(FASTMP_BEST(bias_gelu_backward_tile), &grad_rows, x_rows, nullptr, dx, nullptr, approximate);
    return {dx, dbias};
  }
  bias = torch::stable::contiguous(*bias);
  const ScalarType compute = compute_dtype(x.scalar_type());
  const int64_t strips = (x_rows.num_rows + kTileRows - 1) / kTileRows;
  const Tensor partials = fastmp::empty({strips, x_rows.num_cols}, compute, x);
  for_tiles(FASTMP_BEST(bias_gelu_backward_tile), &grad_rows, x_rows, &*bias, dx, &partials, approximate);
  sum_rows(partials, dbias);
  return {dx, dbias};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "bias_gelu", fastmp::bias_gelu);
  FASTMP_IMPL(m, "bias_gelu_backward", fastmp::bias_gelu_backward);
}

#endif  // FASTMP_ISA_BASE
