// A strip of rows to normalise, or whose gradients to compute, and the walk over all strips of a tensor.
//
// Strips depend on the shape alone, so sums over their rows, added strip by strip, do not depend on the number of
// threads.
#pragma once

#include "rows.h"
#include "simd.h"

#include <algorithm>

namespace fastmp {

constexpr int64_t kStripRows = 64;
constexpr int64_t kMaxStrips = 256;

// A strip of rows; pitches are in elements. x, residual, grad, grad_total, total and y (or dx) are in `dtype`, all
// others in the compute type. `residual`, `bias` and `grad_total` may be null. In the backward x is total and y is dx.
// `first_row` is the strip's place in the tensor.
struct NormStrip {
  const void *x, *residual, *grad, *grad_total;
  void *total, *y;
  const void *weight, *bias;
  void *rstd, *mean, *dweight, *dbias;
  int64_t first_row, num_rows, num_cols, x_pitch, residual_pitch, grad_pitch, grad_total_pitch, y_pitch;
  double eps;
  ScalarType dtype;
  bool centred;
};

FASTMP_DECLARE(void norm_strip(const NormStrip&); void norm_backward_strip(const NormStrip&);)

#ifdef FASTMP_ISA_BASE

inline int64_t strip_rows(int64_t num_rows) {
  const int64_t wanted = (num_rows + kMaxStrips - 1) / kMaxStrips;
  return std::max(kStripRows, (wanted + 3) / 4 * 4);
}

// Returns a parameter contiguous and in the compute type.
inline Tensor widened(const Tensor& parameter, ScalarType dtype) {
  const ScalarType compute = compute_dtype(dtype);
  return torch::stable::contiguous(parameter.scalar_type() == compute ? parameter
                                                                      : torch::stable::to(parameter, compute));
}

inline const void* advance(const void* base, int64_t elements, int64_t itemsize) {
  return base ? at(base, elements, itemsize) : nullptr;
}
inline void* advance(void* base, int64_t elements, int64_t itemsize) {
  return const_cast<void*>(advance(static_cast<const void*>(base), elements, itemsize));
}

inline int64_t itemsize_of(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

// Returns rows [row, row + num_rows) of `all`, or up to its last.
inline NormStrip strip_of(const NormStrip& all, int64_t row, int64_t num_rows) {
  const int64_t itemsize = itemsize_of(all.dtype), size = itemsize_of(compute_dtype(all.dtype));
  NormStrip strip = all;
  strip.first_row = row;
  strip.num_rows = std::min(num_rows, all.num_rows - row);
  strip.x = advance(all.x, row * all.x_pitch, itemsize);
  strip.residual = advance(all.residual, row * all.residual_pitch, itemsize);
  strip.grad = advance(all.grad, row * all.grad_pitch, itemsize);
  strip.grad_total = advance(all.grad_total, row * all.grad_total_pitch, itemsize);
  strip.total = advance(all.total, row * all.num_cols, itemsize);
  strip.y = advance(all.y, row * all.y_pitch, itemsize);
  strip.rstd = advance(all.rstd, row, size);
  strip.mean = advance(all.mean, row, size);
  return strip;
}

// Calls kernel(strip) on every strip of `all`, over all threads; a strip has `sums` elements of partial sums.
template <class Kernel>
void for_strips(const Kernel& kernel, const NormStrip& all, int64_t sums) {
  const int64_t rows = strip_rows(all.num_rows), strips = (all.num_rows + rows - 1) / rows;
  const int64_t size = itemsize_of(compute_dtype(all.dtype));
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, std::min(rows, all.num_rows) * all.num_cols));
  parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      NormStrip strip = strip_of(all, index * rows, rows);
      strip.dweight = advance(all.dweight, index * sums, size);
      strip.dbias = advance(all.dbias, index * sums, size);
      kernel(strip);
    }
  });
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
