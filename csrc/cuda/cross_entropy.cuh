// What the cross-entropy kernels are made of: the statistics of a row, the loss of a token, the gradient of a row.
//
// One read of the logits gives a row's maximum and sum of exponentials: a thread takes the maximum of all the
// values it has just loaded, rescales its running sum once, and spends one exponential a logit. Rows start at
// any alignment: elements before the first and after the last 16-byte boundary are handled one by one.
#pragma once

#include "common.cuh"

namespace fastmp {

constexpr int kMaxThreads = 512;
constexpr int kBlocks = 2;  // on a multiprocessor at least, so that one computes while another waits for memory

// Vectors a thread has in flight; the f64 exponential, and with four the bf16 gradient, needs the registers for itself.
template <class T>
constexpr int kUnroll = std::is_same_v<T, double> ? 1 : 4;
template <class T>
constexpr int kGradUnroll = std::is_same_v<T, double> ? 1 : 2;

// A running (maximum, sum of e^(x - maximum), sum of x) over some logits.
template <class C, bool kWithSum>
struct Statistics {
  C top = -INFINITY;
  C exps = 0;
  C total = 0;

  template <int kCount>
  __device__ void absorb(const C (&x)[kCount]) {
    C highest = top;
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest = fmax(highest, x[i]);
    const C shift = finite_shift(highest);
    exps *= fast_exp(top - shift);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      exps += fast_exp(x[i] - shift);
      if constexpr (kWithSum) total += x[i];
    }
    top = highest;
  }

  __device__ void merge(C other_top, C other_exps, C other_total) {
    const C highest = fmax(top, other_top);
    const C shift = finite_shift(highest);
    exps = exps * fast_exp(top - shift) + other_exps * fast_exp(other_top - shift);
    top = highest;
    if constexpr (kWithSum) total += other_total;
  }

  // All threads of the block, in a fixed order; the result is valid in thread 0.
  __device__ void merge_block() {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const C other_top = __shfl_xor_sync(0xffffffffu, top, distance);
      const C other_exps = __shfl_xor_sync(0xffffffffu, exps, distance);
      const C other_total = __shfl_xor_sync(0xffffffffu, total, distance);
      merge(other_top, other_exps, other_total);
    }
    __shared__ C warps[kMaxThreads / kWarp][3];
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) {
      warps[warp][0] = top;
      warps[warp][1] = exps;
      warps[warp][2] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < static_cast<int>(blockDim.x) / kWarp; ++other) {
        merge(warps[other][0], warps[other][1], warps[other][2]);
      }
    }
  }
};

// One thread's share of the statistics of row[0 .. num_cols). With kKeep the first `num_kept` of the vectors after the
// row's first 16-byte boundary go to `kept`; each thread writes those that it reads.
template <bool kWithSum, bool kKeep, class T>
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

  int64_t v = threadIdx.x;
  const int64_t step = blockDim.x;
  for (; v + (kUnroll<T> - 1) * step < num_vectors; v += kUnroll<T> * step) {
    Vector<T> loaded[kUnroll<T>];
#pragma unroll
    for (int u = 0; u < kUnroll<T>; ++u) loaded[u] = load_vector(vectors + (v + u * step) * kN);
    C x[kUnroll<T> * kN];
#pragma unroll
    for (int i = 0; i < kUnroll<T> * kN; ++i) x[i] = widen(loaded[i / kN].lane[i % kN]);
    mine.absorb(x);
    if constexpr (kKeep) {
#pragma unroll
      for (int u = 0; u < kUnroll<T>; ++u) {
        if (v + u * step < num_kept) copy_vector(kept + v + u * step, loaded + u);
      }
    }
  }
  for (; v < num_vectors; v += step) {
    const Vector<T> loaded = load_vector(vectors + v * kN);
    C x[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = widen(loaded.lane[i]);
    mine.absorb(x);
    if constexpr (kKeep) {
      if (v < num_kept) copy_vector(kept + v, &loaded);
    }
  }
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

// What a token's loss depends on besides its logits.
template <class C>
struct Options {
  int64_t vocab_size, ignore_index;
  C label_smoothing, z_loss;

  // Of a token that is not ignored. `total` is the sum of its logits.
  __device__ C loss(int64_t id, C log_sum, C target_logit, C total, const C* weight) const {
    C value = (1 - label_smoothing) * (log_sum - target_logit) + z_loss * log_sum * log_sum;
    if (label_smoothing != 0) value += label_smoothing * (log_sum - total / static_cast<C>(vocab_size));
    if (weight != nullptr) value *= *weight;
    return id < 0 || id >= vocab_size ? static_cast<C>(NAN) : value;
  }
};

// d loss / d logit = slope * e^(x - lse) - uniform - (column == target ? hit : 0)
template <class C>
struct RowGradient {
  C lse, slope, uniform, hit;
  int64_t target;  // column in this shard; may lie outside of it
  int64_t num_cols;  // columns that exist
  bool ignored;

  // `scale` is the gradient of the loss, times the token's weight.
  __device__ RowGradient(const Options<C>& options, int64_t id, int64_t vocab_start, int64_t num_cols, C lse, C scale)
      : lse(lse), target(id - vocab_start), num_cols(num_cols), ignored(id == options.ignore_index) {
    if (id < 0 || id >= options.vocab_size) scale = NAN;
    slope = scale * (1 + 2 * options.z_loss * lse);
    uniform = scale * options.label_smoothing / static_cast<C>(options.vocab_size);
    hit = scale * (1 - options.label_smoothing);
  }

  __device__ C at(C x, int64_t column) const {
    if (ignored || column >= num_cols) return 0;
    const C value = slope * fast_exp(x - lse) - uniform;
    return column == target ? value - hit : value;
  }
};

template <class T>
__device__ void gradient_vector(const RowGradient<Compute<T>>& row, const Vector<T>& loaded, T* out, int64_t column,
                                bool aligned) {
  using C = Compute<T>;
  constexpr int kN = kLanes<T>;
  C value[kN];
  const int64_t hit_lane = row.target - column;
  if (row.ignored || column + kN > row.num_cols || (hit_lane >= 0 && hit_lane < kN)) {
#pragma unroll
    for (int i = 0; i < kN; ++i) value[i] = row.at(widen(loaded.lane[i]), column + i);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) value[i] = row.slope * fast_exp(widen(loaded.lane[i]) - row.lse) - row.uniform;
  }
  if (aligned) {
    store_vector(out + column, value);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) out[column + i] = narrow<T>(value[i]);
  }
}

}  // namespace fastmp
