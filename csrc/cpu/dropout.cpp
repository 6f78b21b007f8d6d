// bias_dropout_add and its backward on the CPU.
//
// Threads share tiles of at most 64 rows and 8192 columns; the bias gradient is summed as in activation.cpp. The mask
// is defined in fastmp/ops/dropout.py: word i % 4 of Philox(i / 4) for element i.
#include "op.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <tuple>

namespace fastmp {

constexpr int64_t kDropTileRows = 64;
constexpr int64_t kDropTileCols = 8192;

// A tile (num_rows, num_cols) of all tensors; pitches are in elements. Element (row, col) has index
// first + row * width + col in the whole tensor.
struct DropTile {
  const void* x;         // null in the backward
  const void* bias;      // (num_cols,), or null
  const void* residual;  // the gradient in the backward
  void* out;             // y or dx
  void* partials;        // (num_cols,) in the compute type, or null without a bias
  int64_t num_rows, num_cols, x_pitch, residual_pitch, out_pitch, first, width;
  ScalarType dtype;  // of x, bias and their gradients
  bool wide;         // the residual is fp32, x is 16-bit
  bool drops;
  uint64_t seed;
  uint32_t threshold;
  double scale;
};

FASTMP_DECLARE(void bias_dropout_add_tile(const DropTile&); void bias_dropout_add_backward_tile(const DropTile&);)

namespace FASTMP_ISA {

// Functions that zero dropped lanes: lanes whose word is at least the threshold are kept.
struct Kept {
  words word;
  uint32_t threshold;
  FASTMP_INLINE floats operator()(floats v) const { return select(word >= threshold, v, floats{}); }
};
struct KeptInMemory {
  const uint32_t* word;
  uint32_t threshold;
  FASTMP_INLINE floats operator()(floats v) const {
    words loaded;
    std::memcpy(&loaded, word, sizeof loaded);
    return Kept{loaded, threshold}(v);
  }
  FASTMP_INLINE doubles operator()(doubles v) const {
    for (int i = 0; i < kDoubles; ++i) v[i] = word[i] >= threshold ? v[i] : 0.0;
    return v;
  }
};
struct AllKept {
  template <class V>
  FASTMP_INLINE V operator()(V v) const {
    return v;
  }
};

// Calls body(col, count, kept) for the vectors of a row, `count` lanes each. If the row starts inside a group of four
// elements that share a Philox counter, the first vector is short.
template <class V, bool kDrops, class Body>
FASTMP_INLINE void for_vectors(const DropTile& tile, int64_t row, const Body& body) {
  constexpr int64_t kStep = num_lanes<V>;
  int64_t col = 0;
  if constexpr (!kDrops) {
    for (; col + kStep <= tile.num_cols; col += kStep) body(col, kStep, AllKept{});
    if (col < tile.num_cols) body(col, tile.num_cols - col, AllKept{});
    return;
  }
  // 1. Elements up to the next group of four. 2. Whole Philox blocks. 3. The rest.
  const auto index = static_cast<uint64_t>(tile.first + row * tile.width);
  const auto up_to = [&](int64_t end) __attribute__((always_inline)) {
    uint32_t made[kBlock + kFloats] = {};
    const Words block = philox(tile.seed, (index + col) / 4);
    std::memcpy(made, &block, sizeof block);
    const uint32_t* word = made + (index + col) % 4;
    for (; col < end; col += kStep, word += kStep) {
      body(col, std::min(kStep, end - col), KeptInMemory{word, tile.threshold});
    }
    col = end;
  };
  if (index % 4 != 0) up_to(std::min<int64_t>(4 - index % 4, tile.num_cols));
  while (col + kBlock <= tile.num_cols) {
    if constexpr (std::is_same_v<V, floats>) {
      const Words block = philox(tile.seed, (index + col) / 4);
      body(col, kStep, Kept{block.first, tile.threshold});
      body(col + kStep, kStep, Kept{block.second, tile.threshold});
      col += kBlock;
    } else {
      up_to(col + kBlock);
    }
  }
  if (col < tile.num_cols) up_to(tile.num_cols);
}

// Calls body(T, R) with the element types of x and of the residual.
template <class Body>
FASTMP_INLINE void dispatch_types(const DropTile& tile, const Body& body) {
  dispatch_float(tile.dtype, "bias_dropout_add", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (tile.wide) return body(tag, TypeTag<float>{});
    }
    body(tag, tag);
  });
}

template <bool kDrops, class T, class R>
FASTMP_INLINE void add_rows(const DropTile& tile) {
  using V = lanes_of<T>;
  const T* bias = static_cast<const T*>(tile.bias);
  const V scale = broadcast<V>(static_cast<scalar_of<T>>(tile.scale));
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const T* x = static_cast<const T*>(tile.x) + row * tile.x_pitch;
    const R* residual = static_cast<const R*>(tile.residual) + row * tile.residual_pitch;
    R* y = static_cast<R*>(tile.out) + row * tile.out_pitch;
    for_vectors<V, kDrops>(tile, row, [&](int64_t col, int64_t count, auto kept) __attribute__((always_inline)) {
      prefetch(x + col);
      prefetch(residual + col);
      V h = load(x + col, count, 0);
      if (bias) h += load(bias + col, count, 0);
      if constexpr (kDrops) h = kept(h * scale);
      store(y + col, h + load(residual + col, count, 0), count);
    });
  }
}

void bias_dropout_add_tile(const DropTile& tile) {
  dispatch_types(tile, [&](auto x, auto residual) {
    using T = typename decltype(x)::type;
    using R = typename decltype(residual)::type;
    tile.drops ? add_rows<true, T, R>(tile) : add_rows<false, T, R>(tile);
  });
}

void bias_dropout_add_backward_tile(const DropTile& tile) {
  dispatch_types(tile, [&](auto x, auto residual) {
    using T = typename decltype(x)::type;
    using R = typename decltype(residual)::type;
    using V = lanes_of<T>;
    const V scale = broadcast<V>(static_cast<scalar_of<T>>(tile.scale));
    auto* partials = static_cast<scalar_of<T>*>(tile.partials);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      const R* grad = static_cast<const R*>(tile.residual) + row * tile.residual_pitch;
      T* dx = static_cast<T*>(tile.out) + row * tile.out_pitch;
      for_vectors<V, true>(tile, row, [&](int64_t col, int64_t count, auto kept) __attribute__((always_inline)) {
        prefetch(grad + col);
        const V dh = kept(load(grad + col, count, 0) * scale);
        store(dx + col, dh, count);
        if (partials) store(partials + col, row == 0 ? dh : load(partials + col, count, 0) + dh, count);
      });
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

bool is_wide(ScalarType dtype, ScalarType residual) {
  return residual == ScalarType::Float && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
}

// The parts of a tile that all tiles share. `residual` is the residual, or the gradient in the backward.
DropTile describe(const char* op, ScalarType dtype, const Tensor& residual, double p,
                  const std::optional<Tensor>& seed) {
  dispatch_float(dtype, op, [](auto) {});
  FASTMP_CHECK(residual.dim() > 0, op, ": tensors must have at least one dimension");
  FASTMP_CHECK(residual.scalar_type() == dtype || is_wide(dtype, residual.scalar_type()), op, ": x is ",
               dtype_name(dtype), " but residual or gradient is ", dtype_name(residual.scalar_type()));
  FASTMP_CHECK(p >= 0 && p <= 1, op, ": p must lie between 0 and 1, got ", p);
  DropTile tile{};
  tile.dtype = dtype;
  tile.wide = residual.scalar_type() != dtype;
  tile.drops = seed.has_value();
  if (seed) {
    FASTMP_CHECK(seed->scalar_type() == ScalarType::Long && seed->numel() == 1, op, ": seed must be one int64 number");
    tile.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
    tile.threshold = static_cast<uint32_t>(std::min(std::nearbyint(p * 0x1p32), 4294967295.0));
    tile.scale = 1.0 / (1.0 - p);
  }
  return tile;
}

// Calls kernel(tile) on every tile of `out`, over all threads. `partials` has one row for each strip of rows.
template <class Kernel>
void for_tiles(const Kernel& kernel, const DropTile& shared, const Rows* x, const Tensor* bias, const Rows& residual,
               const Tensor& out, const Tensor* partials) {
  const int64_t num_rows = residual.num_rows, num_cols = residual.num_cols;
  const int64_t strips = (num_rows + kDropTileRows - 1) / kDropTileRows;
  const int64_t blocks = (num_cols + kDropTileCols - 1) / kDropTileCols;
  const auto itemsize = [](const Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); };
  const auto run = [&](int64_t index) {
    const int64_t strip = index / blocks, row = strip * kDropTileRows, col = index % blocks * kDropTileCols;
    DropTile tile = shared;
    tile.num_rows = std::min(kDropTileRows, num_rows - row);
    tile.num_cols = std::min(kDropTileCols, num_cols - col);
    tile.first = row * num_cols + col;
    tile.width = tile.out_pitch = num_cols;
    if (x) {
      tile.x_pitch = x->pitch;
      tile.x = at(x->tensor.const_data_ptr(), row * x->pitch + col, itemsize(x->tensor));
    }
    if (bias) tile.bias = at(bias->const_data_ptr(), col, itemsize(*bias));
    tile.residual_pitch = residual.pitch;
    tile.residual = at(residual.tensor.const_data_ptr(), row * residual.pitch + col, itemsize(residual.tensor));
    tile.out = const_cast<char*>(at(out.mutable_data_ptr(), tile.first, itemsize(out)));
    if (partials) {
      tile.partials = const_cast<char*>(at(partials->mutable_data_ptr(), strip * num_cols + col, itemsize(*partials)));
    }
    kernel(tile);
  };
  const int64_t elements = std::min(kDropTileRows, num_rows) * std::min(kDropTileCols, num_cols);
  parallel_for(0, strips * blocks, std::max<int64_t>(1, 16384 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) run(index);
  });
}

void bias_dropout_add_into(const Tensor& x, std::optional<Tensor> bias, const Tensor& residual, double p,
                           std::optional<Tensor> seed, Tensor& y) {
  constexpr const char* kOp = "bias_dropout_add";
  const DropTile shared = describe(kOp, x.scalar_type(), residual, p, seed);
  FASTMP_CHECK(same_sizes(x, residual), kOp, ": x is ", described(x), " but residual is ", described(residual));
  check_bias(kOp, bias, x);
  check_same(kOp, "out", y, "residual", residual);
  if (x.numel() == 0) return;
  if (seed && p == 1) {
    torch::stable::copy_(y, residual);
    return;
  }
  const Rows x_rows(x), residual_rows(residual);
  if (bias) bias = torch::stable::contiguous(*bias);
  Tensor out = y.is_contiguous() ? y : fastmp::empty(x.sizes(), residual.scalar_type(), x);
  for_tiles(FASTMP_BEST(bias_dropout_add_tile), shared, &x_rows, bias ? &*bias : nullptr, residual_rows, out, nullptr);
  if (!y.is_contiguous()) torch::stable::copy_(y, out);
}

Tensor bias_dropout_add(const Tensor& x, std::optional<Tensor> bias, const Tensor& residual, double p,
                        std::optional<Tensor> seed) {
  Tensor y = fastmp::empty(x.sizes(), residual.scalar_type(), x);
  bias_dropout_add_into(x, bias, residual, p, seed, y);
  return y;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& grad, double p, const Tensor& seed, ScalarType dtype,
                                                     bool with_bias) {
  const DropTile shared = describe("bias_dropout_add_backward", dtype, grad, p, seed);
  Tensor dx = fastmp::empty(grad.sizes(), dtype, grad);
  Tensor dbias = fastmp::empty({with_bias ? grad.size(grad.dim() - 1) : 0}, dtype, grad);
  if (grad.numel() == 0 || p == 1) return {torch::stable::zero_(dx), torch::stable::zero_(dbias)};
  const Rows rows(grad);
  if (!with_bias) {
    for_tiles(FASTMP_BEST(bias_dropout_add_backward_tile), shared, nullptr, nullptr, rows, dx, nullptr);
    return {dx, dbias};
  }
  const int64_t strips = (rows.num_rows + kDropTileRows - 1) / kDropTileRows;
  const ScalarType compute = compute_dtype(dtype);
  const Tensor partials = fastmp::empty({strips, rows.num_cols}, compute, grad);
  for_tiles(FASTMP_BEST(bias_dropout_add_backward_tile), shared, nullptr, nullptr, rows, dx, &partials);
  sum_rows(partials, dbias);
  return {dx, dbias};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "bias_dropout_add", fastmp::bias_dropout_add);
  FASTMP_IMPL(m, "bias_dropout_add_into", fastmp::bias_dropout_add_into);
  FASTMP_IMPL(m, "bias_dropout_add_backward", fastmp::bias_dropout_add_backward);
}

#endif  // FASTMP_ISA_BASE
