// Cross-entropy on the CPU: shard statistics, their merge, and the gradient (see fastmp/ops/cross_entropy.py).
//
// A thread takes whole rows. The statistics walk a row in blocks that stay in the first-level cache: a pass for the
// block's maximum, which fetches it from memory, then a pass for the exponentials, which prefetches the next block. So
// memory is read once and a logit costs one exponential. The gradient is one pass, equal in place and out of place.
#include "cpu/simd.h"

#include <algorithm>
#include <limits>

#include "stable.h"

namespace fastmp {

// Columns [0, real) of a row are a vocabulary shard that starts at id `vocab_start`, [real, columns) are padding.
struct Shard {
  int64_t row_stride, real, columns, vocab_start;
  // The row's target as a column of this shard, or -1.
  int64_t column_of(int64_t target) const {
    return target >= vocab_start && target < vocab_start + real ? target - vocab_start : -1;
  }
};

struct GradOptions {
  int64_t vocab_size, ignore_index;
  double label_smoothing, z_loss;
};

FASTMP_DECLARE(
  template <typename T, typename A>
  void stats(const T* logits, const int64_t* target, A* out, Shard shard, bool with_sum, int64_t begin, int64_t end);
  template <typename T, typename A>
  void grad(const T* logits, T* out, const int64_t* target, const A* lse, const A* grad_loss, const A* token_weight,
            Shard shard, int64_t out_stride, GradOptions options, int64_t begin, int64_t end);
)

namespace FASTMP_ISA {

constexpr int64_t kBlock = 4096;  // logits
constexpr int kUnroll = 4;        // independent accumulators, enough to hide the latency of an addition

template <typename T>
FASTMP_INLINE scalar_of<T> value_at(const T* row, int64_t column) {
  return load(row + column, 1, 0)[0];
}

// Maximum of x[0, count) and `top`; NaN is passed over.
template <typename T>
FASTMP_INLINE scalar_of<T> block_max(const T* x, int64_t count, scalar_of<T> top) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  V tops[kUnroll];
  for (V& lanes : tops) lanes = broadcast<V>(top);
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    for (int u = 0; u < kUnroll; ++u) tops[u] = max(load(x + i + u * kLanes), tops[u]);
  }
  for (; i < count; i += kLanes) tops[0] = max(load(x + i, count - i, top), tops[0]);
  return max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
}

// Adds exp(x - top) over x[0, count) to the sums, and x itself to the plain sums where they are asked for.
template <bool kWithSum, typename T, typename V>
FASTMP_INLINE void block_sum(const T* x, int64_t count, scalar_of<T> top, V (&sums)[kUnroll], V (&plain)[kUnroll]) {
  constexpr int kLanes = num_lanes<V>;
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    for (int u = 0; u < kUnroll; ++u) {
      const T* at = x + i + u * kLanes;
      __builtin_prefetch(at + kBlock);
      const V lanes = load(at);
      sums[u] += exp(lanes - top);
      if constexpr (kWithSum) plain[u] += lanes;
    }
  }
  for (; i < count; i += kLanes) {
    sums[0] += exp(load(x + i, count - i, -std::numeric_limits<scalar_of<T>>::infinity()) - top);
    if constexpr (kWithSum) plain[0] += load(x + i, count - i, 0);
  }
}

// out = (maximum, sum of exp(x - maximum)[, sum of x]) of a row; an infinite maximum does not enter the difference
// where it is negative, so that a row of -inf has the sum 0.
template <bool kWithSum, typename T>
void stats_row(const T* x, int64_t real, scalar_of<T>* top_out, scalar_of<T>* sum_out, scalar_of<T>* plain_out) {
  using V = lanes_of<T>;
  using A = scalar_of<T>;
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  A top = kLowest;
  V sums[kUnroll] = {}, plain[kUnroll] = {};
  for (int64_t at = 0; at < real; at += kBlock) {
    const int64_t count = std::min(kBlock, real - at);
    const A higher = block_max(x + at, count, top);
    const A finite = higher == kLowest ? 0 : higher;
    if (higher > top) {
      const V shrink = exp(broadcast<V>(top - finite));
      for (V& lanes : sums) lanes *= shrink;
      top = higher;
    }
    block_sum<kWithSum>(x + at, count, finite, sums, plain);
  }
  *top_out = top;
  *sum_out = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if constexpr (kWithSum) *plain_out = sum((plain[0] + plain[1]) + (plain[2] + plain[3]));
}

template <typename T, typename A>
void stats(const T* logits, const int64_t* target, A* out, Shard shard, bool with_sum, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * shard.row_stride;
    A* to = out + row * (with_sum ? 4 : 3);
    const int64_t column = shard.column_of(target[row]);
    if (with_sum) {
      stats_row<true>(x, shard.real, to, to + 1, to + 3);
    } else {
      stats_row<false, T>(x, shard.real, to, to + 1, nullptr);
    }
    to[2] = column >= 0 ? value_at(x, column) : 0;
  }
}

// The part of the gradient that is the same for every column of a row.
template <typename V, typename A>
FASTMP_INLINE V gradient(V logits, A lse, A slope, A shift, A scale) {
  return (exp(logits - lse) * slope - shift) * scale;
}

template <typename T, typename A>
void grad(const T* logits, T* out, const int64_t* target, const A* lse, const A* grad_loss, const A* token_weight,
          Shard shard, int64_t out_stride, GradOptions options, int64_t begin, int64_t end) {
  using V = lanes_of<T>;
  const A shift = options.label_smoothing / options.vocab_size;
  const A target_share = 1 - options.label_smoothing;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * shard.row_stride;
    T* to = out + row * out_stride;
    const bool ignored = target[row] == options.ignore_index;
    const int64_t live = ignored ? 0 : shard.real;
    std::fill(to + live, to + shard.columns, T(0));
    if (ignored) continue;
    A scale = token_weight == nullptr ? grad_loss[row] : grad_loss[row] * token_weight[row];
    if (target[row] < 0 || target[row] >= options.vocab_size) scale = std::numeric_limits<A>::quiet_NaN();
    const A slope = 1 + 2 * static_cast<A>(options.z_loss) * lse[row];
    const int64_t column = shard.column_of(target[row]);
    const A target_logit = column < 0 ? 0 : value_at(x, column);
    for (int64_t i = 0; i < live; i += num_lanes<V>) {
      store(to + i, gradient(load(x + i, live - i, 0), lse[row], slope, shift, scale), live - i);
    }
    if (column >= 0) {
      const V there = gradient(broadcast<V>(target_logit), lse[row], slope, shift, scale);
      store(to + column, there - target_share * scale, 1);
    }
  }
}

#define FASTMP_INSTANTIATE(T, A)                                                                                    \
  template void stats(const T*, const int64_t*, A*, Shard, bool, int64_t, int64_t);                                 \
  template void grad(const T*, T*, const int64_t*, const A*, const A*, const A*, Shard, int64_t, GradOptions, int64_t, \
                     int64_t);
FASTMP_INSTANTIATE(float, float)
FASTMP_INSTANTIATE(double, double)
FASTMP_INSTANTIATE(BFloat16, float)
FASTMP_INSTANTIATE(Half, float)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA

#ifdef FASTMP_ISA_BASE

namespace {

constexpr int64_t kGrain = 1 << 15;  // logits a thread should at least have

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

ScalarType accumulator(ScalarType dtype) { return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

int64_t grain_of(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)); }

Shard shard_of(const char* op, const Tensor& logits, int64_t vocab_start, int64_t vocab_size) {
  FASTMP_CHECK(logits.dim() == 2, op, ": logits must be (N, V), got ", logits.dim(), " dimensions");
  const int64_t columns = logits.size(1);
  FASTMP_CHECK(columns <= 1 || logits.stride(1) == 1, op, ": neighbouring columns of the logits must be next to each ",
               "other in memory, got stride ", logits.stride(1));
  return {logits.stride(0), std::clamp<int64_t>(vocab_size - vocab_start, 0, columns), columns, vocab_start};
}

// `tensor` as contiguous numbers, one a token.
Tensor per_token(const char* op, const char* name, const Tensor& tensor, int64_t tokens, ScalarType dtype) {
  FASTMP_CHECK(tensor.dim() == 1 && tensor.size(0) == tokens && tensor.scalar_type() == dtype, op, ": ", name,
               " must be ", dtype_name(dtype), " (", tokens, "), got ", dtype_name(tensor.scalar_type()), " with ",
               tensor.numel(), " elements");
  return torch::stable::contiguous(tensor);
}

Tensor cross_entropy_stats(Tensor logits, Tensor target, int64_t vocab_start, int64_t vocab_size, bool with_sum) {
  constexpr const char* op = "cross_entropy_stats";
  const Shard shard = shard_of(op, logits, vocab_start, vocab_size);
  const int64_t tokens = logits.size(0);
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  Tensor out = empty({tokens, with_sum ? 4 : 3}, accumulator(logits.scalar_type()), logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(stats<T, A>);
    const T* x = logits.const_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    A* to = out.mutable_data_ptr<A>();
    parallel_for(0, tokens, grain_of(shard.real),
                 [&](int64_t begin, int64_t end) { kernel(x, ids, to, shard, with_sum, begin, end); });
  });
  return out;
}

// Loss and log-sum-exp of one token from its statistics in all shards, `stride` numbers apart.
template <typename A>
void merge_token(const A* stats, int64_t shards, int64_t stride, bool with_sum, const GradOptions& options, A& loss,
                 A& lse) {
  A top = -std::numeric_limits<A>::infinity();
  for (int64_t p = 0; p < shards; ++p) top = std::max(top, stats[p * stride]);
  if (top == -std::numeric_limits<A>::infinity()) top = 0;
  A sum = 0, target_logit = 0, plain = 0;
  for (int64_t p = 0; p < shards; ++p) {
    const A* shard = stats + p * stride;
    sum += shard[1] * std::exp(shard[0] - top);
    target_logit += shard[2];
    if (with_sum) plain += shard[3];
  }
  const A smoothing = options.label_smoothing;
  lse = top + std::log(sum);
  loss = (1 - smoothing) * (lse - target_logit) + static_cast<A>(options.z_loss) * lse * lse;
  if (smoothing > 0) loss += smoothing * (lse - plain / options.vocab_size);
}

std::tuple<Tensor, Tensor> cross_entropy_merge(Tensor stats, Tensor target, std::optional<Tensor> token_weight,
                                               int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                                               double z_loss) {
  constexpr const char* op = "cross_entropy_merge";
  FASTMP_CHECK(stats.dim() == 3 && (stats.size(2) == 4 || (stats.size(2) == 3 && label_smoothing == 0)), op,
               ": stats must be (P, N, 3), or (P, N, 4) with label smoothing, got ", stats.dim(), " dimensions, the last ",
               stats.dim() ? stats.size(stats.dim() - 1) : 0);
  const int64_t shards = stats.size(0), tokens = stats.size(1), width = stats.size(2);
  const ScalarType dtype = stats.scalar_type();
  FASTMP_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op, ": stats must be float32 or float64, got ",
               dtype_name(dtype));
  stats = torch::stable::contiguous(stats);
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  Tensor loss = empty({tokens}, dtype, stats), lse = empty({tokens}, dtype, stats);
  const GradOptions options{vocab_size, ignore_index, label_smoothing, z_loss};
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    const A* from = stats.const_data_ptr<A>();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    const int64_t* ids = target.const_data_ptr<int64_t>();
    A* to_loss = loss.mutable_data_ptr<A>();
    A* to_lse = lse.mutable_data_ptr<A>();
    parallel_for(0, tokens, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        merge_token(from + i * width, shards, tokens * width, width == 4, options, to_loss[i], to_lse[i]);
        if (weight != nullptr) to_loss[i] *= weight[i];
        if (ids[i] < 0 || ids[i] >= vocab_size) to_loss[i] = std::numeric_limits<A>::quiet_NaN();
        if (ids[i] == ignore_index) to_loss[i] = 0;
      }
    });
  };
  dtype == ScalarType::Double ? run(0.0) : run(0.0f);
  return {loss, lse};
}

void launch_grad(const char* op, const Tensor& logits, const Tensor& out, Tensor target, Tensor lse, Tensor grad_loss,
                 std::optional<Tensor> token_weight, int64_t vocab_start, const GradOptions& options) {
  const Shard shard = shard_of(op, logits, vocab_start, options.vocab_size);
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = accumulator(logits.scalar_type());
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  lse = per_token(op, "lse", lse, tokens, dtype);
  grad_loss = per_token(op, "grad_loss", grad_loss, tokens, dtype);
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(grad<T, A>);
    const T* x = logits.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    const A* log_sum = lse.const_data_ptr<A>();
    const A* upstream = grad_loss.const_data_ptr<A>();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    const int64_t out_stride = out.stride(0);
    parallel_for(0, tokens, grain_of(shard.columns), [&](int64_t begin, int64_t end) {
      kernel(x, to, ids, log_sum, upstream, weight, shard, out_stride, options, begin, end);
    });
  });
}

Tensor cross_entropy_grad(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, std::optional<Tensor> token_weight,
                          int64_t vocab_start, int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                          double z_loss) {
  FASTMP_CHECK(logits.dim() == 2, "cross_entropy_grad: logits must be (N, V), got ", logits.dim(), " dimensions");
  Tensor out = empty({logits.size(0), logits.size(1)}, logits.scalar_type(), logits);
  launch_grad("cross_entropy_grad", logits, out, target, lse, grad_loss, token_weight, vocab_start,
              {vocab_size, ignore_index, label_smoothing, z_loss});
  return out;
}

void cross_entropy_grad_(Tensor logits, Tensor target, Tensor lse, Tensor grad_loss, std::optional<Tensor> token_weight,
                         int64_t vocab_start, int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                         double z_loss) {
  launch_grad("cross_entropy_grad_", logits, logits, target, lse, grad_loss, token_weight, vocab_start,
              {vocab_size, ignore_index, label_smoothing, z_loss});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  m.impl("cross_entropy_stats", TORCH_BOX(&cross_entropy_stats));
  m.impl("cross_entropy_merge", TORCH_BOX(&cross_entropy_merge));
  m.impl("cross_entropy_grad", TORCH_BOX(&cross_entropy_grad));
  m.impl("cross_entropy_grad_", TORCH_BOX(&cross_entropy_grad_));
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
