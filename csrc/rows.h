// A tensor (..., N) seen as rows of N neighbouring elements, for kernels over the last dimension.
#pragma once

#include "stable.h"

namespace fastmp {

// `pitch` elements lie from one row's start to the next. Copies only where no single pitch describes the tensor,
// which must not be empty.
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

}  // namespace fastmp
