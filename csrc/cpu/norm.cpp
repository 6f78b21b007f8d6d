// rms_norm, layer_norm and their backward passes on the CPU.
//
// Rows are processed four at a time: the first pass has several memory streams, later passes hit the caches, and
// weight, bias and partial sums are loaded once per four rows. In the backward each strip of rows sums the weight and
// bias gradients into one row of partial sums, and `sum_rows` adds the strips in order. Strips depend on the shape
// alone, so results do not depend on the number of threads. 16-bit types are computed in fp32 and rounded once.
// Reference: fastmp/ops/norm.py.
#include "fp8.h"
#include "norm.h"
#include "op.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

namespace fastmp {

namespace FASTMP_ISA {

// Calls body(first column, number of lanes) for each vector of a row.
template <class V, class Body>
FASTMP_INLINE void for_vectors(int64_t num_cols, const Body& body) {
  constexpr int64_t kStep = num_lanes<V>;
  int64_t col = 0;
  for (; col + kStep <= num_cols; col += kStep) body(col, kStep);
  if (col < num_cols) body(col, num_cols - col);
}

// Computes y, total and the statistics of kRows rows, from row `row` of the strip on.
template <class T, int kRows, bool kCentred, bool kResidual>
void norm_rows(const NormStrip& strip, int64_t row) {
  using V = lanes_of<T>;
  using S = scalar_of<T>;
  const int64_t n = strip.num_cols;
  const S* weight = static_cast<const S*>(strip.weight);
  const S* bias = static_cast<const S*>(strip.bias);
  std::array<const T*, kRows> x, residual, in;
  std::array<T*, kRows> total, y;
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const T*>(strip.x) + (row + r) * strip.x_pitch;
    y[r] = static_cast<T*>(strip.y) + (row + r) * strip.y_pitch;
    in[r] = x[r];
    if constexpr (kResidual) {
      residual[r] = static_cast<const T*>(strip.residual) + (row + r) * strip.residual_pitch;
      total[r] = static_cast<T*>(strip.total) + (row + r) * n;
      in[r] = total[r];
    }
  }
  // 1. total = x + residual, rounded; sum for the mean, or squares in rms_norm.
  std::array<V, kRows> sums{};
  for_vectors<V>(n, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
    for (int r = 0; r < kRows; ++r) {
      prefetch(x[r] + col);
      V h = load(x[r] + col, count, 0);
      if constexpr (kResidual) {
        prefetch(residual[r] + col);
        store(total[r] + col, h + load(residual[r] + col, count, 0), count);
        h = load(in[r] + col, count, 0);  // rounded
      }
      sums[r] += kCentred ? h : h * h;
    }
  });
  std::array<S, kRows> mean{}, rstd;
  for (int r = 0; r < kRows; ++r) mean[r] = kCentred ? sum(sums[r]) / S(n) : S(0);
  // 2. layer_norm: squares of the centred rows.
  if constexpr (kCentred) {
    sums.fill(V{});
    for_vectors<V>(n, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
      for (int r = 0; r < kRows; ++r) {
        const V h = load(in[r] + col, count, mean[r]) - mean[r];
        sums[r] += h * h;
      }
    });
  }
  // 3. Statistics.
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = S(1) / std::sqrt(sum(sums[r]) / S(n) + S(strip.eps));
    static_cast<S*>(strip.rstd)[row + r] = rstd[r];
    if (kCentred) static_cast<S*>(strip.mean)[row + r] = mean[r];
  }
  // 4. y = (total - mean) rstd weight + bias.
  for_vectors<V>(n, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
    const V w = load(weight + col, count, 0);
    const V b = bias ? load(bias + col, count, 0) : broadcast<V>(S(-0.0));  // x + -0 is x, also where x is -0
    for (int r = 0; r < kRows; ++r) {
      V h = load(in[r] + col, count, 0);
      if constexpr (kCentred) h -= mean[r];
      store(y[r] + col, h * rstd[r] * w + b, count);
    }
  });
}

// Computes dx of kRows rows, from row `row` of the strip on, and adds to dweight and dbias, which row 0 initialises.
template <class T, int kRows, bool kCentred, bool kGradTotal>
void norm_backward_rows(const NormStrip& strip, int64_t row) {
  using V = lanes_of<T>;
  using S = scalar_of<T>;
  const int64_t n = strip.num_cols;
  const S* weight = static_cast<const S*>(strip.weight);
  S* dweight = static_cast<S*>(strip.dweight);
  S* dbias = static_cast<S*>(strip.dbias);
  std::array<const T*, kRows> grad, grad_total, total;
  std::array<T*, kRows> dx;
  std::array<S, kRows> rstd, mean{}, along, level;
  for (int r = 0; r < kRows; ++r) {
    grad[r] = static_cast<const T*>(strip.grad) + (row + r) * strip.grad_pitch;
    total[r] = static_cast<const T*>(strip.x) + (row + r) * strip.x_pitch;
    if (kGradTotal) grad_total[r] = static_cast<const T*>(strip.grad_total) + (row + r) * strip.grad_total_pitch;
    dx[r] = static_cast<T*>(strip.y) + (row + r) * strip.y_pitch;
    rstd[r] = static_cast<const S*>(strip.rstd)[row + r];
    if (kCentred) mean[r] = static_cast<const S*>(strip.mean)[row + r];
  }
  // 1. Row means of g w n (along) and g w (level), where n is the normalised row.
  std::array<V, kRows> alongs{}, levels{};
  for_vectors<V>(n, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
    const V w = load(weight + col, count, 0);
    for (int r = 0; r < kRows; ++r) {
      prefetch(grad[r] + col);
      prefetch(total[r] + col);
      const V g = load(grad[r] + col, count, 0) * w;
      V h = load(total[r] + col, count, 0);
      if constexpr (kCentred) {
        h -= mean[r];
        levels[r] += g;
      }
      alongs[r] += g * (h * rstd[r]);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    along[r] = sum(alongs[r]) / S(n);
    level[r] = sum(levels[r]) / S(n);
  }
  // 2. Parameter gradients, and dx = rstd (g w - n along - level) + grad_total.
  for_vectors<V>(n, [&](int64_t col, int64_t count) __attribute__((always_inline)) {
    const V w = load(weight + col, count, 0);
    V dw = row == 0 ? V{} : load(dweight + col, count, 0);
    V db = row == 0 || !dbias ? V{} : load(dbias + col, count, 0);
    for (int r = 0; r < kRows; ++r) {
      const V g = load(grad[r] + col, count, 0);
      V h = load(total[r] + col, count, 0);
      if constexpr (kCentred) h -= mean[r];
      h *= rstd[r];
      dw += g * h;
      db += g;
      V d = g * w - h * along[r];
      if constexpr (kCentred) d -= level[r];
      d *= rstd[r];
      if constexpr (kGradTotal) d += load(grad_total[r] + col, count, 0);
      store(dx[r] + col, d, count);
    }
    store(dweight + col, dw, count);
    if (dbias) store(dbias + col, db, count);
  });
}

// Calls body(T, centred, further) for a strip's element type and options.
template <class Body>
FASTMP_INLINE void dispatch_strip(const NormStrip& strip, bool further, const Body& body) {
  dispatch_float(strip.dtype, "norm", [&](auto tag) {
    if (strip.centred) {
      further ? body(tag, std::true_type{}, std::true_type{}) : body(tag, std::true_type{}, std::false_type{});
    } else {
      further ? body(tag, std::false_type{}, std::true_type{}) : body(tag, std::false_type{}, std::false_type{});
    }
  });
}

void norm_strip(const NormStrip& strip) {
  dispatch_strip(strip, strip.residual != nullptr, [&](auto tag, auto centred, auto residual) {
    using T = typename decltype(tag)::type;
    int64_t row = 0;
    for (; row + 4 <= strip.num_rows; row += 4) norm_rows<T, 4, centred, residual>(strip, row);
    for (; row < strip.num_rows; ++row) norm_rows<T, 1, centred, residual>(strip, row);
  });
}

void norm_backward_strip(const NormStrip& strip) {
  dispatch_strip(strip, strip.grad_total != nullptr, [&](auto tag, auto centred, auto grad_total) {
    using T = typename decltype(tag)::type;
    int64_t row = 0;
    for (; row + 4 <= strip.num_rows; row += 4) norm_backward_rows<T, 4, centred, grad_total>(strip, row);
    for (; row < strip.num_rows; ++row) norm_backward_rows<T, 1, centred, grad_total>(strip, row);
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x) {
  FASTMP_CHECK(x.dim() > 0, op, ": x must have at least one dimension");
  FASTMP_CHECK(parameter.dim() == 1 && parameter.size(0) == x.size(x.dim() - 1), op, ": ", name, " of ",
               parameter.numel(), " elements does not fit rows of ", x.size(x.dim() - 1));
}

// Sets the addresses of rstd and mean in `stats`.
void set_stats(NormStrip& all, const Tensor& stats) {
  all.rstd = stats.mutable_data_ptr();
  all.mean = advance(all.rstd, all.num_rows, static_cast<int64_t>(stats.element_size()));
}

// Returns total and the statistics; run(strip) computes them and y of all rows, of which there is at least one.
template <class Run>
std::tuple<Tensor, Tensor> forward(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                                   const Tensor& weight, const std::optional<Tensor>& bias, double eps, bool centred,
                                   const Run& run) {
  check_parameter(op, "weight", weight, x);
  if (bias) check_parameter(op, "bias", *bias, x);
  if (residual) check_same(op, "residual", *residual, "x", x);
  const ScalarType dtype = x.scalar_type();
  dispatch_float(dtype, op, [](auto) {});
  std::vector<int64_t> stats_sizes{centred ? 2 : 1};
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) stats_sizes.push_back(x.size(dim));
  Tensor total = residual ? fastmp::empty(x.sizes(), dtype, x) : fastmp::empty({0}, dtype, x);
  Tensor stats = fastmp::empty(stats_sizes, compute_dtype(dtype), x);
  if (x.numel() == 0) {
    if (stats.numel() > 0) torch::stable::zero_(stats);
    return {total, stats};
  }
  const Rows rows(x), residual_rows(residual ? *residual : x);
  const Tensor wide_weight = widened(weight, dtype), wide_bias = widened(bias ? *bias : weight, dtype);
  NormStrip all{};
  all.x = rows.tensor.const_data_ptr();
  all.x_pitch = rows.pitch;
  if (residual) {
    all.residual = residual_rows.tensor.const_data_ptr();
    all.residual_pitch = residual_rows.pitch;
    all.total = total.mutable_data_ptr();
  }
  all.weight = wide_weight.const_data_ptr();
  all.bias = bias ? wide_bias.const_data_ptr() : nullptr;
  all.num_rows = rows.num_rows;
  all.num_cols = all.y_pitch = rows.num_cols;
  set_stats(all, stats);
  all.eps = eps;
  all.dtype = dtype;
  all.centred = centred;
  run(all);
  return {total, stats};
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                                           const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                                           bool centred) {
  Tensor y = fastmp::empty(x.sizes(), x.scalar_type(), x);
  const auto [total, stats] = forward(op, x, residual, weight, bias, eps, centred, [&](NormStrip& all) {
    all.y = y.mutable_data_ptr();
    for_strips(FASTMP_BEST(norm_strip), all, 0);
  });
  return {y, total, stats};
}

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad, const std::optional<Tensor>& grad_total,
                                    const Tensor& total, const Tensor& weight, const Tensor& stats, bool centred,
                                    bool with_bias) {
  check_parameter(op, "weight", weight, total);
  check_same(op, "grad", grad, "total", total);
  if (grad_total) check_same(op, "grad_total", *grad_total, "total", total);
  const ScalarType dtype = total.scalar_type();
  const int64_t num_sums = with_bias ? 2 : 1, num_cols = weight.size(0);
  Tensor dx = fastmp::empty(total.sizes(), dtype, total);
  Tensor dparams = fastmp::empty({num_sums, num_cols}, weight.scalar_type(), total);
  if (total.numel() == 0) {
    if (dparams.numel() > 0) torch::stable::zero_(dparams);
    return {dx, dparams};
  }
  const Rows rows(total), grad_rows(grad), grad_total_rows(grad_total ? *grad_total : grad);
  const int64_t num_stats = centred ? 2 : 1;
  FASTMP_CHECK(
      stats.scalar_type() == compute_dtype(dtype) && stats.is_contiguous() &&
          stats.numel() == rows.num_rows * num_stats && stats.dim() == total.dim() && stats.size(0) == num_stats,
      op, ": stats are ", described(stats), ", but there are ", num_stats, " for each of ", rows.num_rows, " rows");
  const Tensor wide_weight = widened(weight, dtype);
  const int64_t strips = (rows.num_rows + strip_rows(rows.num_rows) - 1) / strip_rows(rows.num_rows);
  const Tensor partials = fastmp::empty({strips, num_sums * num_cols}, compute_dtype(dtype), total);
  NormStrip all{};
  all.x = rows.tensor.const_data_ptr();
  all.x_pitch = rows.pitch;
  all.grad = grad_rows.tensor.const_data_ptr();
  all.grad_pitch = grad_rows.pitch;
  if (grad_total) {
    all.grad_total = grad_total_rows.tensor.const_data_ptr();
    all.grad_total_pitch = grad_total_rows.pitch;
  }
  all.y = dx.mutable_data_ptr();
  all.weight = wide_weight.const_data_ptr();
  all.num_rows = rows.num_rows;
  all.num_cols = all.y_pitch = num_cols;
  set_stats(all, stats);
  all.dweight = partials.mutable_data_ptr();
  if (with_bias) all.dbias = advance(all.dweight, num_cols, static_cast<int64_t>(partials.element_size()));
  all.dtype = dtype;
  all.centred = centred;
  for_strips(FASTMP_BEST(norm_backward_strip), all, num_sums * num_cols);
  sum_rows(partials, dparams);
  return {dx, dparams};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight,
                                            double eps) {
  return forward("rms_norm", x, residual, weight, std::nullopt, eps, false);
}

// y in FP8: a few rows are computed into a buffer that stays in cache, and quantised from there.
std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_quantized(const Tensor& x, std::optional<Tensor> residual,
                                                              const Tensor& weight, double eps, int64_t block,
                                                              ScalarType dtype) {
  constexpr const char* kOp = "rms_norm_quantized";
  dispatch_fp8(dtype, kOp, [](auto) {});
  check_parameter(kOp, "weight", weight, x);
  Tensor s = empty_row_scales(kOp, num_rows_of(kOp, "x", x), weight.size(0), block, x);
  Tensor q = fastmp::empty(x.sizes(), dtype, x);
  const QuantizedRows out = rows_into(q, s, block, x.scalar_type());
  const auto [total, stats] = forward(kOp, x, residual, weight, std::nullopt, eps, false, [&](const NormStrip& all) {
    const int64_t row_bytes = all.num_cols * itemsize_of(all.dtype);
    const int64_t step = std::clamp<int64_t>(65536 / row_bytes / 4 * 4, 4, kStripRows);
    const int64_t steps = (all.num_rows + step - 1) / step, grain = std::max<int64_t>(1, 8192 / (step * all.num_cols));
    parallel_for(0, steps, grain, [&](int64_t begin, int64_t end) {
      std::vector<double> buffer((step * row_bytes + 7) / 8);
      for (int64_t row = begin * step; row < std::min(end * step, all.num_rows); row += step) {
        // 1. y of these rows, rounded to x's dtype.
        NormStrip strip = strip_of(all, row, step);
        strip.y = buffer.data();
        FASTMP_BEST(norm_strip)(strip);
        // 2. Quantise them.
        FASTMP_BEST(quantize_rows)(out.part(row, strip.num_rows, buffer.data()));
      }
    });
  });
  return {q, s, total, stats};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight,
                                              std::optional<Tensor> bias, double eps) {
  return forward("layer_norm", x, residual, weight, bias, eps, true);
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, std::optional<Tensor> grad_total, const Tensor& total,
                                             const Tensor& weight, const Tensor& stats) {
  return backward("rms_norm_backward", grad, grad_total, total, weight, stats, false, false);
}

std::tuple<Tensor, Tensor> layer_norm_backward(const Tensor& grad, std::optional<Tensor> grad_total,
                                               const Tensor& total, const Tensor& weight, const Tensor& stats,
                                               bool with_bias) {
  return backward("layer_norm_backward", grad, grad_total, total, weight, stats, true, with_bias);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "rms_norm", fastmp::rms_norm);
  FASTMP_IMPL(m, "rms_norm_quantized", fastmp::rms_norm_quantized);
  FASTMP_IMPL(m, "layer_norm", fastmp::layer_norm);
  FASTMP_IMPL(m, "rms_norm_backward", fastmp::rms_norm_backward);
  FASTMP_IMPL(m, "layer_norm_backward", fastmp::layer_norm_backward);
}

#endif  // FASTMP_ISA_BASE
