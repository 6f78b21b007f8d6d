// latent_norm_rope and its backward on the CPU: rms_norm of the first columns of a row and rope of the others.
//
// A strip of rows is normalised and rotated while it is in cache, by the kernels of norm.cpp and rope.cpp. Its sums of
// the weight's gradient are added in order, so results do not depend on the number of threads.
// Reference: fastmp/ops/latent.py.
#include "norm.h"
#include "op.h"
#include "rope.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <tuple>
#include <vector>

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

// Widths of a row, C + 2 half, and the rows that each row of cos and sin turns.
struct Latents {
  int64_t rank, half, rows_per_turn;
};

Latents checked(const char* op, const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin) {
  dispatch_float(x.scalar_type(), op, [](auto) {});
  FASTMP_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.numel() > 0 && cos.dim() > 0 &&
                   weight.size(0) + 2 * cos.size(cos.dim() - 1) == x.size(x.dim() - 1),
               op, ": rows of x, ", described(x), ", are not those of weight, ", described(weight), ", and twice cos, ",
               described(cos));
  const ScalarType compute = compute_dtype(x.scalar_type());
  FASTMP_CHECK(cos.scalar_type() == compute, op, ": cos must be ", dtype_name(compute), ", got ",
               dtype_name(cos.scalar_type()));
  check_same(op, "sin", sin, "cos", cos);
  bool fits = cos.dim() <= x.dim();
  for (int64_t dim = 0; fits && dim + 1 < cos.dim(); ++dim) fits = cos.size(dim) == x.size(dim);
  FASTMP_CHECK(fits, op, ": cos, ", described(cos), ", does not fit the leading dimensions of x, ", described(x));
  Latents sizes{weight.size(0), cos.size(cos.dim() - 1), 1};
  for (int64_t dim = cos.dim() - 1; dim + 1 < x.dim(); ++dim) sizes.rows_per_turn *= x.size(dim);
  return sizes;
}

// Rotates rows [first, end), one run for each row of cos and sin. In `all`, x and y are those of row 0.
void rotate(const RopeRun& all, int64_t rows_per_turn, int64_t first, int64_t end) {
  const int64_t itemsize = itemsize_of(all.dtype), turn_itemsize = itemsize_of(compute_dtype(all.dtype));
  for (int64_t row = first; row < end && all.half > 0;) {
    RopeRun run = all;
    const int64_t turn = row / rows_per_turn;
    run.num_rows = rows_per_turn == 1 ? end - row : std::min(end, (turn + 1) * rows_per_turn) - row;
    run.turn_pitch = rows_per_turn == 1 ? all.half : 0;
    run.x = advance(all.x, row * all.x_pitch, itemsize);
    run.y = advance(all.y, row * all.y_pitch, itemsize);
    run.cos = advance(all.cos, turn * all.half, turn_itemsize);
    run.sin = advance(all.sin, turn * all.half, turn_itemsize);
    FASTMP_BEST(rope_run)(run);
    row += run.num_rows;
  }
}

RopeRun rope_of(const Tensor& x, const Tensor& cos, const Tensor& sin, const Latents& sizes, bool interleaved) {
  RopeRun run{};
  run.cos = cos.const_data_ptr();
  run.sin = sin.const_data_ptr();
  run.num_cols = 2 * sizes.half;
  run.half = sizes.half;
  run.dtype = x.scalar_type();
  run.interleaved = interleaved;
  return run;
}

std::vector<int64_t> with_columns(const Tensor& x, int64_t columns) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  return shape;
}

std::tuple<Tensor, Tensor, Tensor> latent_norm_rope(const Tensor& x, const Tensor& weight, const Tensor& cos,
                                                    const Tensor& sin, double eps, bool interleaved) {
  const Latents sizes = checked("latent_norm_rope", x, weight, cos, sin);
  const ScalarType dtype = x.scalar_type();
  Tensor latent = fastmp::empty(with_columns(x, sizes.rank), dtype, x);
  Tensor shared = fastmp::empty(with_columns(x, 2 * sizes.half), dtype, x);
  std::vector<int64_t> leading(x.sizes().begin(), x.sizes().end() - 1);
  Tensor rstd = fastmp::empty(leading, compute_dtype(dtype), x);
  if (x.numel() == 0) return {latent, shared, rstd};
  const Rows rows(x);
  const Tensor wide_weight = widened(weight, dtype);
  const Tensor dense_cos = torch::stable::contiguous(cos), dense_sin = torch::stable::contiguous(sin);
  NormStrip all{};
  all.x = rows.tensor.const_data_ptr();
  all.x_pitch = rows.pitch;
  all.y = latent.mutable_data_ptr();
  all.y_pitch = all.num_cols = sizes.rank;
  all.weight = wide_weight.const_data_ptr();
  all.rstd = rstd.mutable_data_ptr();
  all.num_rows = rows.num_rows;
  all.eps = eps;
  all.dtype = dtype;
  RopeRun run = rope_of(x, dense_cos, dense_sin, sizes, interleaved);
  run.x = advance(all.x, sizes.rank, itemsize_of(dtype));
  run.x_pitch = rows.pitch;
  run.y = shared.mutable_data_ptr();
  run.y_pitch = run.num_cols;
  for_strips(
      [&](const NormStrip& strip) {
        FASTMP_BEST(norm_strip)(strip);
        rotate(run, sizes.rows_per_turn, strip.first_row, strip.first_row + strip.num_rows);
      },
      all, 0);
  return {latent, shared, rstd};
}

std::tuple<Tensor, Tensor> latent_norm_rope_backward(const Tensor& grad_latent, const Tensor& grad_shared,
                                                     const Tensor& x, const Tensor& weight, const Tensor& cos,
                                                     const Tensor& sin, const Tensor& rstd, bool interleaved) {
  constexpr const char* kOp = "latent_norm_rope_backward";
  const Latents sizes = checked(kOp, x, weight, cos, sin);
  const ScalarType dtype = x.scalar_type();
  const auto check_columns = [&](const char* name, const Tensor& grad, int64_t columns) {
    const std::vector<int64_t> shape = with_columns(x, columns);
    FASTMP_CHECK(grad.scalar_type() == dtype && grad.dim() == x.dim() &&
                     std::equal(shape.begin(), shape.end(), grad.sizes().begin()),
                 kOp, ": ", name, " is ", described(grad), ", which does not fit ", columns, " columns of x, ",
                 described(x));
  };
  check_columns("grad_latent", grad_latent, sizes.rank);
  check_columns("grad_shared", grad_shared, 2 * sizes.half);
  FASTMP_CHECK(rstd.scalar_type() == compute_dtype(dtype) && rstd.dim() + 1 == x.dim() &&
                   std::equal(rstd.sizes().begin(), rstd.sizes().end(), x.sizes().begin()),
               kOp, ": rstd is ", described(rstd), ", but x is ", described(x));
  Tensor dx = fastmp::empty(x.sizes(), dtype, x);
  Tensor dweight = fastmp::empty({sizes.rank}, weight.scalar_type(), x);
  if (x.numel() == 0) {
    torch::stable::zero_(dweight);
    return {dx, dweight};
  }
  const Rows rows(x), grad_rows(grad_latent);
  const Tensor wide_weight = widened(weight, dtype), dense_rstd = torch::stable::contiguous(rstd);
  const Tensor dense_cos = torch::stable::contiguous(cos), dense_sin = torch::stable::contiguous(sin);
  const int64_t strips = (rows.num_rows + strip_rows(rows.num_rows) - 1) / strip_rows(rows.num_rows);
  const Tensor partials = fastmp::empty({strips, sizes.rank}, compute_dtype(dtype), x);
  NormStrip all{};
  all.x = rows.tensor.const_data_ptr();
  all.x_pitch = rows.pitch;
  all.grad = grad_rows.tensor.const_data_ptr();
  all.grad_pitch = grad_rows.pitch;
  all.y = dx.mutable_data_ptr();
  all.y_pitch = rows.num_cols;
  all.num_cols = sizes.rank;
  all.weight = wide_weight.const_data_ptr();
  all.rstd = dense_rstd.mutable_data_ptr();
  all.dweight = partials.mutable_data_ptr();
  all.num_rows = rows.num_rows;
  all.dtype = dtype;
  RopeRun run = rope_of(x, dense_cos, dense_sin, sizes, interleaved);
  const Rows shared_rows(sizes.half ? grad_shared : grad_latent);
  run.x = shared_rows.tensor.const_data_ptr();
  run.x_pitch = shared_rows.pitch;
  run.y = advance(all.y, sizes.rank, itemsize_of(dtype));
  run.y_pitch = rows.num_cols;
  run.inverse = true;
  for_strips(
      [&](const NormStrip& strip) {
        FASTMP_BEST(norm_backward_strip)(strip);
        rotate(run, sizes.rows_per_turn, strip.first_row, strip.first_row + strip.num_rows);
      },
      all, sizes.rank);
  sum_rows(partials, dweight);
  return {dx, dweight};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "latent_norm_rope", fastmp::latent_norm_rope);
  FASTMP_IMPL(m, "latent_norm_rope_backward", fastmp::latent_norm_rope_backward);
}

#endif  // FASTMP_ISA_BASE
