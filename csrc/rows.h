// A tensor (..., N) as rows of N contiguous elements, and sums over rows in a fixed order.
#pragma once

#include "stable.h"

#include <algorithm>
#include <type_traits>

namespace fastmp {

// Rows start `pitch` elements apart. Copies the tensor, which must not be empty, only if one pitch cannot describe it.
struct Rows {
  Tensor tensor;
  int64_t num_rows, num_cols, pitch;

  explicit Rows(const Tensor& any) : tensor(any) {
    const int64_t last = any.dim() - 1;
    num_cols = any.size(last);
    num_rows = any.numel() / num_cols;
    pitch = num_cols;
    if (any.is_contiguous()) return;
    bool regular = last > 0 && (num_cols == 1 || any.stride(last) == 1);
    for (int64_t dim = last - 1; regular && dim > 0; --dim) {
      regular = any.stride(dim - 1) == any.stride(dim) * any.size(dim);
    }
    if (regular) {
      pitch = any.stride(last - 1);
    } else {
      tensor = torch::stable::contiguous(any);
    }
  }
};

// Returns the address of an element whose type the caller does not know.
inline const char* at(const void* base, int64_t element, int64_t itemsize) {
  return static_cast<const char*>(base) + element * itemsize;
}

template <typename Sum, typename T>
void sum_rows(const Sum* in, T* out, int64_t num_rows, int64_t num_cols) {
  constexpr int64_t kColumns = 512;
  parallel_for(0, (num_cols + kColumns - 1) / kColumns, 8, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kColumns; first < std::min(end * kColumns, num_cols); first += kColumns) {
      const int64_t count = std::min(kColumns, num_cols - first);
      Sum total[kColumns] = {};
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t col = 0; col < count; ++col) total[col] += in[row * num_cols + first + col];
      }
      for (int64_t col = 0; col < count; ++col) out[first + col] = static_cast<T>(total[col]);
    }
  });
}

// sums (N,) = sum of the rows of `partials` (strips, N), float or double, first to last, rounded to the dtype of
// `sums`. Threads share blocks of columns.
inline void sum_rows(const Tensor& partials, const Tensor& sums) {
  const int64_t num_rows = partials.size(0), num_cols = partials.size(1);
  dispatch_float(sums.scalar_type(), "sum_rows", [&](auto tag) {
    auto* out = sums.mutable_data_ptr<typename decltype(tag)::type>();
    if (partials.scalar_type() == ScalarType::Double) {
      sum_rows(partials.const_data_ptr<double>(), out, num_rows, num_cols);
    } else {
      sum_rows(partials.const_data_ptr<float>(), out, num_rows, num_cols);
    }
  });
}

}  // namespace fastmp
