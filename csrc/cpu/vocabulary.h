// What the kernels over logits share: where a shard of the vocabulary lies in its rows, and checks of their arguments.
#pragma once

#include "op.h"

namespace fastmp {

// Columns [0, real) of a row are a vocabulary shard that starts at id `vocab_start`, [real, columns) are padding.
struct Shard {
  int64_t row_stride, real, columns, vocab_start;
  // The row's target as a column of this shard, or -1.
  int64_t column_of(int64_t target) const {
    return target >= vocab_start && target < vocab_start + real ? target - vocab_start : -1;
  }
};

#ifdef FASTMP_ISA_BASE

namespace {

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Rows for a thread, which has 32768 logits at least.
int64_t grain_of(int64_t columns) { return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, columns)); }

Shard local_shard(const char* op, const Tensor& logits, int64_t vocab_start, int64_t vocab_size) {
  FASTMP_CHECK(logits.dim() == 2, op, ": logits must be (N, V), got ", logits.dim(), " dimensions");
  const int64_t columns = logits.size(1);
  FASTMP_CHECK(vocab_start >= 0 && vocab_start <= int64_t{1} << 62 && vocab_size > 0, op,
               ": expected vocab_start from 0 to 2**62 and a positive vocab_size, got vocab_start=", vocab_start,
               " and vocab_size=", vocab_size);
  FASTMP_CHECK(columns <= 1 || logits.stride(1) == 1, op, ": neighbouring columns of the logits must be next to each ",
               "other in memory, got stride ", logits.stride(1));
  return {logits.stride(0), std::clamp<int64_t>(vocab_size - vocab_start, 0, columns), columns, vocab_start};
}

// `tensor` as contiguous numbers, one a token.
Tensor per_token(const char* op, const char* name, const Tensor& tensor, int64_t tokens, ScalarType dtype) {
  FASTMP_CHECK(tensor.dim() == 1 && tensor.size(0) == tokens && tensor.scalar_type() == dtype, op, ": ", name,
               " must be ", dtype_name(dtype), " (", tokens, "), got ", dtype_name(tensor.scalar_type()), " with ",
               tensor.numel(), " elements");
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
