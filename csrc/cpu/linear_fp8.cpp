// GEMMs of FP8 operands on the CPU: gemm.cpp dequantises panels to the result's dtype, exactly, and multiplies those.
// The semantics are those of the references in fastmp/ops/linear_fp8.py and grouped_mm_fp8.py.
#include "gemm.h"

#include <optional>
#include <vector>

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int32_t kE8m0 = static_cast<int32_t>(ScalarType::Float8_e8m0fnu);  // which the ABI of torch 2.10 cannot name

int32_t dtype_code(const Tensor& t) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

int64_t block_of(const Tensor& scales) { return dtype_code(scales) == kE8m0 ? 32 : 128; }

void check_fp8(const char* op, const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale,
               bool experts) {
  const int32_t scale = dtype_code(s);
  FASTMP_CHECK(q.scalar_type() == ScalarType::Float8_e4m3fn || q.scalar_type() == ScalarType::Float8_e5m2, op,
               ": q must be Float8_e4m3fn or Float8_e5m2, got ", dtype_name(q.scalar_type()));
  FASTMP_CHECK(w.scalar_type() == ScalarType::Float8_e4m3fn, op, ": w must be Float8_e4m3fn, got ",
               dtype_name(w.scalar_type()));
  FASTMP_CHECK(scale == kE8m0 || s.scalar_type() == ScalarType::Float, op,
               ": s must be Float or Float8_e8m0fnu, got ", dtype_name(s.scalar_type()));
  FASTMP_CHECK(dtype_code(w_scale) == scale, op, ": s and w_scale must have one dtype");
  const int64_t dims = experts ? 3 : 2, block = block_of(s);
  FASTMP_CHECK(q.dim() == 2 && s.dim() == 2 && w.dim() == dims && w_scale.dim() == dims, op, ": q, s, w and w_scale have ",
               q.dim(), ", ", s.dim(), ", ", w.dim(), " and ", w_scale.dim(), " dimensions");
  const int64_t k = q.size(1), n = w.size(dims - 2);
  FASTMP_CHECK(w.size(dims - 1) == k && k % block == 0 && n % block == 0 && s.size(0) == q.size(0) &&
                   s.size(1) == k / block && w_scale.size(dims - 2) == n / block && w_scale.size(dims - 1) == k / block &&
                   w_scale.size(0) == (experts ? w.size(0) : n / block),
               op, ": scales in blocks of ", block, " do not fit q ", described(q), " and w ", described(w));
}

Operand fp8_operand(const Tensor& q, const Tensor& s, int64_t expert, int64_t first, bool rows) {
  const int64_t dim = q.dim() - 2, block = block_of(s);
  Operand operand{place(q, (dim ? expert * q.stride(0) : 0) + first * q.stride(dim)), q.stride(dim), 1};
  operand.scales.data = place(s, (dim ? expert * s.stride(0) : 0) + first * s.stride(dim));
  operand.scales.outer_pitch = s.stride(dim), operand.scales.term_pitch = s.stride(dim + 1);
  operand.scales.outer_block = rows ? 1 : block, operand.scales.term_block = block;
  operand.scales.e5m2 = q.scalar_type() == ScalarType::Float8_e5m2;
  return operand;
}

// Returns the GEMM of rows [first, first + rows) by the weight of `expert`.
GemmDesc fp8_gemm(const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale, const Tensor& y,
                  int64_t expert, int64_t first, int64_t rows) {
  GemmDesc gemm{};
  gemm.a = fp8_operand(q, s, 0, first, true);
  gemm.b = fp8_operand(w, w_scale, expert, 0, false);
  gemm.rows = rows, gemm.cols = y.size(1), gemm.terms = q.size(1);
  gemm.out = place(y, first * gemm.cols), gemm.out_pitch = gemm.cols;
  gemm.dtype = gemm.out_dtype = y.scalar_type(), gemm.epilogue = Epilogue::kStore;
  return gemm;
}

// Multiplies rows of q by the weight of their expert, or by the only weight if there are no offsets.
Tensor fp8_gemms(const char* op, const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale,
                 const Tensor* offsets, ScalarType out_dtype) {
  dispatch_float(out_dtype, op, [](auto) {});
  check_fp8(op, q, s, w, w_scale, offsets != nullptr);
  FASTMP_CHECK(!offsets || offsets->numel() == w.size(0), op, ": ", offsets->numel(), " offsets do not fit w ",
               described(w));
  const int64_t num_rows = q.size(0), cols = w.size(w.dim() - 2);
  // float16 has too few exponents for dequantised operands
  Tensor y = fastmp::empty({num_rows, cols}, out_dtype == ScalarType::Half ? ScalarType::Float : out_dtype, q);
  if (y.numel() > 0) {
    const Tensor left = along_rows(q), right = along_rows(w);
    std::vector<GemmDesc> gemms;
    int64_t end = num_rows;
    if (offsets) {
      end = for_experts(op, *offsets, num_rows, [&](int64_t expert, int64_t first, int64_t rows) {
        if (rows > 0) gemms.push_back(fp8_gemm(left, s, right, w_scale, y, expert, first, rows));
      });
    } else {
      gemms.push_back(fp8_gemm(left, s, right, w_scale, y, 0, 0, num_rows));
    }
    run_gemms(gemms, y, y);
    zero(y, end * cols, (num_rows - end) * cols);
  }
  if (out_dtype != ScalarType::Half) return y;
  Tensor narrow = fastmp::empty(y.sizes(), out_dtype, q);
  torch::stable::copy_(narrow, y);
  return narrow;
}

Tensor linear_fp8(const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale, ScalarType out_dtype) {
  return fp8_gemms("linear_fp8", q, s, w, w_scale, nullptr, out_dtype);
}

Tensor grouped_mm_fp8(const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale, const Tensor& offsets,
                      ScalarType out_dtype) {
  return fp8_gemms("grouped_mm_fp8", q, s, w, w_scale, &offsets, out_dtype);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "linear_fp8", fastmp::linear_fp8);
  FASTMP_IMPL(m, "grouped_mm_fp8", fastmp::grouped_mm_fp8);
}

#endif  // FASTMP_ISA_BASE
