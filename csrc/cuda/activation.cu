// bias_gelu and its backward in CUDA C++.
//
// A thread owns 16 bytes of columns, keeps their biases in registers and walks down the rows. The backward sums
// dbias on the way: per thread, then over the block, then one row of partial sums for each strip of rows, which
// a second kernel adds up in order; no atomics, so results do not vary between runs. Where rows do not start at
// multiples of 16 bytes a thread owns one column instead.
// The semantics are those of the references in fastmp/ops/activation.py.
#include "common.cuh"
#include "op.h"
#include "rows.h"

#include <tuple>

namespace fastmp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 1024;

// Rows a thread has in flight in the forward, and in the backward, which reads two tensors. The f64 functions
// need the registers for themselves.
template <class T>
constexpr int kRows = std::is_same_v<T, double> ? 2 : 4;
template <class T>
constexpr int kBackwardRows = kRows<T> / 2;

// GeLU and its derivative. tanh form: h * sigmoid(2u), u = sqrt(2/pi) (h + 0.044715 h^3).
template <class C, bool kTanh>
struct Gelu {
  __device__ static C twice_u(C h) { return h * (C(1.5957691216057308) + C(0.071354816272600265) * h * h); }
  __device__ static C reciprocal(C x) {
    if constexpr (std::is_same_v<C, float>) {
      return __fdividef(1.0f, x);  // 0 above 2^126
    } else {
      return 1 / x;
    }
  }
  __device__ static C cdf(C h) { return C(0.5) + C(0.5) * erf(h * C(0.70710678118654752)); }

  __device__ static C value(C h) {
    if constexpr (kTanh) {
      return h * reciprocal(1 + fast_exp(-twice_u(h)));
    } else {
      return h * cdf(h);
    }
  }
  __device__ static C slope(C h) {
    if constexpr (kTanh) {
      const C e = fast_exp(-fabs(twice_u(h)));
      const C r = reciprocal(1 + e);  // sigmoid(|2u|); e r^2 = sigmoid (1 - sigmoid) without cancellation
      return (h > 0 ? r : e * r) + h * (e * r * r) * (C(1.5957691216057308) + C(0.21406444881780076) * h * h);
    } else {
      return cdf(h) + h * (C(0.39894228040143268) * fast_exp(C(-0.5) * h * h));
    }
  }
};

// kWidth elements from p, the first `count` of which exist; 16-byte access where the whole vector does.
template <class T, int kWidth>
__device__ inline void load_columns(const T* p, int64_t count, Compute<T> (&out)[kWidth]) {
  if constexpr (kWidth > 1) {
    if (count >= kWidth) {
      const Vector<T> loaded = load_vector(p);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] = widen(loaded.lane[i]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) out[i] = i < count ? widen(p[i]) : Compute<T>(0);
}

template <class T, int kWidth>
__device__ inline void store_columns(T* p, int64_t count, const Compute<T> (&value)[kWidth]) {
  if constexpr (kWidth > 1) {
    if (count >= kWidth) return store_vector(p, value);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) p[i] = narrow<T>(value[i]);
  }
}

template <class T, int kWidth>
__device__ inline void load_bias(const T* bias, int64_t column, int64_t num_cols, Compute<T> (&out)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    out[i] = bias != nullptr && column + i < num_cols ? widen(bias[column + i]) : Compute<T>(0);
  }
}

template <class T, bool kTanh, int kWidth>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, int64_t x_pitch, const T* __restrict__ bias, T* __restrict__ y,
                   int64_t num_rows, int64_t num_cols) {
  using C = Compute<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (column >= num_cols) return;
  const int64_t count = num_cols - column;
  C shift[kWidth];
  load_bias<T, kWidth>(bias, column, num_cols, shift);
  const int64_t block_rows = static_cast<int64_t>(blockDim.y) * kRows<T>;
  for (int64_t first = blockIdx.y * block_rows + threadIdx.y; first < num_rows; first += gridDim.y * block_rows) {
    C h[kRows<T>][kWidth];
#pragma unroll
    for (int r = 0; r < kRows<T>; ++r) {
      const int64_t row = first + r * static_cast<int64_t>(blockDim.y);
      if (row < num_rows) load_columns<T, kWidth>(x + row * x_pitch + column, count, h[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows<T>; ++r) {
      const int64_t row = first + r * static_cast<int64_t>(blockDim.y);
      if (row >= num_rows) break;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) h[r][i] = Gelu<C, kTanh>::value(h[r][i] + shift[i]);
      store_columns<T, kWidth>(y + row * num_cols + column, count, h[r]);
    }
  }
}

// blockIdx.y is the strip of rows; `partials` (strips, num_cols) is null when there is no bias.
template <class T, bool kTanh, int kWidth>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad, int64_t grad_pitch, const T* __restrict__ x, int64_t x_pitch,
                    const T* __restrict__ bias, T* __restrict__ dx, Compute<T>* __restrict__ partials,
                    int64_t num_rows, int64_t rows_per_strip, int64_t num_cols) {
  using C = Compute<T>;
  constexpr int kFlight = kBackwardRows<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  const int64_t count = num_cols - column;  // not positive in threads beyond the last column
  C shift[kWidth], total[kWidth];
  load_bias<T, kWidth>(bias, column, num_cols, shift);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) total[i] = 0;

  const int64_t begin = blockIdx.y * rows_per_strip;
  const int64_t end = begin + rows_per_strip < num_rows ? begin + rows_per_strip : num_rows;
  const int64_t step = blockDim.y;
  if (count > 0) {
    for (int64_t first = begin + threadIdx.y; first < end; first += kFlight * step) {
      C g[kFlight][kWidth], h[kFlight][kWidth];
#pragma unroll
      for (int r = 0; r < kFlight; ++r) {
        const int64_t row = first + r * step;
        if (row < end) {
          load_columns<T, kWidth>(grad + row * grad_pitch + column, count, g[r]);
          load_columns<T, kWidth>(x + row * x_pitch + column, count, h[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kFlight; ++r) {
        const int64_t row = first + r * step;
        if (row >= end) break;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          g[r][i] *= Gelu<C, kTanh>::slope(h[r][i] + shift[i]);
          total[i] += g[r][i];
        }
        store_columns<T, kWidth>(dx + row * num_cols + column, count, g[r]);
      }
    }
  }
  if (partials == nullptr) return;  // the same for all threads

  __shared__ C sums[kThreads * kWidth];
  const int lane = threadIdx.x * kWidth, width = blockDim.x * kWidth;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[threadIdx.y * width + lane + i] = total[i];
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    C sum = 0;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += sums[y * width + lane + i];
    if (i < count) partials[blockIdx.y * num_cols + column + i] = sum;
  }
}

// Column sums of `partials` (num_strips, num_cols); block (32 columns, 32 threads a column).
template <class T>
__global__ void __launch_bounds__(kWarp * kWarp)
    sum_strips_kernel(const Compute<T>* __restrict__ partials, T* __restrict__ dbias, int64_t num_strips,
                      int64_t num_cols) {
  using C = Compute<T>;
  __shared__ C sums[kWarp][kWarp];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  C sum = 0;
  if (column < num_cols) {
    for (int64_t strip = threadIdx.y; strip < num_strips; strip += kWarp) sum += partials[strip * num_cols + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= num_cols) return;
  sum = 0;
  for (int y = 0; y < kWarp; ++y) sum += sums[y][threadIdx.x];
  dbias[column] = narrow<T>(sum);
}

// Whether all rows can be read 16 bytes at a time.
bool is_aligned(const Rows& rows) {
  const int64_t lanes = kVectorBytes / static_cast<int64_t>(rows.tensor.element_size());
  const bool base = reinterpret_cast<uintptr_t>(rows.tensor.const_data_ptr()) % kVectorBytes == 0;
  return base && (rows.num_rows == 1 || (rows.pitch % lanes == 0 && rows.num_cols % lanes == 0));
}

// Threads (x over columns, y over rows): as many columns as a row has, up to the whole block.
dim3 block_for(int64_t num_cols, int64_t width) {
  int columns = 8;
  while (columns < kThreads && columns * width < num_cols) columns *= 2;
  return dim3(columns, kThreads / columns);
}

void check_arguments(const char* op, const Tensor& x, const std::optional<Tensor>& bias, const std::string& approximate) {
  FASTMP_CHECK(approximate == "tanh" || approximate == "none", op, ": approximate must be 'tanh' or 'none', got '",
               approximate, "'");
  FASTMP_CHECK(x.dim() > 0, op, ": x must have at least one dimension");
  check_bias(op, bias, x);
}

// Calls body(TypeTag<T>, form, width) with the approximation and the access width as constants.
template <class Body>
void dispatch(const char* op, const Tensor& x, const std::string& approximate, bool aligned, const Body& body) {
  dispatch_device(x.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto with_form = [&](auto form) {
      aligned ? body(tag, form, std::integral_constant<int, kLanes<T>>{})
              : body(tag, form, std::integral_constant<int, 1>{});
    };
    approximate == "tanh" ? with_form(std::true_type{}) : with_form(std::false_type{});
  });
}

Tensor forward(const Tensor& x, std::optional<Tensor> bias_any, std::string approximate) {
  constexpr const char* kOp = "bias_gelu";
  check_arguments(kOp, x, bias_any, approximate);
  const DeviceGuard guard(x);
  Tensor y = fastmp::empty(x.sizes(), x.scalar_type(), x);
  if (x.numel() == 0) return y;
  const Rows rows(x);
  std::optional<Tensor> bias;
  if (bias_any) bias = torch::stable::contiguous(*bias_any);
  dispatch(kOp, x, approximate, is_aligned(rows), [&](auto tag, auto form, auto width) {
    using T = typename decltype(tag)::type;
    const dim3 block = block_for(rows.num_cols, width);
    const int64_t strips = ceil_div(rows.num_rows, static_cast<int64_t>(block.y) * kRows<T>);
    const dim3 grid(static_cast<unsigned>(ceil_div(rows.num_cols, static_cast<int64_t>(block.x) * width)),
                    static_cast<unsigned>(strips < 65535 ? strips : 65535));
    forward_kernel<T, form, width><<<grid, block, 0, current_stream(x)>>>(
        data<T>(rows.tensor), rows.pitch, bias ? data<T>(*bias) : nullptr, mutable_data<T>(y), rows.num_rows, rows.num_cols);
  });
  FASTMP_LAUNCH_CHECK();
  return y;
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_any, const Tensor& x, std::optional<Tensor> bias_any,
                                    std::string approximate) {
  constexpr const char* kOp = "bias_gelu_backward";
  check_arguments(kOp, x, bias_any, approximate);
  check_like(kOp, "grad", grad_any, "x", x);
  const DeviceGuard guard(x);
  Tensor dx = fastmp::empty(x.sizes(), x.scalar_type(), x);
  Tensor dbias = fastmp::empty({bias_any ? x.size(x.dim() - 1) : 0}, x.scalar_type(), x);
  if (x.numel() == 0) {
    if (dbias.numel() > 0) torch::stable::zero_(dbias);
    return {dx, dbias};
  }
  const Rows rows(x), grad(grad_any);
  std::optional<Tensor> bias, partials;
  if (bias_any) bias = torch::stable::contiguous(*bias_any);
  dispatch(kOp, x, approximate, is_aligned(rows) && is_aligned(grad), [&](auto tag, auto form, auto width) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const dim3 block = block_for(rows.num_cols, width);
    const int64_t column_blocks = ceil_div(rows.num_cols, static_cast<int64_t>(block.x) * width);
    const int64_t wanted = column_blocks < kBlocks ? kBlocks / column_blocks : 1;
    const int64_t rows_per_strip = ceil_div(ceil_div(rows.num_rows, wanted), block.y) * block.y;
    const int64_t strips = ceil_div(rows.num_rows, rows_per_strip);
    if (bias) partials = fastmp::empty({strips, rows.num_cols}, compute_dtype(x.scalar_type()), x);
    const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(strips));
    backward_kernel<T, form, width><<<grid, block, 0, current_stream(x)>>>(
        data<T>(grad.tensor), grad.pitch, data<T>(rows.tensor), rows.pitch, bias ? data<T>(*bias) : nullptr,
        mutable_data<T>(dx), partials ? mutable_data<C>(*partials) : nullptr, rows.num_rows, rows_per_strip, rows.num_cols);
    FASTMP_LAUNCH_CHECK();
    if (!partials) return;
    sum_strips_kernel<T><<<static_cast<unsigned>(ceil_div(rows.num_cols, kWarp)), dim3(kWarp, kWarp), 0, current_stream(x)>>>(
        data<C>(*partials), mutable_data<T>(dbias), strips, rows.num_cols);
    FASTMP_LAUNCH_CHECK();
  });
  return {dx, dbias};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, str approximate) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, str approximate) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "bias_gelu", fastmp::forward);
  FASTMP_IMPL(m, "bias_gelu_backward", fastmp::backward);
}
