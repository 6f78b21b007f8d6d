// Grouped GEMM, its wgrad, and the first GEMM of the experts' MLPs with fused activation, on the CPU, by gemm.cpp.
// The semantics are those of the references in fastmp/ops/grouped_mm.py.
#include "gemm.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

// Multiplies rows of x by the weight of their expert, through the epilogue; kept (or null): the pre-activation; sum
// (or null): the result that kAdd adds to.
Tensor grouped_gemm(const char* op, const Tensor& x, const Tensor& w, std::optional<Tensor> bias, const Tensor& offsets,
                    bool transposed, Epilogue epilogue, Form form, const Tensor* kept, const Tensor* sum = nullptr) {
  const bool gated = epilogue == Epilogue::kGate;
  const int64_t columns = w.size(transposed ? 2 : 1), cols = gated ? columns / 2 : columns;
  FASTMP_CHECK(x.size(1) == w.size(transposed ? 1 : 2) && offsets.numel() == w.size(0) && (!gated || columns % 2 == 0),
               op, ": shapes do not fit");
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 2 && bias->size(0) == w.size(0) &&
                         bias->size(1) == columns),
               op, ": bias must be ", dtype_name(x.scalar_type()), " (", w.size(0), ", ", columns, ")");
  Tensor y = sum ? *sum : fastmp::empty({x.size(0), cols}, x.scalar_type(), x);
  const Tensor left = along_rows(x), right = along_rows(w);
  if (bias) bias = torch::stable::contiguous(*bias);
  std::vector<GemmDesc> gemms;
  const int64_t end = for_experts(op, offsets, x.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    if (rows == 0) return;
    GemmDesc gemm{};
    gemm.a = {place(left, first * left.stride(0)), left.stride(0), 1};
    gemm.b = {place(right, expert * right.stride(0)), right.stride(1), 1};
    if (transposed) std::swap(gemm.b.outer, gemm.b.term);
    if (gated) gemm.up = place(right, expert * right.stride(0) + cols * right.stride(1));
    if (bias) gemm.bias = place(*bias, expert * columns);
    if (kept) gemm.kept = place(*kept, first * columns);
    gemm.rows = rows, gemm.cols = cols, gemm.terms = x.size(1);
    gemm.out = place(y, first * cols), gemm.out_pitch = cols, gemm.kept_pitch = columns, gemm.up_offset = cols;
    gemm.dtype = gemm.out_dtype = x.scalar_type(), gemm.epilogue = epilogue, gemm.form = form;
    gemms.push_back(gemm);
  });
  run_gemms(gemms, x, y);
  if (!sum) zero(y, end * cols, (x.size(0) - end) * cols);
  if (kept) zero(*kept, end * columns, (x.size(0) - end) * columns);
  return y;
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  check_operands(kOp, x, w, 2, 3);
  return grouped_gemm(kOp, x, w, std::nullopt, offsets, transposed, Epilogue::kStore, Form{}, nullptr);
}

Tensor grouped_mm_bias(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& offsets, bool transposed) {
  constexpr const char* kOp = "grouped_mm_bias";
  check_operands(kOp, x, w, 2, 3);
  return grouped_gemm(kOp, x, w, bias, offsets, transposed, Epilogue::kStore, Form{}, nullptr);
}

// x w[e]^T + bias[e] + low v[e]^T, the second GEMM added to the result of the first.
Tensor grouped_mm_lora(const Tensor& x, const Tensor& w, std::optional<Tensor> bias, const Tensor& low, const Tensor& v,
                       const Tensor& offsets, bool transposed, bool v_transposed) {
  constexpr const char* kOp = "grouped_mm_lora";
  check_operands(kOp, x, w, 2, 3);
  check_operands(kOp, low, v, 2, 3);
  FASTMP_CHECK(low.size(0) == x.size(0) && low.scalar_type() == x.scalar_type() &&
                   v.size(v_transposed ? 2 : 1) == w.size(transposed ? 2 : 1),
               kOp, ": low and v do not fit x and w");
  const Tensor y = grouped_gemm(kOp, x, w, bias, offsets, transposed, Epilogue::kStore, Form{}, nullptr);
  if (low.size(1) == 0) return y;
  return grouped_gemm(kOp, low, v, std::nullopt, offsets, v_transposed, Epilogue::kAdd, Form{}, nullptr, &y);
}

std::tuple<Tensor, Tensor> grouped_mlp_in(const Tensor& x, const Tensor& w, std::optional<Tensor> bias,
                                          const Tensor& offsets, std::string form, bool gated, bool keep) {
  constexpr const char* kOp = "grouped_mlp_in";
  check_operands(kOp, x, w, 2, 3);
  const int64_t columns = w.size(1);
  Tensor h = keep ? fastmp::empty({x.size(0), columns}, x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  const Epilogue epilogue = gated ? Epilogue::kGate : Epilogue::kActivate;
  return {grouped_gemm(kOp, x, w, bias, offsets, false, epilogue, form_of(kOp, form), keep ? &h : nullptr), h};
}

void grouped_wgrad(const char* op, const Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets,
                   Epilogue epilogue) {
  check_operands(op, grad, x, 2, 2);
  FASTMP_CHECK(out.dim() == 3 && grad.size(0) == x.size(0) && out.size(0) == offsets.numel() &&
                   out.size(1) == grad.size(1) && out.size(2) == x.size(1),
               op, ": shapes do not fit");
  if (out.numel() == 0) return;
  const Tensor left = along_rows(grad), right = along_rows(x);
  std::vector<GemmDesc> gemms;
  for_experts(op, offsets, x.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    const int64_t begin = expert * out.stride(0);
    if (rows == 0) {
      if (epilogue == Epilogue::kStore) zero(out, begin, out.size(1) * out.size(2));
      return;
    }
    gemms.push_back(
        wgrad_desc(left, right, first, rows, place(out, begin), out.stride(1), out.scalar_type(), epilogue));
  });
  run_gemms(gemms, x, out);
}

Tensor grouped_mm_wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  Tensor out = fastmp::empty({offsets.size(0), grad.size(1), x.size(1)}, x.scalar_type(), x);
  grouped_wgrad("grouped_mm_wgrad", out, grad, x, offsets, Epilogue::kStore);
  return out;
}

void grouped_mm_wgrad_(Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets, bool add) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  check_sum(kOp, out, x);
  if (!add) torch::stable::zero_(out);
  if (out.numel() == 0) return;
  if (out.stride(2) == 1) return grouped_wgrad(kOp, out, grad, x, offsets, Epilogue::kAdd);
  const Tensor sums = torch::stable::contiguous(out);  // of a transposed parameter
  grouped_wgrad(kOp, sums, grad, x, offsets, Epilogue::kAdd);
  Tensor target = out;
  torch::stable::copy_(target, sums);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "grouped_mm", fastmp::grouped_mm);
  FASTMP_IMPL(m, "grouped_mm_bias", fastmp::grouped_mm_bias);
  FASTMP_IMPL(m, "grouped_mm_lora", fastmp::grouped_mm_lora);
  FASTMP_IMPL(m, "grouped_mm_wgrad", fastmp::grouped_mm_wgrad);
  FASTMP_IMPL(m, "grouped_mm_wgrad_", fastmp::grouped_mm_wgrad_);
  FASTMP_IMPL(m, "grouped_mlp_in", fastmp::grouped_mlp_in);
}

#endif  // FASTMP_ISA_BASE
