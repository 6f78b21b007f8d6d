// swiglu and geglu and their backward on the CPU: y = activation(gate) * up, of two tensors or x + bias = [gate | up].
//
// Threads share tiles of at most 64 rows and 4096 columns of each half. In the backward each strip of rows sums its
// columns into one row of partial sums, which stays in cache, and `sum_rows` adds the strips in order. Tiles depend on
// the shape alone, so results do not depend on the number of threads. 16-bit types are computed in fp32 and rounded
// once. Reference: fastmp/ops/gated.py.
#include "activations.h"
#include "fp8.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace fastmp {

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileCols = 4096;

// A tile (num_rows, num_cols) of all tensors; pitches are in elements. In bias and partials, entries of up are `half`
// elements after those of the gate.
struct GatedTile {
  const void* grad;  // backward only
  const void* gate;
  const void* up;
  const void* bias;  // or null
  void* out;         // y, or the gradient of the gate
  void* up_out;      // the gradient of up
  void* partials;    // in the compute type, or null without a bias
  int64_t num_rows, num_cols, half, grad_pitch, gate_pitch, up_pitch, out_pitch;
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
      const T* gates = static_cast<const T*>(tile.gate) + row * tile.gate_pitch;
      const T* ups = static_cast<const T*>(tile.up) + row * tile.up_pitch;
      T* y = static_cast<T*>(tile.out) + row * tile.out_pitch;
      for_vectors<num_lanes<V>>(tile.num_cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
        // 1. Load gate and up, add their biases.
        prefetch(gates + col);
        prefetch(ups + col);
        V gate = load(gates + col, count, 0), up = load(ups + col, count, 0);
        if (bias) {
          gate += load(bias + col, count, 0);
          up += load(bias + half + col, count, 0);
        }
        // 2. y = activation(gate) up.
        store(y + col, activation<form>(gate) * up, count);
      });
    }
  });
}

// One row of a tile in the backward.
template <typename T, Form form>
struct BackwardRow {
  const T *grad, *gates, *ups, *bias;
  T *dgates, *dups;
  int64_t half;

  BackwardRow(const GatedTile& tile, int64_t row)
      : grad(static_cast<const T*>(tile.grad) + row * tile.grad_pitch),
        gates(static_cast<const T*>(tile.gate) + row * tile.gate_pitch),
        ups(static_cast<const T*>(tile.up) + row * tile.up_pitch),
        bias(static_cast<const T*>(tile.bias)),
        dgates(static_cast<T*>(tile.out) + row * tile.out_pitch),
        dups(static_cast<T*>(tile.up_out) + row * tile.out_pitch),
        half(tile.half) {}

  // Computes and stores one vector of both gradients, and returns them for the column sums.
  template <class Count>
  FASTMP_INLINE Pair<lanes_of<T>> step(int64_t col, Count count) const {
    using V = lanes_of<T>;
    prefetch(gates + col);
    prefetch(ups + col);
    prefetch(grad + col);
    V gate = load(gates + col, count, 0), up = load(ups + col, count, 0);
    if (bias) {
      gate += load(bias + col, count, 0);
      up += load(bias + half + col, count, 0);
    }
    // activation(gate) = gate p with derivative p + gate q: one exponential for both gradients
    const V g = load(grad + col, count, 0);
    const auto [p, q] = activation_parts<form>(gate);
    const V dgate = g * (up * (p + gate * q)), dup = g * (gate * p);
    store(dgates + col, dgate, count);
    store(dups + col, dup, count);
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
    // Two rows at a time halve the loads and stores of the sums.
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

// gate and up as rows, of two tensors or the halves of one.
struct Parts {
  Rows gate;
  Rows up;
  int64_t num_cols;
  int64_t up_start;  // column of tensor `up` at which up begins

  Parts(const Tensor& x, const std::optional<Tensor>& given)
      : gate(x),
        up(given ? Rows(*given) : gate),
        num_cols(given ? gate.num_cols : gate.num_cols / 2),
        up_start(given ? 0 : num_cols) {}
};

void check_arguments(const char* op, const Tensor& x, const std::optional<Tensor>& up,
                     const std::optional<Tensor>& bias) {
  FASTMP_CHECK(x.dim() > 0 && (up || x.size(x.dim() - 1) % 2 == 0), op, ": x must end in a dimension of even size");
  dispatch_float(x.scalar_type(), op, [](auto) {});
  if (!up) return check_bias(op, bias, x);
  FASTMP_CHECK(up->scalar_type() == x.scalar_type() && same_sizes(*up, x), op, ": gate is ", described(x),
               ", which does not fit up, ", described(*up));
  FASTMP_CHECK(
      !bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 1 && bias->size(0) == 2 * x.size(x.dim() - 1)),
      op, ": gate and up are ", described(x), ", which does not fit a bias of ", described(*bias));
}

// Outputs of a kernel: y, or the gradients of gate and up, with one pitch.
struct Outputs {
  char* gate;
  char* up;
  int64_t pitch;
};

// Calls kernel(tile) on every tile, over all threads. `partials` has one row per strip of kTileRows rows.
template <class Kernel>
void for_tiles(const Kernel& kernel, const Rows* grad, const Parts& parts, const Tensor* bias, const Outputs& out,
               const Tensor* partials, Form form) {
  const Tensor& x = parts.gate.tensor;
  const auto itemsize = static_cast<int64_t>(x.element_size());
  const int64_t num_rows = parts.gate.num_rows, half = parts.num_cols;
  const int64_t strips = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (half + kTileCols - 1) / kTileCols;
  const auto run = [&](int64_t index) {
    const int64_t strip = index / blocks, row = strip * kTileRows, col = index % blocks * kTileCols;
    GatedTile tile{};
    tile.num_rows = std::min(kTileRows, num_rows - row);
    tile.num_cols = std::min(kTileCols, half - col);
    tile.half = half;
    tile.gate_pitch = parts.gate.pitch;
    tile.gate = at(x.const_data_ptr(), row * parts.gate.pitch + col, itemsize);
    tile.up_pitch = parts.up.pitch;
    tile.up = at(parts.up.tensor.const_data_ptr(), row * parts.up.pitch + parts.up_start + col, itemsize);
    if (grad) {
      tile.grad_pitch = grad->pitch;
      tile.grad = at(grad->tensor.const_data_ptr(), row * grad->pitch + col, itemsize);
    }
    if (bias) tile.bias = at(bias->const_data_ptr(), col, itemsize);
    tile.out_pitch = out.pitch;
    tile.out = out.gate + (row * out.pitch + col) * itemsize;
    if (out.up) tile.up_out = out.up + (row * out.pitch + col) * itemsize;
    if (partials) {
      const auto size = static_cast<int64_t>(partials->element_size());
      tile.partials = const_cast<char*>(at(partials->mutable_data_ptr(), strip * 2 * half + col, size));
    }
    tile.dtype = x.scalar_type();
    tile.form = form;
    kernel(tile);
  };
  const int64_t elements = std::min(kTileRows, num_rows) * std::min(kTileCols, half);
  parallel_for(0, strips * blocks, std::max<int64_t>(1, 8192 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) run(index);
  });
}

char* bytes(const Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

Tensor gated_activation(const Tensor& x, std::optional<Tensor> bias, std::string activation, std::optional<Tensor> up) {
  constexpr const char* kOp = "gated_activation";
  check_arguments(kOp, x, up, bias);
  const Form form = form_of(kOp, activation);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (!up) sizes.back() /= 2;
  Tensor y = fastmp::empty(sizes, x.scalar_type(), x);
  if (x.numel() == 0) return y;
  if (bias) bias = torch::stable::contiguous(*bias);
  const Parts parts(x, up);
  const Outputs out{bytes(y), nullptr, parts.num_cols};
  for_tiles(FASTMP_BEST(gated_tile), nullptr, parts, bias ? &*bias : nullptr, out, nullptr, form);
  return y;
}

}  // namespace

// y in FP8: a few rows are computed into a buffer that stays in cache, and quantised from there.
std::tuple<Tensor, Tensor> gated_activation_quantized(const Tensor& x, std::optional<Tensor> bias,
                                                      std::string activation, std::optional<Tensor> up, int64_t block,
                                                      ScalarType dtype) {
  constexpr const char* kOp = "gated_activation_quantized";
  check_arguments(kOp, x, up, bias);
  dispatch_fp8(dtype, kOp, [](auto) {});
  const Form form = form_of(kOp, activation);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (!up) sizes.back() /= 2;
  const int64_t half = sizes.back(), num_rows = num_rows_of(kOp, "x", x);
  Tensor s = empty_row_scales(kOp, num_rows, half, block, x);
  Tensor q = fastmp::empty(sizes, dtype, x);
  if (x.numel() == 0) return {q, s};
  if (bias) bias = torch::stable::contiguous(*bias);
  const Parts parts(x, up);
  const QuantizedRows out = rows_into(q, s, block, x.scalar_type());
  const auto itemsize = static_cast<int64_t>(x.element_size());
  const int64_t step = std::clamp<int64_t>(65536 / (half * itemsize), 1, kTileRows);
  parallel_for(0, num_rows, std::max<int64_t>(1, 8192 / half), [&](int64_t begin, int64_t end) {
    std::vector<double> buffer((step * half * itemsize + 7) / 8);
    for (int64_t row = begin; row < end; row += step) {
      // 1. y of these rows, rounded to x's dtype.
      GatedTile tile{};
      tile.num_rows = std::min(step, end - row), tile.num_cols = tile.half = tile.out_pitch = half;
      tile.gate_pitch = parts.gate.pitch, tile.up_pitch = parts.up.pitch;
      tile.gate = at(parts.gate.tensor.const_data_ptr(), row * parts.gate.pitch, itemsize);
      tile.up = at(parts.up.tensor.const_data_ptr(), row * parts.up.pitch + parts.up_start, itemsize);
      if (bias) tile.bias = bias->const_data_ptr();
      tile.out = buffer.data(), tile.dtype = x.scalar_type(), tile.form = form;
      FASTMP_BEST(gated_tile)(tile);
      // 2. Quantise them.
      FASTMP_BEST(quantize_rows)(out.part(row, tile.num_rows, buffer.data()));
    }
  });
  return {q, s};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> gated_activation_backward(const Tensor& grad, const Tensor& x,
                                                             std::optional<Tensor> bias, std::string activation,
                                                             std::optional<Tensor> up) {
  constexpr const char* kOp = "gated_activation_backward";
  check_arguments(kOp, x, up, bias);
  const Form form = form_of(kOp, activation);
  const int64_t times = up ? 1 : 2;
  FASTMP_CHECK(grad.scalar_type() == x.scalar_type() && times * grad.numel() == x.numel() && grad.dim() == x.dim() &&
                   times * grad.size(grad.dim() - 1) == x.size(x.dim() - 1),
               kOp, ": grad is ", dtype_name(grad.scalar_type()), " of ", grad.numel(), " elements but x is ",
               dtype_name(x.scalar_type()), " of ", x.numel(), ", or the last dimension of x is not ", times,
               " times grad's");
  Tensor dx = fastmp::empty(x.sizes(), x.scalar_type(), x);
  Tensor dup = up ? fastmp::empty(x.sizes(), x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  Tensor dbias = fastmp::empty({bias ? bias->numel() : 0}, x.scalar_type(), x);
  if (x.numel() == 0) {
    if (dbias.numel() > 0) torch::stable::zero_(dbias);
    return {dx, dup, dbias};
  }
  const Parts parts(x, up);
  const Rows grad_rows(grad);
  const auto itemsize = static_cast<int64_t>(x.element_size());
  const Outputs out{bytes(dx), up ? bytes(dup) : bytes(dx) + parts.num_cols * itemsize, times * parts.num_cols};
  if (!bias) {
    for_tiles(FASTMP_BEST(gated_backward_tile), &grad_rows, parts, nullptr, out, nullptr, form);
    return {dx, dup, dbias};
  }
  bias = torch::stable::contiguous(*bias);
  const int64_t strips = (parts.gate.num_rows + kTileRows - 1) / kTileRows;
  const Tensor partials = fastmp::empty({strips, 2 * parts.num_cols}, compute_dtype(x.scalar_type()), x);
  for_tiles(FASTMP_BEST(gated_backward_tile), &grad_rows, parts, &*bias, out, &partials, form);
  sum_rows(partials, dbias);
  return {dx, dup, dbias};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "gated_activation", fastmp::gated_activation);
  FASTMP_IMPL(m, "gated_activation_backward", fastmp::gated_activation_backward);
  FASTMP_IMPL(m, "gated_activation_quantized", fastmp::gated_activation_quantized);
}

#endif  // FASTMP_ISA_BASE
