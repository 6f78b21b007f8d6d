// Cross-entropy in CUDA C++: loss and gradient of whole rows in one launch, the row in shared memory in between.
//
// One read of the logits gives a row's maximum and sum of exponentials: a thread takes the maximum of all the
// values it has just loaded, rescales its running sum once, and spends one exponential a logit. Rows start at
// any alignment: elements before the first and after the last 16-byte boundary are handled one by one.
// The semantics are those of the reference in fastmp/ops/cross_entropy.py.
#include "common.cuh"
#include "op.h"

#include <algorithm>

namespace fastmp {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kBlocks = 2;  // on a multiprocessor at least, so that one computes while another waits for memory

// Vectors a thread has in flight; the f64 exponential needs the registers for itself.
template <class T>
constexpr int kUnroll = std::is_same_v<T, double> ? 1 : 4;

// A running (maximum, sum of e^(x - maximum), sum of x - maximum, number of x) over some logits. Sums are relative to 0
// while the maximum is -inf.
template <class C, bool kWithSum>
struct Statistics {
  C top = -INFINITY;
  C exps = 0;
  C total = 0;
  C count = 0;

  template <int kCount>
  __device__ void absorb(const C (&x)[kCount]) {
    C highest = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest = fmax(highest, x[i]);
    const C shift = finite_shift(highest);
    exps *= fast_exp(top - shift);
    if constexpr (kWithSum) total += count * (finite_shift(top) - shift);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      exps += fast_exp(x[i] - shift);
      if constexpr (kWithSum) total += x[i] - shift;
    }
    if constexpr (kWithSum) count += kCount;
    top = highest;
  }

  __device__ void merge(C other_top, C other_exps, C other_total, C other_count) {
    const C highest = fmax(top, other_top);
    const C shift = finite_shift(highest);
    exps = exps * fast_exp(top - shift) + other_exps * fast_exp(other_top - shift);
    if constexpr (kWithSum) {
      total += count * (finite_shift(top) - shift) + other_total + other_count * (finite_shift(other_top) - shift);
      count += other_count;
    }
    top = highest;
  }

  // All threads of the block, in a fixed order; the result is valid in thread 0.
  __device__ void merge_block() {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const C other_top = __shfl_xor_sync(0xffffffffu, top, distance);
      const C other_exps = __shfl_xor_sync(0xffffffffu, exps, distance);
      const C other_total = __shfl_xor_sync(0xffffffffu, total, distance);
      const C other_count = __shfl_xor_sync(0xffffffffu, count, distance);
      merge(other_top, other_exps, other_total, other_count);
    }
    __shared__ C warps[kMaxThreads / kWarp][4];
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) {
      warps[warp][0] = top;
      warps[warp][1] = exps;
      warps[warp][2] = total;
      warps[warp][3] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < static_cast<int>(blockDim.x) / kWarp; ++other) {
        merge(warps[other][0], warps[other][1], warps[other][2], warps[other][3]);
      }
    }
  }
};

// One thread's share of the statistics of row[0 .. num_cols). The first `num_kept` of the vectors after the row's first
// 16-byte boundary go to `kept`; each thread writes those that it reads.
template <bool kWithSum, class T>
__device__ Statistics<Compute<T>, kWithSum> row_statistics(const T* row, int64_t num_cols, Vector<T>* kept,
                                                           int64_t num_kept) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  const int64_t boundary = to_boundary(row);
  const int64_t head = boundary < num_cols ? boundary : num_cols;
  const int64_t num_vectors = (num_cols - head) / kN;
  const int64_t tail = head + num_vectors * kN;
  const T* vectors = row + head;
  Statistics<C, kWithSum> mine;

  const int64_t step = blockDim.x;
  const auto absorb = [&](auto count, int64_t first) {
    constexpr int kCount = decltype(count)::value;
    Vector<T> loaded[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) loaded[u] = load_vector(vectors + (first + u * step) * kN);
    C x[kCount * kN];
#pragma unroll
    for (int i = 0; i < kCount * kN; ++i) x[i] = widen(loaded[i / kN].lane[i % kN]);
    mine.absorb(x);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (first + u * step < num_kept) copy_vector(kept + first + u * step, loaded + u);
    }
  };
  // 1. Whole vectors, kUnroll in flight at once, then one after another.
  int64_t v = threadIdx.x;
  for (; v + (kUnroll<T> - 1) * step < num_vectors; v += kUnroll<T> * step) {
    absorb(std::integral_constant<int, kUnroll<T>>{}, v);
  }
  for (; kUnroll<T> > 1 && v < num_vectors; v += step) absorb(std::integral_constant<int, 1>{}, v);
  // 2. The elements before the first and after the last whole vector.
  if (threadIdx.x < head) {
    const C x[1] = {widen(row[threadIdx.x])};
    mine.absorb(x);
  }
  if (tail + threadIdx.x < num_cols) {
    const C x[1] = {widen(row[tail + threadIdx.x])};
    mine.absorb(x);
  }
  return mine;
}

// Options of the loss.
template <class C>
struct Options {
  int64_t vocab_size, ignore_index;
  C label_smoothing, z_loss;

  // The loss of a token that is not ignored, relative to the maximum until the end. `exps` and `total` are the sums of
  // exponentials and of logits relative to `top`.
  __device__ C loss(int64_t id, C top, C exps, C target_logit, C total, const C* weight) const {
    const C log_sum = log(exps), lse = top + log_sum;
    C value = (1 - label_smoothing) * (log_sum + (top - target_logit)) + z_loss * lse * lse;
    if (label_smoothing != 0) value += label_smoothing * (log_sum - total / static_cast<C>(vocab_size));
    if (weight != nullptr) value *= *weight;
    return id < 0 || id >= vocab_size ? static_cast<C>(NAN) : value;
  }
};

// d loss / d logit = slope * e^(x - top) - uniform - (column == target ? hit : 0)
template <class C>
struct RowGradient {
  C top, slope, uniform, hit;
  int64_t target;
  int64_t num_cols;  // columns that exist
  bool ignored;

  // `scale` is the upstream gradient of the loss, times the token's weight.
  __device__ RowGradient(const Options<C>& options, int64_t id, int64_t num_cols, C top, C exps, C scale)
      : top(top), target(id), num_cols(num_cols), ignored(id == options.ignore_index) {
    if (id < 0 || id >= options.vocab_size) scale = NAN;
    slope = scale * (1 + 2 * options.z_loss * (top + log(exps))) / exps;
    uniform = scale * options.label_smoothing / static_cast<C>(options.vocab_size);
    hit = scale * (1 - options.label_smoothing);
  }

  __device__ C at(C x, int64_t column) const {
    if (ignored || column >= num_cols) return 0;
    const C value = slope * fast_exp(x - top) - uniform;
    return column == target ? value - hit : value;
  }
};

template <class T>
__device__ void gradient_vector(const RowGradient<Compute<T>>& row, const Vector<T>& loaded, T* out, int64_t column) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  C value[kN];
  const int64_t hit_lane = row.target - column;
  if (row.ignored || column + kN > row.num_cols || (hit_lane >= 0 && hit_lane < kN)) {
#pragma unroll
    for (int i = 0; i < kN; ++i) value[i] = row.at(widen(loaded.lane[i]), column + i);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) value[i] = row.slope * fast_exp(widen(loaded.lane[i]) - row.top) - row.uniform;
  }
  store_vector(out + column, value);
}

// Loss and gradient of one row of a whole vocabulary, a block a row; the gradient overwrites the logits. The first
// `num_kept` vectors stay in shared memory in between; the others are read again, from the second-level cache. Columns
// from num_cols on are padding.
template <class T, bool kWithSum>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    loss_gradient_kernel(T* logits, int64_t row_stride, const int64_t* __restrict__ target,
                         const Compute<T>* __restrict__ loss_grad, const Compute<T>* __restrict__ token_weight,
                         Compute<T>* __restrict__ loss, int64_t row_cols, int64_t num_cols, int64_t num_kept,
                         Options<Compute<T>> options) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  auto* kept = dynamic_shared<Vector<T>>();
  __shared__ C shared_top, shared_exps;
  T* row = logits + blockIdx.x * row_stride;
  const int64_t id = target[blockIdx.x];
  const C* weight = token_weight == nullptr ? nullptr : token_weight + blockIdx.x;
  const bool ignored = id == options.ignore_index;
  // 1. Statistics of the row, reduced over the block, and its loss.
  if (!ignored) {
    auto mine = row_statistics<kWithSum>(row, num_cols, kept, num_kept);
    mine.merge_block();
    if (threadIdx.x == 0) {
      const C target_logit = id >= 0 && id < num_cols ? widen(row[id]) : C(0);
      shared_top = finite_shift(mine.top);
      shared_exps = mine.exps;
      loss[blockIdx.x] = options.loss(id, shared_top, shared_exps, target_logit, mine.total, weight);
    }
    __syncthreads();  // every thread has read the row before one writes to it
  } else if (threadIdx.x == 0) {
    loss[blockIdx.x] = 0;
  }
  // 2. Coefficients of the gradient.
  C scale = loss_grad[blockIdx.x];
  if (weight != nullptr) scale *= *weight;
  const RowGradient<C> gradient(options, id, num_cols, ignored ? C(0) : shared_top, ignored ? C(1) : shared_exps,
                                scale);

  // 3. The gradient, the last vectors first, which may still be in a cache; then the ends of the row.
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
    gradient_vector<T>(gradient, loaded, row, head + v * kN);
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

bool has_unit_columns(const Tensor& logits) { return logits.size(1) <= 1 || logits.stride(1) == 1; }

void check_rows(const char* op, const Tensor& logits, const Tensor& per_row, const char* name) {
  FASTMP_CHECK(per_row.dim() == 1 && per_row.size(0) == logits.size(0), op, ": ", name,
               " must have one entry for each of the ", logits.size(0), " rows of the logits, got ", per_row.numel());
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

void check_writable(const char* op, const Tensor& logits) {
  FASTMP_CHECK(logits.dim() == 2, op, ": logits must be (tokens, vocabulary), got ", logits.dim(), " dimensions");
  FASTMP_CHECK(has_unit_columns(logits) && (logits.size(0) <= 1 || logits.stride(0) >= logits.size(1)), op,
               ": rows of the logits must be contiguous and not overlap, got strides (", logits.stride(0), ", ",
               logits.stride(1), ") for shape (", logits.size(0), ", ", logits.size(1), ")");
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
    const int64_t num_cols = std::min(vocab_size, row_cols);
    const int64_t num_kept = std::min(room / kVectorBytes, num_cols / kLanes<T>);
    const auto run = [&](auto kernel) {
      const Grid grid{num_rows, threads_for(row_cols, kLanes<T> * kUnroll<T>), num_kept * kVectorBytes};
      launch(grid, current_stream(logits), kernel, mutable_data<T>(logits), logits.stride(0), data<int64_t>(target),
             data<C>(loss_grad), weight ? data<C>(*weight) : nullptr, mutable_data<C>(loss), row_cols, num_cols,
             num_kept, Options<C>{vocab_size, ignore_index, static_cast<C>(label_smoothing), static_cast<C>(z_loss)});
    };
    label_smoothing > 0 ? run(loss_gradient_kernel<T, true>) : run(loss_gradient_kernel<T, false>);
  });
  return loss;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def(
      "cross_entropy_loss_grad_(Tensor(a!) logits, Tensor target, Tensor loss_grad, Tensor? token_weight, "
      "int vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "cross_entropy_loss_grad_", fastmp::loss_gradient_in_place);
}
