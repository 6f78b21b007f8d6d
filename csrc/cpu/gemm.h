// GEMM with an epilogue, shared by grouped GEMMs and weight gradients.
#pragma once

#include "activations.h"
#include "op.h"
#include "rows.h"

#include <vector>

namespace fastmp {

// Scales of blocks of an FP8 operand. That of element (outer, term) lies at (first + outer) / outer_block * outer_pitch
// + term / term_block * term_pitch, and is a float32 for blocks of 128 terms, a biased exponent for blocks of 32.
struct Scales {
  const void* data = nullptr;  // null: the operand is not FP8
  int64_t outer_pitch = 0, term_pitch = 0, outer_block = 1, term_block = 1, first = 0;
  bool e5m2 = false;  // else e4m3
};

// Element (outer, term) lies at outer * `outer` + term * `term`; one of the two is 1, of FP8 the latter. Outer are rows
// of the left operand, columns of the right one.
struct Operand {
  const void* data;
  int64_t outer, term;
  Scales scales{};
};

enum class Epilogue { kStore, kAdd, kActivate, kGate };

// A GEMM of `rows` x `cols` with `terms`, beginning where `a` and `b` do; kGate has as many columns again, at `up`.
// `out`, `kept` (or null; the pre-activation) and `bias` (or null) point to the first element or column; those of `up`
// are `up_offset` elements further in `kept` and `bias`. `few`: too few rows to pack the right operand for. FP8
// operands are dequantised to `dtype` before they are packed.
struct GemmDesc {
  Operand a, b;
  const void* up;
  const void* bias;
  void* out;
  void* kept;
  int64_t rows, cols, terms, out_pitch, kept_pitch, up_offset;
  ScalarType dtype, out_dtype;
  Epilogue epilogue;
  Form form;  // of the activation, for kActivate and kGate
  bool few;
};

#ifdef FASTMP_ISA_BASE

// Runs the GEMMs over all threads. `x` and `out` have the dtypes of (dequantised) operands and of results.
void run_gemms(const std::vector<GemmDesc>& gemms, const Tensor& x, const Tensor& out);

// With unit last stride; copied only where it has another.
inline Tensor along_rows(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 || t.numel() == 0 ? t : torch::stable::contiguous(t);
}

inline void check_operands(const char* op, const Tensor& a, const Tensor& b, int64_t a_dim, int64_t b_dim) {
  FASTMP_CHECK(a.dim() == a_dim && b.dim() == b_dim, op, ": operands have ", a.dim(), " and ", b.dim(), " dimensions");
  FASTMP_CHECK(a.scalar_type() == b.scalar_type(), op, ": operands are ", dtype_name(a.scalar_type()), " and ",
               dtype_name(b.scalar_type()));
  dispatch_float(a.scalar_type(), op, [](auto) {});
}

inline void* place(const Tensor& t, int64_t element) {
  return const_cast<char*>(at(t.const_data_ptr(), element, static_cast<int64_t>(t.element_size())));
}

inline void zero(const Tensor& t, int64_t element, int64_t count) {
  if (count > 0) std::memset(place(t, element), 0, static_cast<size_t>(count) * t.element_size());
}

// Calls body(expert, first row, rows) for each expert, and returns the first row after those of all experts. An end
// before its start, or beyond all rows, is clamped.
template <class Body>
int64_t for_experts(const char* op, const Tensor& offsets, int64_t num_rows, const Body& body) {
  FASTMP_CHECK(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Int, op, ": offsets must be int32 (E,)");
  const Tensor ends = torch::stable::contiguous(offsets);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  int64_t start = 0;
  for (int64_t expert = 0; expert < offsets.size(0); ++expert) {
    const int64_t next = std::max(start, std::min<int64_t>(end[expert], num_rows));
    body(expert, start, next - start);
    start = next;
  }
  return start;
}

inline void check_sum(const char* op, const Tensor& sum, const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  FASTMP_CHECK(sum.scalar_type() == compute_dtype(dtype) || sum.scalar_type() == dtype, op, ": x is ",
               dtype_name(dtype), " but the sum is ", dtype_name(sum.scalar_type()));
}

// out (N, K) = or += grad^T x, for `rows` rows of each from `first` on.
inline GemmDesc wgrad_desc(const Tensor& grad, const Tensor& x, int64_t first, int64_t rows, void* out,
                           int64_t out_pitch, ScalarType out_dtype, Epilogue epilogue) {
  GemmDesc gemm{};
  gemm.a = {place(grad, first * grad.stride(0)), 1, grad.stride(0)};
  gemm.b = {place(x, first * x.stride(0)), 1, x.stride(0)};
  gemm.rows = grad.size(1), gemm.cols = x.size(1), gemm.terms = rows;
  gemm.out = out, gemm.out_pitch = out_pitch;
  gemm.dtype = x.scalar_type(), gemm.out_dtype = out_dtype, gemm.epilogue = epilogue;
  return gemm;
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
