// grouped_mm in CUDA C++, for sm_90a: a grouped GEMM of CUTLASS, whose problems a small kernel computes on the device,
// without host-device synchronisation. The semantics are those of the reference in fastmp/ops/grouped_mm.py.
#include "grouped_gemm.cuh"

namespace fastmp {
namespace {

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets_any, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  FASTMP_CHECK(x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(transposed ? 1 : 2) &&
                   x.scalar_type() == w.scalar_type(),
               kOp, ": x is ", described(x), ", which does not fit w, ", described(w));
  check_offsets(kOp, offsets_any, w.size(0));
  const int64_t n = w.size(transposed ? 2 : 1), k = x.size(1);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty({x.size(0), n}, x.scalar_type(), x);
  if (y.numel() == 0) return y;
  if (w.size(0) == 0 || k == 0) return torch::stable::zero_(y);
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  const bool tma = suits_tma(x, n, k);
  const Tensor whole = torch::stable::contiguous(w), weights = tma ? aligned_rows(whole).tensor : whole;
  const Rows rows = tma ? aligned_rows(x) : Rows(x), out(y);
  const auto multiply_by = [&](auto columns) {
    return multiply_experts<false, columns, false>(kOp, tma, x.scalar_type(), offsets, rows.num_rows, operand(rows),
                                                   operand_of_experts(weights), operand(out), n, k, false);
  };
  zero_rest(y, (transposed ? multiply_by(std::false_type{}) : multiply_by(std::true_type{})).problems);
  return y;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("grouped_mm(Tensor x, Tensor w, Tensor offsets, bool transposed) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) { FASTMP_IMPL(m, "grouped_mm", fastmp::grouped_mm); }
