// GEMMs of FP8 operands on the CPU: gemm.cpp dequantises panels to the result's dtype, exactly, and multiplies those.
// The semantics are those of the references in fastmp/ops/linear_fp8.py and grouped_mm_fp8.py.
#include "fp8.h"
#include "gemm.h"

#include <string>
#include <tuple>
#include <vector>

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void check_fp8(const char* op, const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale,
               const Tensor* offsets, ScalarType out_dtype) {
  const bool experts = offsets != nullptr;
  dispatch_float(out_dtype, op, [](auto) {});
  dispatch_fp8(q.scalar_type(), op, [](auto) {});
  FASTMP_CHECK(w.scalar_type() == ScalarType::Float8_e4m3fn, op, ": w must be Float8_e4m3fn, got ",
               dtype_name(w.scalar_type()));
  const int64_t block = block_of(op, s);
  FASTMP_CHECK(block_of(op, w_scale) == block, op, ": s and w_scale must have one dtype");
  const int64_t dims = experts ? 3 : 2;
  FASTMP_CHECK(q.dim() == 2 && s.dim() == 2 && w.dim() == dims && w_scale.dim() == dims, op,
               ": q, s, w and w_scale have ", q.dim(), ", ", s.dim(), ", ", w.dim(), " and ", w_scale.dim(),
               " dimensions");
  const int64_t k = q.size(1), n = w.size(dims - 2);
  FASTMP_CHECK(w.size(dims - 1) == k && k % block == 0 && n % block == 0 && s.size(0) == q.size(0) &&
                   s.size(1) == k / block && w_scale.size(dims - 2) == n / block &&
                   w_scale.size(dims - 1) == k / block && w_scale.size(0) == (experts ? w.size(0) : n / block),
               op, ": scales in blocks of ", block, " do not fit q ", described(q), " and w ", described(w));
  FASTMP_CHECK(!experts || offsets->numel() == w.size(0), op, ": offsets are ", described(*offsets), " but w is ",
               described(w));
}

Operand fp8_operand(const Tensor& q, const Tensor& s, int64_t expert, int64_t first, bool rows) {
  const int64_t dim = q.dim() - 2, block = block_of("linear_fp8", s);
  Operand operand{place(q, (dim ? expert * q.stride(0) : 0) + first * q.stride(dim)), q.stride(dim), 1};
  operand.scales.data = place(s, (dim ? expert * s.stride(0) : 0) + first * s.stride(dim));
  operand.scales.outer_pitch = s.stride(dim), operand.scales.term_pitch = s.stride(dim + 1);
  operand.scales.outer_block = rows ? 1 : block, operand.scales.term_block = block;
  operand.scales.e5m2 = q.scalar_type() == ScalarType::Float8_e5m2;
  return operand;
}

Tensor rounded(const Tensor& sums, ScalarType out_dtype) {
  if (sums.scalar_type() == out_dtype) return sums;
  Tensor narrow = fastmp::empty(sums.sizes(), out_dtype, sums);
  torch::stable::copy_(narrow, sums);
  return narrow;
}

// Multiplies rows of q by the weight of their expert, or by the only weight if there are no offsets.
Tensor fp8_gemms(const char* op, const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale,
                 const Tensor* offsets, ScalarType out_dtype) {
  check_fp8(op, q, s, w, w_scale, offsets, out_dtype);
  const int64_t num_rows = q.size(0), cols = w.size(w.dim() - 2);
  // float16 has too few exponents for dequantised operands
  const ScalarType dtype = out_dtype == ScalarType::Half ? ScalarType::Float : out_dtype;
  Tensor y = fastmp::empty({num_rows, cols}, dtype, q);
  if (y.numel() == 0) return rounded(y, out_dtype);
  const Tensor left = along_rows(q), right = along_rows(w);
  std::vector<GemmDesc> gemms;
  const auto add = [&](int64_t expert, int64_t first, int64_t rows) {
    if (rows == 0) return;
    GemmDesc gemm{};
    gemm.a = fp8_operand(left, s, 0, first, true);
    gemm.b = fp8_operand(right, w_scale, expert, 0, false);
    gemm.rows = rows, gemm.cols = cols, gemm.terms = q.size(1);
    gemm.out = place(y, first * cols), gemm.out_pitch = cols;
    gemm.dtype = gemm.out_dtype = dtype, gemm.epilogue = Epilogue::kStore;
    gemms.push_back(gemm);
  };
  int64_t end = num_rows;
  if (offsets) {
    end = for_experts(op, *offsets, num_rows, add);
  } else {
    add(0, 0, num_rows);
  }
  run_gemms(gemms, y, y);
  zero(y, end * cols, (num_rows - end) * cols);
  return rounded(y, out_dtype);
}

Tensor linear_fp8(const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale, ScalarType out_dtype) {
  return fp8_gemms("linear_fp8", q, s, w, w_scale, nullptr, out_dtype);
}

Tensor grouped_mm_fp8(const Tensor& q, const Tensor& s, const Tensor& w, const Tensor& w_scale, const Tensor& offsets,
                      ScalarType out_dtype) {
  return fp8_gemms("grouped_mm_fp8", q, s, w, w_scale, &offsets, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor> grouped_mlp_in_fp8(const Tensor& q, const Tensor& s, const Tensor& w,
                                                      const Tensor& w_scale, const Tensor& offsets, std::string form,
                                                      ScalarType out_dtype) {
  constexpr const char* kOp = "grouped_mlp_in_fp8";
  const Tensor h = fp8_gemms(kOp, q, s, w, w_scale, &offsets, out_dtype);
  const int64_t block = block_of(kOp, s);
  FASTMP_CHECK(w.size(1) % (2 * block) == 0, kOp, ": gate and up must each have a multiple of ", block, " rows, got w ",
               described(w));
  auto [y, scales] = gated_activation_quantized(h, std::nullopt, form, std::nullopt, block, ScalarType::Float8_e4m3fn);
  return {y, scales, h};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "linear_fp8", fastmp::linear_fp8);
  FASTMP_IMPL(m, "grouped_mm_fp8", fastmp::grouped_mm_fp8);
  FASTMP_IMPL(m, "grouped_mlp_in_fp8", fastmp::grouped_mlp_in_fp8);
}

#endif  // FASTMP_ISA_BASE
