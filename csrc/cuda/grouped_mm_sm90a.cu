// grouped_mm and grouped_mlp_in in CUDA C++, for sm_90a: grouped GEMMs of CUTLASS, whose problems a small kernel lists
// on the device, without host-device synchronisation; the activation is in the epilogue.
//
// CUTLASS takes bf16 or fp16 with sizes, and a width of y, that are multiples of 8. For everything else there is a
// kernel that is as right, and slow. The semantics are those of the references in fastmp/ops/grouped_mm.py.
#ifdef __NVCC__  // tests/cuda_on_cpu has its own
#include "gemm_sm90a.cuh"
#endif
#include "epilogue.cuh"
#include "problems.cuh"

#include <tuple>

namespace fastmp {
namespace {

// One thread a column of a row. Of a matrix of w, element (n, k) lies at n * step_n + k * step_k.
template <class T, bool kGated>
__global__ void __launch_bounds__(kThreads) rows_kernel(const Problems problems, const Operand x, const Operand w,
                                                        int64_t step_n, int64_t step_k, const Output<T> out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t expert = 0; expert < problems.count; ++expert) {
    const Problems::Shape shape = problems.shapes[expert];
    const int64_t start = problems.starts[expert];
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < shape.m * out.width; i += step) {
      const int64_t row = i / out.width, column = i % out.width, to = start + row;
      const T* terms = x.of<T>(start, expert) + row * x.pitch;
      Compute<T> h[1 + kGated] = {};
      for (int part = 0; part <= kGated; ++part) {
        const int64_t at = part * out.width + column;
        const T* weights = w.of<T>(start, expert) + at * step_n;
        for (int64_t k = 0; k < shape.k; ++k) h[part] += widen(terms[k]) * widen(weights[k * step_k]);
        if (out.bias) h[part] += widen(out.bias[expert * out.num_columns + at]);
        if (out.h) out.h[to * out.num_columns + at] = narrow<T>(h[part]);
      }
      if (!out.y) continue;
      Compute<T> y[] = {h[0]};
      activate(y, out.form);
      out.y[to * out.width + column] = narrow<T>(kGated ? y[0] * h[kGated] : y[0]);
    }
  }
}

// Writes h = x w^T + bias of every expert's rows and y = form(h), each where it is not null; zeros to the rows of no
// expert. kGated: h is [gate | up]. kTransposed: an expert's weight is (k, n).
template <bool kGated, bool kTransposed>
void multiply_rows(const char* op, const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias_any,
                   const Tensor& offsets_any, Tensor* y, Tensor* h, Form form) {
  const int64_t num_rows = x.size(0), k = x.size(1), n = w.size(kTransposed ? 2 : 1), width = kGated ? n / 2 : n;
  if (num_rows == 0 || width == 0) return;
  if (w.size(0) == 0) {
    for (Tensor* each : {y, h}) {
      if (each) torch::stable::zero_(*each);
    }
    return;
  }
  const Tensor offsets = torch::stable::contiguous(offsets_any), whole = torch::stable::contiguous(w);
  std::optional<Tensor> bias;
  if (bias_any) bias = torch::stable::contiguous(*bias_any);
  const bool tma = k > 0 && suits_tma(x, width, k);
  const Tensor weights = tma ? aligned_rows(whole).tensor : whole;
  std::optional<Rows> rows;  // there are none of no elements
  if (k > 0) rows = tma ? aligned_rows(x) : Rows(x);
  const Operand left = rows ? operand(*rows) : Operand{}, right = operand_of_experts(weights);
  const ProblemMemory made(op, offsets, num_rows, n, k, RowsAre::kRows);
  const cudaStream_t stream = current_stream(x);
  dispatch_device(x.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Output<T> out{bias ? data<T>(*bias) : nullptr,
                        y ? mutable_data<T>(*y) : nullptr,
                        h ? mutable_data<T>(*h) : nullptr,
                        width,
                        n,
                        form};
    if constexpr (sizeof(T) == 2) {
      if (tma) {
        const StoreTile<kGated, T> store{out};
        return multiply<T, false, kTransposed>(op, made.problems, left, right, store, n, k, x, stream);
      }
    }
    launch({kBlocks, kThreads}, stream, rows_kernel<T, kGated>, made.problems, left, right,
           kTransposed ? 1 : right.pitch, kTransposed ? right.pitch : 1, out);
  });
  for (const Tensor* each : {y, h}) {
    if (each) zero_rest(*each, made.problems);
  }
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  FASTMP_CHECK(
      x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(transposed ? 1 : 2) && x.scalar_type() == w.scalar_type(),
      kOp, ": x is ", described(x), ", which does not fit w, ", described(w));
  check_offsets(kOp, offsets, w.size(0));
  const DeviceGuard guard(x);
  Tensor h = fastmp::empty({x.size(0), w.size(transposed ? 2 : 1)}, x.scalar_type(), x);
  const auto multiply_by = transposed ? multiply_rows<false, true> : multiply_rows<false, false>;
  multiply_by(kOp, x, w, std::nullopt, offsets, nullptr, &h, Form{});
  return h;
}

std::tuple<Tensor, Tensor> mlp_in(const Tensor& x, const Tensor& w, std::optional<Tensor> bias, const Tensor& offsets,
                                  std::string form_name, bool gated, bool keep) {
  constexpr const char* kOp = "grouped_mlp_in";
  FASTMP_CHECK(x.dim() == 2 && w.dim() == 3 && x.size(1) == w.size(2) && x.scalar_type() == w.scalar_type() &&
                   !(gated && w.size(1) % 2),
               kOp, ": x is ", described(x), ", which does not fit w, ", described(w), gated ? ", gated" : "");
  const int64_t num_rows = x.size(0), n = w.size(1);
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 2 && bias->size(0) == w.size(0) &&
                         bias->size(1) == n),
               kOp, ": w is ", described(w), ", which does not fit a bias of ", described(*bias));
  check_offsets(kOp, offsets, w.size(0));
  const Form form = form_of(kOp, form_name);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty({num_rows, gated ? n / 2 : n}, x.scalar_type(), x);
  Tensor h = keep ? fastmp::empty({num_rows, n}, x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  const auto multiply_by = gated ? multiply_rows<true, false> : multiply_rows<false, false>;
  multiply_by(kOp, x, w, bias, offsets, &y, keep ? &h : nullptr, form);
  return {y, h};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("grouped_mm(Tensor x, Tensor w, Tensor offsets, bool transposed) -> Tensor");
  m.def(
      "grouped_mlp_in(Tensor x, Tensor w, Tensor? bias, Tensor offsets, str form, bool gated, bool keep)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "grouped_mm", fastmp::grouped_mm);
  FASTMP_IMPL(m, "grouped_mlp_in", fastmp::mlp_in);
}
