// grouped_mlp_in in CUDA C++, for sm_90a: grouped_mm with the activation in the epilogue of CUTLASS's GEMM.
//
// It takes bf16 or fp16 with sizes, and a width of y, that are multiples of 8. For everything else there is a kernel
// that is as right, and slow. The semantics are those of the reference in fastmp/ops/grouped_mm.py.
#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "mlp_in_sm90a.cuh"
#endif
#include "epilogue.cuh"
#include "problems.cuh"

#include <tuple>

namespace fastmp {
namespace {

// One thread an element of y. The problems are those of h.
template <class T, bool kGated>
__global__ void __launch_bounds__(kThreads) mlp_in_kernel(const Problems problems, const MlpIn<T> mlp) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t expert = 0; expert < problems.count; ++expert) {
    const Problems::Shape shape = problems.shapes[expert];
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < shape.m * mlp.width; i += step) {
      const int64_t row = i / mlp.width, column = i % mlp.width, to = problems.starts[expert] + row;
      const T* x = static_cast<const T*>(problems.a[expert]) + row * problems.stride_a[expert];
      Compute<T> h[1 + kGated] = {};
      for (int part = 0; part <= kGated; ++part) {
        const int64_t at = part * mlp.width + column;
        const T* w = static_cast<const T*>(problems.b[expert]) + at * problems.stride_b[expert];
        for (int64_t k = 0; k < shape.k; ++k) h[part] += widen(x[k]) * widen(w[k]);
        if (mlp.bias) h[part] += widen(mlp.bias[expert * mlp.num_columns + at]);
        if (mlp.h) mlp.h[to * mlp.num_columns + at] = narrow<T>(h[part]);
      }
      Compute<T> y[] = {h[0]};
      activate(y, mlp.form);
      mlp.y[to * mlp.width + column] = narrow<T>(kGated ? y[0] * h[kGated] : y[0]);
    }
  }
}

template <bool kGated>
void multiply_experts(const char* op, bool tma, ScalarType dtype, const Problems& problems, const Operand& x,
                      const Operand& w, int64_t num_rows, int64_t k, const Tensor* bias, const Tensor& y,
                      const Tensor* h, Form form) {
  dispatch_device(dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t width = y.size(1);
    const MlpIn<T> mlp{bias ? data<T>(*bias) : nullptr, mutable_data<T>(y), h ? mutable_data<T>(*h) : nullptr,
                       width, (1 + kGated) * width, form};
    const cudaStream_t stream = current_stream(y);
    if constexpr (sizeof(T) == 2) {
      if (tma) return multiply_activated<kGated>(op, problems, mlp, x, w, num_rows, k, y, stream);
    }
    launch({kBlocks, kThreads}, stream, mlp_in_kernel<T, kGated>, problems, mlp);
  });
}

std::tuple<Tensor, Tensor> mlp_in(const Tensor& x, const Tensor& w, std::optional<Tensor> bias,
                                  const Tensor& offsets_any, std::string form_name, bool gated, bool keep) {
  constexpr const char* kOp = "grouped_mlp_in";
  FASTMP_CHECK(x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(2) && x.scalar_type() == w.scalar_type() &&
                   !(gated && w.size(1) % 2),
               kOp, ": x is ", described(x), ", which does not fit w, ", described(w), gated ? ", gated" : "");
  const int64_t num_rows = x.size(0), n = w.size(1), k = x.size(1), width = gated ? n / 2 : n;
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 2 && bias->size(0) == w.size(0) &&
                         bias->size(1) == n),
               kOp, ": w is ", described(w), ", which does not fit a bias of ", described(*bias));
  check_offsets(kOp, offsets_any, w.size(0));
  const Form form = form_of(kOp, form_name);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty({num_rows, width}, x.scalar_type(), x);
  Tensor h = keep ? fastmp::empty({num_rows, n}, x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  if (y.numel() == 0) return {y, h};
  if (w.size(0) == 0) return {torch::stable::zero_(y), torch::stable::zero_(h)};
  const Tensor offsets = torch::stable::contiguous(offsets_any);
  if (bias) bias = torch::stable::contiguous(*bias);
  const bool tma = k > 0 && suits_tma(x, width, k);
  const Tensor whole = torch::stable::contiguous(w), weights = tma ? aligned_rows(whole).tensor : whole;
  std::optional<Rows> rows;  // there are none of no elements
  if (k > 0) rows = tma ? aligned_rows(x) : Rows(x);
  const Operand left = rows ? operand(*rows) : Operand{}, right = operand_of_experts(weights);
  const ProblemMemory made(kOp, offsets, num_rows, left, right, operand(Rows(y)), n, k, false);
  const auto multiply_by = [&](auto pair) {
    multiply_experts<pair>(kOp, tma, x.scalar_type(), made.problems, left, right, num_rows, k,
                           bias ? &*bias : nullptr, y, keep ? &h : nullptr, form);
  };
  gated ? multiply_by(std::true_type{}) : multiply_by(std::false_type{});
  zero_rest(y, made.problems);
  if (keep) zero_rest(h, made.problems);
  return {y, h};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def(
      "grouped_mlp_in(Tensor x, Tensor w, Tensor? bias, Tensor offsets, str form, bool gated, bool keep)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) { FASTMP_IMPL(m, "grouped_mlp_in", fastmp::mlp_in); }
