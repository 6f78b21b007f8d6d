// The cross-entropy family in CUDA C++: shard statistics, merge, gradient (fresh or in place), and loss and gradient
// of whole rows at once.
//
// The semantics are those of the references in fastmp/ops/cross_entropy.py.
#include "cross_entropy.cuh"
#include "op.h"

#include <algorithm>

namespace fastmp {
namespace {

// One block a row. `num_cols` counts the columns that exist (no padding).
template <class T, bool kWithSum>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    stats_kernel(const T* __restrict__ logits, int64_t row_stride, const int64_t* __restrict__ target,
                 Compute<T>* __restrict__ stats, int64_t num_cols, int64_t vocab_start) {
  using C = Compute<T>;
  const int64_t row_index = blockIdx.x;
  const T* row = logits + row_index * row_stride;
  auto mine = row_statistics<kWithSum, false>(row, num_cols, static_cast<Vector<T>*>(nullptr), 0);
  mine.merge_block();

  if (threadIdx.x == 0) {
    const int64_t column = target[row_index] - vocab_start;
    C* out = stats + row_index * (kWithSum ? 4 : 3);
    out[0] = mine.top;
    out[1] = mine.exps;
    out[2] = column >= 0 && column < num_cols ? widen(row[column]) : C(0);
    if constexpr (kWithSum) out[3] = mine.total;
  }
}

// One thread a token: `stats` (num_shards, num_tokens, width) -> loss and log-sum-exp.
template <class C>
__global__ void merge_kernel(const C* __restrict__ stats, const int64_t* __restrict__ target,
                             const C* __restrict__ token_weight, C* __restrict__ loss, C* __restrict__ lse,
                             int64_t num_shards, int64_t num_tokens, int width, Options<C> options) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= num_tokens) return;
  C top = -INFINITY;
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    top = fmax(top, stats[(shard * num_tokens + token) * width]);
  }
  const C shift = finite_shift(top);
  C exps = 0, target_logit = 0, total = 0;
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    const C* part = stats + (shard * num_tokens + token) * width;
    exps += part[1] * exp(part[0] - shift);
    target_logit += part[2];
    if (width == 4) total += part[3];
  }
  const C log_sum = shift + log(exps);
  lse[token] = log_sum;

  const int64_t id = target[token];
  const C* weight = token_weight == nullptr ? nullptr : token_weight + token;
  loss[token] = id == options.ignore_index ? 0 : options.loss(id, log_sum, target_logit, total, weight);
}

// Grid (rows, chunks of a row). `logits` and `out` may be the same memory: a thread reads an element before it
// writes that element, and nobody else touches it. So no __restrict__ here.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    gradient_kernel(const T* logits, int64_t row_stride, T* out, int64_t out_stride,
                    const int64_t* __restrict__ target, const Compute<T>* __restrict__ lse,
                    const Compute<T>* __restrict__ grad_loss, const Compute<T>* __restrict__ token_weight,
                    int64_t row_cols, int64_t num_cols, int64_t vocab_start, Options<Compute<T>> options) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  const int64_t row_index = blockIdx.x;
  const T* in_row = logits + row_index * row_stride;
  T* out_row = out + row_index * out_stride;

  C scale = grad_loss[row_index];
  if (token_weight != nullptr) scale *= token_weight[row_index];
  const RowGradient<C> row(options, target[row_index], vocab_start, num_cols, lse[row_index], scale);

  const int64_t boundary = to_boundary(in_row);
  const int64_t head = boundary < row_cols ? boundary : row_cols;
  const int64_t num_vectors = (row_cols - head) / kN;
  const int64_t tail = head + num_vectors * kN;
  const bool aligned = is_aligned(out_row + head);

  const int64_t step = blockDim.x;
  const int64_t stride = gridDim.y * kGradUnroll<T> * step;
  for (int64_t first = blockIdx.y * kGradUnroll<T> * step + threadIdx.x; first < num_vectors; first += stride) {
    Vector<T> loaded[kGradUnroll<T>];
#pragma unroll
    for (int u = 0; u < kGradUnroll<T>; ++u) {
      const int64_t v = first + u * step;
      if (v < num_vectors) loaded[u] = load_vector(in_row + head + v * kN);
    }
#pragma unroll
    for (int u = 0; u < kGradUnroll<T>; ++u) {
      const int64_t v = first + u * step;
      if (v < num_vectors) gradient_vector<T>(row, loaded[u], out_row, head + v * kN, aligned);
    }
  }
  if (blockIdx.y != 0) return;
  if (threadIdx.x < head) {
    out_row[threadIdx.x] = narrow<T>(row.at(widen(in_row[threadIdx.x]), threadIdx.x));
  }
  const int64_t last = tail + threadIdx.x;
  if (last < row_cols) out_row[last] = narrow<T>(row.at(widen(in_row[last]), last));
}

// One block a row of a whole vocabulary: its loss, then its gradient over it. The first `num_kept` vectors stay in shared
// memory in between; the others, read last, are read again from the second-level cache. Columns from num_cols on are
// padding.
template <class T, bool kWithSum>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    loss_gradient_kernel(T* logits, int64_t row_stride, const int64_t* __restrict__ target,
                         const Compute<T>* __restrict__ loss_grad, const Compute<T>* __restrict__ token_weight,
                         Compute<T>* __restrict__ loss, int64_t row_cols, int64_t num_cols, int64_t num_kept,
                         Options<Compute<T>> options) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  extern __shared__ uint4 kept_bytes[];
  auto* kept = reinterpret_cast<Vector<T>*>(kept_bytes);
  __shared__ C shared_lse;
  T* row = logits + blockIdx.x * row_stride;
  const int64_t id = target[blockIdx.x];
  const C* weight = token_weight == nullptr ? nullptr : token_weight + blockIdx.x;
  const bool ignored = id == options.ignore_index;
  if (!ignored) {
    auto mine = row_statistics<kWithSum, true>(row, num_cols, kept, num_kept);
    mine.merge_block();
    if (threadIdx.x == 0) {
      const C target_logit = id >= 0 && id < num_cols ? widen(row[id]) : C(0);
      shared_lse = finite_shift(mine.top) + log(mine.exps);
      loss[blockIdx.x] = options.loss(id, shared_lse, target_logit, mine.total, weight);
    }
    __syncthreads();  // all have read the row, before anyone writes to it
  } else if (threadIdx.x == 0) {
    loss[blockIdx.x] = 0;
  }
  C scale = loss_grad[blockIdx.x];
  if (weight != nullptr) scale *= *weight;
  const RowGradient<C> gradient(options, id, 0, num_cols, ignored ? C(0) : shared_lse, scale);

  const int64_t boundary = to_boundary(row);
  const int64_t head = boundary < row_cols ? boundary : row_cols;
  const int64_t num_vectors = (row_cols - head) / kN;
  const int64_t tail = head + num_vectors * kN;
  const int64_t in_shared = ignored || head > num_cols ? 0 : min(num_kept, (num_cols - head) / kN);
  const int64_t step = blockDim.x;
  const int64_t first = threadIdx.x;
  for (int64_t v = first + (num_vectors > first ? (num_vectors - 1 - first) / step : -1) * step; v >= 0; v -= step) {
    Vector<T> loaded{};
    if (v < in_shared) {
      copy_vector(&loaded, kept + v);
    } else if (!ignored) {
      loaded = load_vector(row + head + v * kN);
    }
    gradient_vector<T>(gradient, loaded, row, head + v * kN, true);
  }
  if (threadIdx.x < head) row[threadIdx.x] = narrow<T>(gradient.at(widen(row[threadIdx.x]), threadIdx.x));
  const int64_t last = tail + threadIdx.x;
  if (last < row_cols) row[last] = narrow<T>(gradient.at(widen(row[last]), last));
}

// Threads for one row that give each `per_thread` elements at least: whole warps, two or more.
int threads_for(int64_t num_cols, int64_t per_thread) {
  int threads = 2 * kWarp;
  while (threads < kMaxThreads && threads * per_thread < num_cols) threads *= 2;
  return threads;
}

int64_t existing_columns(int64_t row_cols, int64_t vocab_start, int64_t vocab_size) {
  const int64_t left = vocab_size - vocab_start;
  return left < 0 ? 0 : left < row_cols ? left : row_cols;
}

bool has_unit_columns(const Tensor& logits) { return logits.size(1) <= 1 || logits.stride(1) == 1; }

void check_rows(const char* op, const Tensor& logits, const Tensor& per_row, const char* name) {
  FASTMP_CHECK(per_row.dim() == 1 && per_row.size(0) == logits.size(0), op, ": ", name, " must have one entry for each of the ",
               logits.size(0), " rows of the logits, got ", per_row.numel());
}

// One number a token, contiguous and in the dtype of the statistics.
Tensor per_token(const Tensor& tensor, ScalarType dtype) {
  const Tensor same = tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
  return torch::stable::contiguous(same);
}

Tensor targets(const char* op, const Tensor& target) {
  FASTMP_CHECK(target.scalar_type() == ScalarType::Long, op, ": target must be int64, got ",
               dtype_name(target.scalar_type()));
  return torch::stable::contiguous(target);
}

Tensor stats(const Tensor& logits_any, const Tensor& target_any, int64_t vocab_start, int64_t vocab_size, bool with_sum) {
  constexpr const char* kOp = "cross_entropy_stats";
  FASTMP_CHECK(logits_any.dim() == 2, kOp, ": logits must be (tokens, vocabulary), got ", logits_any.dim(), " dimensions");
  check_rows(kOp, logits_any, target_any, "target");
  const DeviceGuard guard(logits_any);
  const Tensor logits = has_unit_columns(logits_any) ? logits_any : torch::stable::contiguous(logits_any);
  const Tensor target = targets(kOp, target_any);
  const int64_t num_rows = logits.size(0);
  const int64_t num_cols = existing_columns(logits.size(1), vocab_start, vocab_size);
  Tensor out = fastmp::empty({num_rows, with_sum ? 4 : 3}, compute_dtype(logits.scalar_type()), logits);
  if (num_rows == 0) return out;
  dispatch_device(logits.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(num_rows), threads_for(num_cols, kLanes<T> * kUnroll<T>), 0, current_stream(logits)>>>(
          data<T>(logits), logits.stride(0), data<int64_t>(target), mutable_data<Compute<T>>(out), num_cols, vocab_start);
    };
    with_sum ? launch(stats_kernel<T, true>) : launch(stats_kernel<T, false>);
  });
  FASTMP_LAUNCH_CHECK();
  return out;
}

std::tuple<Tensor, Tensor> merge(const Tensor& stats_any, const Tensor& target_any, std::optional<Tensor> token_weight,
                                 int64_t vocab_size, int64_t ignore_index, double label_smoothing, double z_loss) {
  constexpr const char* kOp = "cross_entropy_merge";
  FASTMP_CHECK(stats_any.dim() == 3 && (stats_any.size(2) == 4 || (stats_any.size(2) == 3 && label_smoothing == 0)), kOp,
               ": stats must be (shards, tokens, 3), or 4 with label smoothing; got ", stats_any.dim(),
               " dimensions, the last of size ", stats_any.size(stats_any.dim() - 1));
  const ScalarType dtype = stats_any.scalar_type();
  FASTMP_CHECK(dtype == compute_dtype(dtype), kOp, ": stats must be float32 or float64, got ", dtype_name(dtype));
  const int64_t num_shards = stats_any.size(0), num_tokens = stats_any.size(1);
  FASTMP_CHECK(target_any.dim() == 1 && target_any.size(0) == num_tokens, kOp, ": stats are of ", num_tokens,
               " tokens but target has ", target_any.numel());
  const DeviceGuard guard(stats_any);
  const Tensor stats = torch::stable::contiguous(stats_any);
  const Tensor target = targets(kOp, target_any);
  std::optional<Tensor> weight;
  if (token_weight) weight = per_token(*token_weight, dtype);
  Tensor loss = fastmp::empty({num_tokens}, dtype, stats), lse = fastmp::empty({num_tokens}, dtype, stats);
  if (num_tokens == 0) return {loss, lse};
  const auto launch = [&](auto tag) {
    using C = typename decltype(tag)::type;
    constexpr int kThreads = 128;
    merge_kernel<C><<<static_cast<unsigned>(ceil_div(num_tokens, kThreads)), kThreads, 0, current_stream(stats)>>>(
        data<C>(stats), data<int64_t>(target), weight ? data<C>(*weight) : nullptr, mutable_data<C>(loss),
        mutable_data<C>(lse), num_shards, num_tokens, static_cast<int>(stats.size(2)),
        Options<C>{vocab_size, ignore_index, static_cast<C>(label_smoothing), static_cast<C>(z_loss)});
  };
  dtype == ScalarType::Double ? launch(TypeTag<double>{}) : launch(TypeTag<float>{});
  FASTMP_LAUNCH_CHECK();
  return {loss, lse};
}

// Writes the gradient of `logits` (unit column stride) to `out`, which may be `logits` itself.
void gradient_into(const char* op, const Tensor& logits, const Tensor& out, const Tensor& target_any,
                   const Tensor& lse_any, const Tensor& grad_any, const std::optional<Tensor>& token_weight,
                   int64_t vocab_start, int64_t vocab_size, int64_t ignore_index, double label_smoothing, double z_loss) {
  check_rows(op, logits, target_any, "target");
  check_rows(op, logits, lse_any, "lse");
  check_rows(op, logits, grad_any, "grad_loss");
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  const Tensor target = targets(op, target_any);
  const Tensor lse = per_token(lse_any, dtype), grad = per_token(grad_any, dtype);
  std::optional<Tensor> weight;
  if (token_weight) {
    check_rows(op, logits, *token_weight, "token_weight");
    weight = per_token(*token_weight, dtype);
  }
  const int64_t num_rows = logits.size(0), row_cols = logits.size(1);
  if (num_rows == 0 || row_cols == 0) return;
  dispatch_device(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const int threads = threads_for(row_cols, kLanes<T> * kGradUnroll<T>);
    const int64_t chunks = ceil_div(row_cols, threads * kLanes<T> * kGradUnroll<T>);
    const dim3 grid(static_cast<unsigned>(num_rows), static_cast<unsigned>(chunks < 65535 ? chunks : 65535));
    gradient_kernel<T><<<grid, threads, 0, current_stream(logits)>>>(
        data<T>(logits), logits.stride(0), mutable_data<T>(out), out.stride(0), data<int64_t>(target), data<C>(lse),
        data<C>(grad), weight ? data<C>(*weight) : nullptr, row_cols,
        existing_columns(row_cols, vocab_start, vocab_size), vocab_start,
        Options<C>{vocab_size, ignore_index, static_cast<C>(label_smoothing), static_cast<C>(z_loss)});
  });
  FASTMP_LAUNCH_CHECK();
}

Tensor gradient(const Tensor& logits_any, const Tensor& target, const Tensor& lse, const Tensor& grad_loss,
                std::optional<Tensor> token_weight, int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                double label_smoothing, double z_loss) {
  constexpr const char* kOp = "cross_entropy_grad";
  FASTMP_CHECK(logits_any.dim() == 2, kOp, ": logits must be (tokens, vocabulary), got ", logits_any.dim(), " dimensions");
  const DeviceGuard guard(logits_any);
  const Tensor logits = has_unit_columns(logits_any) ? logits_any : torch::stable::contiguous(logits_any);
  Tensor out = fastmp::empty({logits.size(0), logits.size(1)}, logits.scalar_type(), logits);
  gradient_into(kOp, logits, out, target, lse, grad_loss, token_weight, vocab_start, vocab_size, ignore_index,
                label_smoothing, z_loss);
  return out;
}

void check_writable(const char* op, const Tensor& logits) {
  FASTMP_CHECK(logits.dim() == 2, op, ": logits must be (tokens, vocabulary), got ", logits.dim(), " dimensions");
  FASTMP_CHECK(has_unit_columns(logits) && (logits.size(0) <= 1 || logits.stride(0) >= logits.size(1)), op,
               ": rows of the logits must be contiguous and not overlap, got strides (", logits.stride(0), ", ",
               logits.stride(1), ") for shape (", logits.size(0), ", ", logits.size(1), ")");
}

void gradient_in_place(Tensor& logits, const Tensor& target, const Tensor& lse, const Tensor& grad_loss,
                       std::optional<Tensor> token_weight, int64_t vocab_start, int64_t vocab_size,
                       int64_t ignore_index, double label_smoothing, double z_loss) {
  constexpr const char* kOp = "cross_entropy_grad_";
  check_writable(kOp, logits);
  const DeviceGuard guard(logits);
  gradient_into(kOp, logits, logits, target, lse, grad_loss, token_weight, vocab_start, vocab_size, ignore_index,
                label_smoothing, z_loss);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  FASTMP_CUDA_CHECK(cudaGetDevice(&device));
  FASTMP_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

Tensor loss_gradient_in_place(Tensor& logits, const Tensor& target_any, const Tensor& loss_grad_any,
                              std::optional<Tensor> token_weight, int64_t vocab_size, int64_t ignore_index,
                              double label_smoothing, double z_loss) {
  constexpr const char* kOp = "cross_entropy_loss_grad_";
  check_writable(kOp, logits);
  check_rows(kOp, logits, target_any, "target");
  check_rows(kOp, logits, loss_grad_any, "loss_grad");
  const DeviceGuard guard(logits);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  const Tensor target = targets(kOp, target_any), loss_grad = per_token(loss_grad_any, dtype);
  std::optional<Tensor> weight;
  if (token_weight) {
    check_rows(kOp, logits, *token_weight, "token_weight");
    weight = per_token(*token_weight, dtype);
  }
  const int64_t num_rows = logits.size(0), row_cols = logits.size(1);
  Tensor loss = fastmp::empty({num_rows}, dtype, logits);
  if (num_rows == 0) return loss;
  dispatch_device(logits.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    constexpr int kReserved = 2048;  // the system's own share of shared memory, and the kernel's static part
    const int64_t room = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / kBlocks - kReserved;
    const int64_t num_cols = existing_columns(row_cols, 0, vocab_size);
    const int64_t num_kept = std::min(room / kVectorBytes, num_cols / kLanes<T>);
    const int bytes = static_cast<int>(num_kept * kVectorBytes);
    const auto launch = [&](auto kernel) {
      FASTMP_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      const int threads = threads_for(row_cols, kLanes<T> * kUnroll<T>);
      kernel<<<static_cast<unsigned>(num_rows), threads, bytes, current_stream(logits)>>>(
          mutable_data<T>(logits), logits.stride(0), data<int64_t>(target), data<C>(loss_grad),
          weight ? data<C>(*weight) : nullptr, mutable_data<C>(loss), row_cols, num_cols, num_kept,
          Options<C>{vocab_size, ignore_index, static_cast<C>(label_smoothing), static_cast<C>(z_loss)});
    };
    label_smoothing > 0 ? launch(loss_gradient_kernel<T, true>) : launch(loss_gradient_kernel<T, false>);
  });
  FASTMP_LAUNCH_CHECK();
  return loss;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def("cross_entropy_stats(Tensor logits, Tensor target, int vocab_start, int vocab_size, bool with_sum) -> Tensor");
  m.def(
      "cross_entropy_merge(Tensor stats, Tensor target, Tensor? token_weight, int vocab_size, int ignore_index, "
      "float label_smoothing, float z_loss) -> (Tensor loss, Tensor lse)");
  m.def(
      "cross_entropy_grad(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, Tensor? token_weight, "
      "int vocab_start, int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor");
  m.def(
      "cross_entropy_grad_(Tensor(a!) logits, Tensor target, Tensor lse, Tensor grad_loss, Tensor? token_weight, "
      "int vocab_start, int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> ()");
  m.def(
      "cross_entropy_loss_grad_(Tensor(a!) logits, Tensor target, Tensor loss_grad, Tensor? token_weight, "
      "int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "cross_entropy_stats", fastmp::stats);
  FASTMP_IMPL(m, "cross_entropy_merge", fastmp::merge);
  FASTMP_IMPL(m, "cross_entropy_grad", fastmp::gradient);
  FASTMP_IMPL(m, "cross_entropy_grad_", fastmp::gradient_in_place);
  FASTMP_IMPL(m, "cross_entropy_loss_grad_", fastmp::loss_gradient_in_place);
}
