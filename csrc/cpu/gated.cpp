// swiglu and geglu and their backward on the CPU: y = activation(gate) * up, x + bias = [gate | up].
//
// Both walk tiles of at most 64 rows and 4096 columns of each half, which are spread over the threads. The backward
// adds a tile's column sums up in one row of partial sums, which stays in the caches; the rows of partial sums are
// then added in order. Tiles depend on the shape alone: results do not depend on the number of threads. Half types
// are computed in fp32 and rounded once.
// The semantics are those of the references in fastmp/ops/gated.py.
#include "activations.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace fastmp {

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileCols = 4096;

// A tile of (num_rows, num_cols) of the gates; the other half of x, bias, dx and partials lies `half` elements after
// it. Pitches are in elements. `bias` and `partials` may be null.
struct GatedTile {
  const void* grad;
  const void* x;
  const void* bias;
  void* out;       // y, or dx
  void* partials;  // compute type
  int64_t num_rows, num_cols, half, grad_pitch, x_pitch, out_pitch;
  ScalarType dtype;
  Form form;
};

FASTMP_DECLARE(void gated_tile(const GatedTile&); void gated_backward_tile(const GatedTile&);)

namespace FASTMP_ISA {

// Calls body(TypeTag<T>, std::integral_constant<Form>) for the tile's element type and activation.
template <class Body>
FASTMP_INLINE void dispatch_tile(const GatedTile& tile, const Body& body) {
  dispatch_float(tile.dtype, "gated_activation", [&](auto tag) {
    switch (tile.form) {
      case Form::kSilu: return body(tag, std::integral_constant<Form, Form::kSilu>{});
      case Form::kGeluTanh: return body(tag, std::integral_constant<Form, Form::kGeluTanh>{});
      case Form::kGelu: return body(tag, std::integral_constant<Form, Form::kGelu>{});
    }
  });
}

void gated_tile(const GatedTile& tile) {
  dispatch_tile(tile, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    using V = lanes_of<T>;
    const T* bias = static_cast<const T*>(tile.bias);
    const int64_t half = tile.half;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      const T* x = static_cast<const T*>(tile.x) + row * tile.x_pitch;
      T* y = static_cast<T*>(tile.out) + row * tile.out_pitch;
      for_vectors<num_lanes<V>>(tile.num_cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
        prefetch(x + col);
        prefetch(x + half + col);
        V gate = load(x + col, count, 0), up = load(x + half + col, count, 0);
        if (bias) {
          gate += load(bias + col, count, 0);
          up += load(bias + half + col, count, 0);
        }
        store(y + col, activation<form>(gate) * up, count);
      });
    }
  });
}

// One row of a tile of the backward.
template <typename T, Form form>
struct BackwardRow {
  const T *grad, *x, *bias;
  T* dx;
  int64_t half;

  BackwardRow(const GatedTile& tile, int64_t row)
      : grad(static_cast<const T*>(tile.grad) + row * tile.grad_pitch),
        x(static_cast<const T*>(tile.x) + row * tile.x_pitch),
        bias(static_cast<const T*>(tile.bias)),
        dx(static_cast<T*>(tile.out) + row * tile.out_pitch),
        half(tile.half) {}

  // Writes a vector of dx in both halves, and returns the two.
  template <class Count>
  FASTMP_INLINE Pair<lanes_of<T>> step(int64_t col, Count count) const {
    using V = lanes_of<T>;
    prefetch(x + col);
    prefetch(x + half + col);
    prefetch(grad + col);
    V gate = load(x + col, count, 0), up = load(x + half + col, count, 0);
    if (bias) {
      gate += load(bias + col, count, 0);
      up += load(bias + half + col, count, 0);
    }
    const V g = load(grad + col, count, 0);
    const auto [p, q] = activation_parts<form>(gate);
    const V dgate = g * (up * (p + gate * q)), dup = g * (gate * p);
    store(dx + col, dgate, count);
    store(dx + half + col, dup, count);
    return {dgate, dup};
  }
};

void gated_backward_tile(const GatedTile& tile) {
  dispatch_tile(tile, [&](auto tag, auto form) {
    using T = typename decltype(tag)::type;
    using Row = BackwardRow<T, form>;
    constexpr int64_t kStep = num_lanes<lanes_of<T>>;
    auto* gate_sums = static_cast<scalar_of<T>*>(tile.partials);
    auto* up_sums = gate_sums ? gate_sums + tile.half : nullptr;
    // Two rows at once halve the traffic of the sums.
    for (int64_t row = 0; row < tile.num_rows; row += 2) {
      const Row one(tile, row), two(tile, std::min(row + 1, tile.num_rows - 1));
      const bool alone = row + 1 == tile.num_rows;
      for_vectors<kStep>(tile.num_cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
        auto sum = one.step(col, count);
        if (!alone) {
          const auto other = two.step(col, count);
          sum.first += other.first;
          sum.second += other.second;
        }
        if (!gate_sums) return;
        if (row > 0) {
          sum.first += load(gate_sums + col, count, 0);
          sum.second += load(up_sums + col, count, 0);
        }
        store(gate_sums + col, sum.first, count);
        store(up_sums + col, sum.second, count);
      });
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void check_arguments(const char* op, const Tensor& x, const std::optional<Tensor>& bias) {
  FASTMP_CHECK(x.dim() > 0 && x.size(x.dim() - 1) % 2 == 0, op, ": x must end in a dimension of even size");
  dispatch_float(x.scalar_type(), op, [](auto) {});
  check_bias(op, bias, x);
}

// Calls kernel(tile) on every tile, over all threads. `partials` has one row for each strip of kTileRows rows.
template <class Kernel>
void for_tiles(const Kernel& kernel, const Rows* grad, const Rows& x, const Tensor* bias, const Tensor& out,
               const Tensor* partials, Form form) {
  const auto itemsize = static_cast<int64_t>(x.tensor.element_size());
  const int64_t half = x.num_cols / 2, out_pitch = grad ? x.num_cols : half;
  const int64_t strips = (x.num_rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (half + kTileCols - 1) / kTileCols;
  const auto run = [&](int64_t index) {
    const int64_t strip = index / blocks, row = strip * kTileRows, col = index % blocks * kTileCols;
    GatedTile tile{};
    tile.num_rows = std::min(kTileRows, x.num_rows - row);
    tile.num_cols = std::min(kTileCols, half - col);
    tile.half = half;
    tile.x_pitch = x.pitch;
    tile.x = at(x.tensor.const_data_ptr(), row * x.pitch + col, itemsize);
    if (grad) {
      tile.grad_pitch = grad->pitch;
      tile.grad = at(grad->tensor.const_data_ptr(), row * grad->pitch + col, itemsize);
    }
    if (bias) tile.bias = at(bias->const_data_ptr(), col, itemsize);
    tile.out_pitch = out_pitch;
    tile.out = const_cast<char*>(at(out.mutable_data_ptr(), row * out_pitch + col, itemsize));
    if (partials) {
      const auto size = static_cast<int64_t>(partials->element_size());
      tile.partials = const_cast<char*>(at(partials->mutable_data_ptr(), strip * x.num_cols + col, size));
    }
    tile.dtype = x.tensor.scalar_type();
    tile.form = form;
    kernel(tile);
  };
  const int64_t elements = std::min(kTileRows, x.num_rows) * std::min(kTileCols, half);
  parallel_for(0, strips * blocks, std::max<int64_t>(1, 8192 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) run(index);
  });
}

Tensor gated_activation(const Tensor& x, std::optional<Tensor> bias, std::string activation) {
  constexpr const char* kOp = "gated_activation";
  check_arguments(kOp, x, bias);
  const Form form = form_of(kOp, activation);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  Tensor y = fastmp::empty(sizes, x.scalar_type(), x);
  if (x.numel() == 0) return y;
  if (bias) bias = torch::stable::contiguous(*bias);
  for_tiles(FASTMP_BEST(gated_tile), nullptr, Rows(x), bias ? &*bias : nullptr, y, nullptr, form);
  return y;
}

std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& grad, const Tensor& x, std::optional<Tensor> bias,
                                                     std::string activation) {
  constexpr const char* kOp = "gated_activation_backward";
  check_arguments(kOp, x, bias);
  const Form form = form_of(kOp, activation);
  FASTMP_CHECK(grad.scalar_type() == x.scalar_type() && 2 * grad.numel() == x.numel() && grad.dim() == x.dim() &&
                   2 * grad.size(grad.dim() - 1) == x.size(x.dim() - 1),
               kOp, ": grad is ", dtype_name(grad.scalar_type()), " of ", grad.numel(), " elements but x is ",
               dtype_name(x.scalar_type()), " of ", x.numel(), ", or the last dimension of x is not twice grad's");
  Tensor dx = fastmp::empty(x.sizes(), x.scalar_type(), x);
  Tensor dbias = fastmp::empty({bias ? x.size(x.dim() - 1) : 0}, x.scalar_type(), x);
  if (x.numel() == 0) {
    if (dbias.numel() > 0) torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  const Rows x_rows(x), grad_rows(grad);
  if (!bias) {
    for_tiles(FASTMP_BEST(gated_backward_tile), &grad_rows, x_rows, nullptr, dx, nullptr, form);
    return {dx, dbias};
  }
  bias = torch::stable::contiguous(*bias);
  const ScalarType compute = compute_dtype(x.scalar_type());
  const int64_t strips = (x_rows.num_rows + kTileRows - 1) / kTileRows;
  const Tensor partials = fastmp::empty({strips, x_rows.num_cols}, compute, x);
  for_tiles(FASTMP_BEST(gated_backward_tile), &grad_rows, x_rows, &*bias, dx, &partials, form);
  sum_rows(partials, dbias);
  return {dx, dbias};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "gated_activation", fastmp::gated_activation);
  FASTMP_IMPL(m, "gated_activation_backward", fastmp::gated_activation_backward);
}

#endif  // FASTMP_ISA_BASE
