// Cross-entropy on the CPU: shard statistics, their merge, and the gradient (see fastmp/ops/cross_entropy.py).
//
// A thread takes whole rows, and reads each once: a group of vectors in registers gives its part of the maximum and,
// with one exponential a logit, its part of the sum. That sum is kept relative to a reference which moves only when a
// logit exceeds it by kHeadroom, so rescaling is rare. The gradient is one pass, bitwise the same in place. Where the
// gradients of the losses are known beforehand, that pass follows while the row is still in the core's cache.
#include "cpu/simd.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cpu/vocabulary.h"
#include "op.h"

namespace fastmp {

struct GradOptions {
  int64_t vocab_size, ignore_index;
  double label_smoothing, z_loss;
};

// The exponentials of some rows, for a gradient that follows at once: row i has them from values + i * stride on,
// relative to references[i], or not at all where that is NaN.
template <typename A>
struct Exponentials {
  A* values;
  A* references;
  int64_t stride;
};

FASTMP_DECLARE(template <typename T, typename A>
               void stats(const T* logits, const int64_t* target, A* out, Shard shard, bool with_sum,
                          const Exponentials<A>* kept, int64_t begin, int64_t end);
               template <typename T, typename A>
               void grad(const T* logits, T* out, const int64_t* target, const A* merged, const A* grad_loss,
                         const A* token_weight, Shard shard, int64_t out_stride, GradOptions options,
                         const Exponentials<A>* kept, int64_t begin, int64_t end);)

namespace FASTMP_ISA {

// A row is walked in this many places at once, with a pair of vectors in each: one stream of reads would wait at every
// page, and the pairs of all streams still fit the registers. The statistics take 0.26 ns a logit so, 0.47 with one.
constexpr int kStreams = FASTMP_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kHeadroom = 16;         // e^16 times the columns of a row is far from overflow
constexpr int kPrefetchBytes = 2048;  // ahead of the loads; reaches across page boundaries

template <typename T>
FASTMP_INLINE void prefetch_pair(const T* p) {
  __builtin_prefetch(p + kPrefetchBytes / sizeof(T));
  if constexpr (sizeof(T) >= 4) __builtin_prefetch(p + (kPrefetchBytes + kVectorBytes) / sizeof(T));
}

template <typename T>
FASTMP_INLINE scalar_of<T> value_at(const T* row, int64_t column) {
  return load(row + column, 1, 0)[0];
}

// The statistics of one row so far: lane-wise maximum, lane-wise sums of exp(x - reference) and of x - reference.
// A row that has shown only -inf so far has no reference: its limit is -inf, so that the next finite logit sets one.
template <typename V, typename A>
struct RowStats {
  static constexpr A kLowest = -std::numeric_limits<A>::infinity();
  V top = broadcast<V>(kLowest), limit = broadcast<V>(kLowest);
  V sums[2] = {}, plain[2] = {};
  A reference = 0;
  bool moved = false;  // after it was first set

  // Makes room for a group whose lane-wise maximum is `tops`, after `seen` logits.
  FASTMP_INLINE void admit(V tops, int64_t seen) {
    top = max(tops, top);
    if (any_greater(tops, limit)) [[unlikely]] {
      const A higher = max(top);
      if (limit[0] != kLowest) {
        const V shrink = exp(broadcast<V>(reference - higher));
        sums[0] *= shrink;
        sums[1] *= shrink;
        plain[0][0] += seen * (reference - higher);
        moved = true;
      }
      reference = higher;
      limit = broadcast<V>(higher + kHeadroom);
    }
  }
  A maximum() const { return max(top); }
  // Relative to the maximum, or to 0 where that is -inf: the sum of a row of -inf is 0.
  A sum_of_exp() const {
    const A highest = max(top);
    const A shift = highest == kLowest ? 0 : reference - highest;
    return sum((sums[0] + sums[1]) * exp(broadcast<V>(shift)));
  }
  // Relative to the same, of `seen` logits.
  A sum_of_logits(int64_t seen) const {
    const A highest = max(top);
    const A shift = highest == kLowest ? 0 : reference - highest;
    return sum(plain[0] + plain[1]) + seen * shift;
  }
};

// With kKeep the exponentials go to `kept`, pair by pair as they are loaded, and what they are relative to is returned.
template <bool kWithSum, bool kKeep, typename T, typename A>
A stats_row(const T* x, int64_t real, A* out, A* kept) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  RowStats<V, A> row;
  // 1. Groups of one pair of vectors from each stream: raise the maximum, then add the exponentials.
  const int64_t stream = real / (2 * kLanes * kStreams) * (2 * kLanes);  // elements of one
  for (int64_t i = 0; i < stream; i += 2 * kLanes) {
    Pair<V> group[kStreams];
    for (int k = 0; k < kStreams; ++k) group[k] = load_pair(x + k * stream + i);
    V tops = max(group[0].first, group[0].second);
    for (int k = 1; k < kStreams; ++k) tops = max(max(group[k].first, group[k].second), tops);
    row.admit(tops, kStreams * i);
    for (int k = 0; k < kStreams; ++k) {
      prefetch_pair(x + k * stream + i);
      const V first = exp(group[k].first - row.reference), second = exp(group[k].second - row.reference);
      row.sums[0] += first;
      row.sums[1] += second;
      if constexpr (kKeep) store(kept + k * stream + i, first);
      if constexpr (kKeep) store(kept + k * stream + i + kLanes, second);
      if constexpr (kWithSum) row.plain[0] += group[k].first - row.reference;
      if constexpr (kWithSum) row.plain[1] += group[k].second - row.reference;
    }
  }
  // 2. The rest, vector by vector; lanes beyond the row hold -inf, whose exponential is 0.
  for (int64_t i = kStreams * stream; i < real; i += kLanes) {
    const V lanes = load(x + i, real - i, RowStats<V, A>::kLowest);
    row.admit(lanes, i);
    const V exponentials = exp(lanes - row.reference);
    row.sums[0] += exponentials;
    if constexpr (kKeep) store(kept + i, exponentials);
    if constexpr (kWithSum) row.plain[0] += load(x + i, real - i, row.reference) - row.reference;
  }
  // 3. Reduce over the lanes.
  out[0] = row.maximum();
  out[1] = row.sum_of_exp();
  if constexpr (kWithSum) {
    out[3] = row.sum_of_logits(real);
    out[4] = real;
  }
  return row.moved ? std::numeric_limits<A>::quiet_NaN() : row.reference;
}

template <typename T, typename A>
void stats(const T* logits, const int64_t* target, A* out, Shard shard, bool with_sum, const Exponentials<A>* kept,
           int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * shard.row_stride;
    A* to = out + row * (with_sum ? 5 : 3);
    const int64_t column = shard.column_of(target[row]);
    to[2] = column >= 0 ? value_at(x, column) : 0;
    if (kept != nullptr) {
      A* values = kept->values + row * kept->stride;
      kept->references[row] = with_sum ? stats_row<true, true>(x, shard.real, to, values)
                                       : stats_row<false, true>(x, shard.real, to, values);
    } else {
      A* none = nullptr;
      with_sum ? stats_row<true, false>(x, shard.real, to, none) : stats_row<false, false>(x, shard.real, to, none);
    }
  }
}

// The gradient of a row but for the target's own share; `slope` includes one over the sum of exponentials.
template <typename A>
struct Row {
  A top, slope, shift, scale;
  template <typename V>
  FASTMP_INLINE V gradient(V logits) const {
    return (exp(logits - top) * slope - shift) * scale;
  }
};

template <bool kNan, typename T, typename A>
void grad_row(const T* x, T* out, int64_t count, Row<A> row) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  constexpr int kWays = sizeof(T) >= 4 ? kStreams : 1;  // arithmetic bounds two-byte elements: 27 ms with 1, 32 with 4
  const int64_t stream = count / (2 * kLanes * kWays) * (2 * kLanes);
  for (int64_t i = 0; i < stream; i += 2 * kLanes) {
    for (int k = 0; k < kWays; ++k) {
      prefetch_pair(x + k * stream + i);
      const Pair<V> pair = load_pair(x + k * stream + i);
      store_pair<kNan>(out + k * stream + i, {row.gradient(pair.first), row.gradient(pair.second)});
    }
  }
  for (int64_t i = kWays * stream; i < count; i += kLanes)
    store(out + i, row.gradient(load(x + i, count - i, 0)), count - i);
}

// The same from exponentials that stats_row kept: no second exponential, and the row's constants are finite.
template <typename T, typename A>
void grad_row_kept(const A* kept, T* out, int64_t count, Row<A> row, A reference) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  const V factor = exp(broadcast<V>(reference - row.top)) * (row.slope * row.scale);
  const A shift = row.shift * row.scale;
  const int64_t pairs = count / (2 * kLanes * kStreams) * (2 * kLanes * kStreams);
  for (int64_t i = 0; i < pairs; i += 2 * kLanes) {
    store_pair<false>(out + i, {load(kept + i) * factor - shift, load(kept + i + kLanes) * factor - shift});
  }
  for (int64_t i = pairs; i < count; i += kLanes) store(out + i, load(kept + i) * factor - shift, count - i);
}

template <typename T, typename A>
void grad(const T* logits, T* out, const int64_t* target, const A* merged, const A* grad_loss, const A* token_weight,
          Shard shard, int64_t out_stride, GradOptions options, const Exponentials<A>* kept, int64_t begin,
          int64_t end) {
  using V = lanes_of<T>;
  const A shift = options.label_smoothing / options.vocab_size;
  const A target_share = 1 - options.label_smoothing;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * shard.row_stride;
    T* to = out + row * out_stride;
    const bool ignored = target[row] == options.ignore_index;
    // 1. Zeros for padding columns, and for the whole row of an ignored token.
    const int64_t live = ignored ? 0 : shard.real;
    std::fill(to + live, to + shard.columns, T(0));
    if (ignored) continue;
    // 2. The row's constants; the target's logit is read before it may be overwritten.
    A scale = token_weight == nullptr ? grad_loss[row] : grad_loss[row] * token_weight[row];
    if (target[row] < 0 || target[row] >= options.vocab_size) scale = std::numeric_limits<A>::quiet_NaN();
    const A top = merged[2 * row], total = merged[2 * row + 1];
    const A slope = (1 + 2 * static_cast<A>(options.z_loss) * (top + std::log(total))) / total;
    const int64_t column = shard.column_of(target[row]);
    const A target_logit = column < 0 ? 0 : value_at(x, column);
    const Row<A> row_constants{top, slope, shift, scale};
    // 3. The gradient but for the target's share. exp(x - top) is at most 1 where x is finite: with finite constants no
    // lane is NaN.
    const bool finite = std::isfinite(top) && std::isfinite(scale) && std::isfinite(slope);
    if (finite && kept != nullptr && !std::isnan(kept->references[row])) {
      grad_row_kept(kept->values + row * kept->stride, to, live, row_constants, kept->references[row]);
    } else if (finite) {
      grad_row<false>(x, to, live, row_constants);
    } else {
      grad_row<true>(x, to, live, row_constants);
    }
    // 4. The target's column once more, with its share.
    if (column >= 0) {
      const V there = row_constants.gradient(broadcast<V>(target_logit));
      store(to + column, there - target_share * scale, 1);
    }
  }
}

#define FASTMP_INSTANTIATE(T, A)                                                                              \
  template void stats(const T*, const int64_t*, A*, Shard, bool, const Exponentials<A>*, int64_t, int64_t);   \
  template void grad(const T*, T*, const int64_t*, const A*, const A*, const A*, Shard, int64_t, GradOptions, \
                     const Exponentials<A>*, int64_t, int64_t);
FASTMP_INSTANTIATE(float, float)
FASTMP_INSTANTIATE(double, double)
FASTMP_INSTANTIATE(BFloat16, float)
FASTMP_INSTANTIATE(Half, float)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA

#ifdef FASTMP_ISA_BASE

namespace {

constexpr int64_t kGroupBytes = 1 << 17;  // of logits that stay in a core's cache between two passes
constexpr int64_t kMostRows = 64;         // in a group
constexpr int64_t kPadding = 16;          // a multiple of every vector's lanes

void check_options(const char* op, double label_smoothing, double z_loss) {
  FASTMP_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, ": expected 0 <= label_smoothing <= 1, got ",
               label_smoothing);
  FASTMP_CHECK(z_loss >= 0, op, ": expected 0 <= z_loss, got ", z_loss);
}

Tensor cross_entropy_stats(Tensor logits, Tensor target, int64_t vocab_start, int64_t vocab_size, bool with_sum) {
  constexpr const char* op = "cross_entropy_stats";
  const Shard shard = local_shard(op, logits, vocab_start, vocab_size);
  const int64_t tokens = logits.size(0);
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  Tensor out = empty({tokens, with_sum ? 5 : 3}, compute_dtype(logits.scalar_type()), logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(stats<T, A>);
    const T* x = logits.const_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    A* to = out.mutable_data_ptr<A>();
    parallel_for(0, tokens, grain_of(shard.real),
                 [&](int64_t begin, int64_t end) { kernel(x, ids, to, shard, with_sum, nullptr, begin, end); });
  });
  return out;
}

// Loss, and maximum and sum of exponentials, of tokens [begin, end) out of `tokens` from their statistics in all
// shards.
template <typename A>
void merge_tokens(const A* stats, int64_t shards, int64_t tokens, bool with_sum, const int64_t* target, const A* weight,
                  const GradOptions& options, A* loss, A* merged, int64_t begin, int64_t end) {
  const int64_t width = with_sum ? 5 : 3;
  const A smoothing = options.label_smoothing;
  const auto finite = [](A top) { return top == -std::numeric_limits<A>::infinity() ? A(0) : top; };
  for (int64_t i = begin; i < end; ++i) {
    // 1. The maximum over the shards; 0 if it is -inf.
    A top = -std::numeric_limits<A>::infinity();
    for (int64_t p = 0; p < shards; ++p) top = std::max(top, stats[(p * tokens + i) * width]);
    top = finite(top);
    // 2. All sums relative to it.
    A sum = 0, target_logit = 0, plain = 0;
    for (int64_t p = 0; p < shards; ++p) {
      const A* shard = stats + (p * tokens + i) * width;
      sum += shard[0] == top ? shard[1] : shard[1] * std::exp(shard[0] - top);
      target_logit += shard[2];
      if (with_sum) plain += shard[3] + shard[4] * (finite(shard[0]) - top);
    }
    // 3. The loss, relative to the maximum as well; NaN where the target is no column, 0 where it is ignored.
    const A log_sum = std::log(sum), lse = top + log_sum;
    merged[2 * i] = std::isnan(sum) ? sum : top;
    merged[2 * i + 1] = sum;
    loss[i] = (1 - smoothing) * (log_sum + (top - target_logit)) + static_cast<A>(options.z_loss) * lse * lse;
    if (smoothing > 0) loss[i] += smoothing * (log_sum - plain / options.vocab_size);
    if (weight != nullptr) loss[i] *= weight[i];
    if (target[i] < 0 || target[i] >= options.vocab_size) loss[i] = std::numeric_limits<A>::quiet_NaN();
    if (target[i] == options.ignore_index) loss[i] = 0;
  }
}

std::tuple<Tensor, Tensor> cross_entropy_merge(Tensor stats, Tensor target, std::optional<Tensor> token_weight,
                                               int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                                               double z_loss) {
  constexpr const char* op = "cross_entropy_merge";
  FASTMP_CHECK(vocab_size > 0, op, ": expected a positive vocab_size, got ", vocab_size);
  check_options(op, label_smoothing, z_loss);
  FASTMP_CHECK(stats.dim() == 3 && (stats.size(2) == 5 || (stats.size(2) == 3 && label_smoothing == 0)), op,
               ": stats must be (P, N, 3), or (P, N, 5) with label smoothing, got ", stats.dim(),
               " dimensions, the last ", stats.dim() ? stats.size(stats.dim() - 1) : 0);
  const int64_t shards = stats.size(0), tokens = stats.size(1), width = stats.size(2);
  const ScalarType dtype = stats.scalar_type();
  FASTMP_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op,
               ": stats must be float32 or float64, got ", dtype_name(dtype));
  stats = torch::stable::contiguous(stats);
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  Tensor loss = empty({tokens}, dtype, stats), merged = empty({tokens, 2}, dtype, stats);
  const GradOptions options{vocab_size, ignore_index, label_smoothing, z_loss};
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    const A* from = stats.const_data_ptr<A>();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    const int64_t* ids = target.const_data_ptr<int64_t>();
    A* to_loss = loss.mutable_data_ptr<A>();
    A* to_merged = merged.mutable_data_ptr<A>();
    parallel_for(0, tokens, 1024, [&](int64_t begin, int64_t end) {
      merge_tokens(from, shards, tokens, width == 5, ids, weight, options, to_loss, to_merged, begin, end);
    });
  };
  dtype == ScalarType::Double ? run(0.0) : run(0.0f);
  return {loss, merged};
}

// The sum of the losses, over `divisor`. One thread adds them, in one order.
template <typename A>
A divided(const A* loss, int64_t count, double divisor) {
  constexpr int64_t kWays = 8;
  double sums[kWays] = {};
  int64_t i = 0;
  for (; i + kWays <= count; i += kWays) {
    for (int64_t way = 0; way < kWays; ++way) sums[way] += loss[i + way];
  }
  for (; i < count; ++i) sums[0] += loss[i];
  return std::accumulate(sums, sums + kWays, 0.0) / divisor;
}

// The losses, or with a divisor their sum over it as a tensor of no dimensions.
Tensor divided(const Tensor& losses, std::optional<double> divisor) {
  if (!divisor) return losses;
  Tensor out = empty({}, losses.scalar_type(), losses);
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    *out.mutable_data_ptr<A>() = divided(losses.const_data_ptr<A>(), losses.numel(), *divisor);
  };
  losses.scalar_type() == ScalarType::Double ? run(0.0) : run(0.0f);
  return out;
}

// The loss, and maximum and sum, of rows that hold a whole vocabulary, or of the statistics of all shards.
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& logits, Tensor target, std::optional<Tensor> stats,
                                         std::optional<Tensor> token_weight, int64_t vocab_start, int64_t vocab_size,
                                         int64_t ignore_index, double label_smoothing, double z_loss, bool,
                                         std::optional<double> divisor) {
  constexpr const char* op = "cross_entropy";
  FASTMP_CHECK(vocab_start >= 0 && vocab_size > 0, op, ": expected 0 <= vocab_start and a positive vocab_size, got ",
               "vocab_start=", vocab_start, " and vocab_size=", vocab_size);
  check_options(op, label_smoothing, z_loss);
  if (stats) {
    const auto [loss, merged] =
        cross_entropy_merge(*stats, target, token_weight, vocab_size, ignore_index, label_smoothing, z_loss);
    return {divided(loss, divisor), merged};
  }
  const Shard shard = local_shard(op, logits, vocab_start, vocab_size);
  const GradOptions options{vocab_size, ignore_index, label_smoothing, z_loss};
  const bool with_sum = label_smoothing > 0;
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  Tensor loss = divisor ? empty({}, dtype, logits) : empty({tokens}, dtype, logits);
  Tensor merged = empty({tokens, 2}, dtype, logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto stats_of = FASTMP_BEST(stats<T, A>);
    const T* x = logits.const_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    std::vector<A> summands(divisor ? tokens : 0);
    A* losses = divisor ? summands.data() : loss.mutable_data_ptr<A>();
    A* to = merged.mutable_data_ptr<A>();
    parallel_for(0, tokens, grain_of(shard.real), [&](int64_t begin, int64_t end) {
      A own[5 * kMostRows];
      for (int64_t first = begin; first < end; first += kMostRows) {
        const int64_t rows = std::min(kMostRows, end - first);
        const A* weights = weight == nullptr ? nullptr : weight + first;
        stats_of(x + first * shard.row_stride, ids + first, own, shard, with_sum, nullptr, 0, rows);
        merge_tokens(own, 1, rows, with_sum, ids + first, weights, options, losses + first, to + 2 * first, 0, rows);
      }
    });
    if (divisor) *loss.mutable_data_ptr<A>() = divided(losses, tokens, *divisor);
  });
  return {loss, merged};
}

void launch_grad(const char* op, const Tensor& logits, const Tensor& out, Tensor target, Tensor merged,
                 Tensor grad_loss, std::optional<Tensor> token_weight, int64_t vocab_start, const GradOptions& options,
                 std::optional<double> divisor) {
  check_options(op, options.label_smoothing, options.z_loss);
  const Shard shard = local_shard(op, logits, vocab_start, options.vocab_size);
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  FASTMP_CHECK(merged.dim() == 2 && merged.size(0) == tokens && merged.size(1) == 2 && merged.scalar_type() == dtype,
               op, ": merged must be ", dtype_name(dtype), " (", tokens, ", 2), got ", described(merged));
  merged = torch::stable::contiguous(merged);
  if (divisor) {
    FASTMP_CHECK(grad_loss.dim() == 0 && grad_loss.scalar_type() == dtype, op, ": with a divisor grad_loss must be ",
                 dtype_name(dtype), " without dimensions, got ", described(grad_loss));
  } else {
    grad_loss = per_token(op, "grad_loss", grad_loss, tokens, dtype);
  }
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(grad<T, A>);
    const T* x = logits.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    const A* tops_and_sums = merged.const_data_ptr<A>();
    const A* upstream = grad_loss.const_data_ptr<A>();
    const std::vector<A> same(divisor ? tokens : 0, divisor ? static_cast<A>(*upstream / *divisor) : A(0));
    if (divisor) upstream = same.data();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    const int64_t out_stride = out.stride(0);
    parallel_for(0, tokens, grain_of(shard.columns), [&](int64_t begin, int64_t end) {
      kernel(x, to, ids, tops_and_sums, upstream, weight, shard, out_stride, options, nullptr, begin, end);
    });
  });
}

Tensor cross_entropy_grad(Tensor logits, Tensor target, Tensor merged, Tensor grad_loss,
                          std::optional<Tensor> token_weight, int64_t vocab_start, int64_t vocab_size,
                          int64_t ignore_index, double label_smoothing, double z_loss, std::optional<double> divisor) {
  FASTMP_CHECK(logits.dim() == 2, "cross_entropy_grad: logits must be (N, V), got ", logits.dim(), " dimensions");
  Tensor out = empty({logits.size(0), logits.size(1)}, logits.scalar_type(), logits);
  launch_grad("cross_entropy_grad", logits, out, target, merged, grad_loss, token_weight, vocab_start,
              {vocab_size, ignore_index, label_smoothing, z_loss}, divisor);
  return out;
}

void cross_entropy_grad_(Tensor& logits, Tensor target, Tensor merged, Tensor grad_loss,
                         std::optional<Tensor> token_weight, int64_t vocab_start, int64_t vocab_size,
                         int64_t ignore_index, double label_smoothing, double z_loss, std::optional<double> divisor) {
  launch_grad("cross_entropy_grad_", logits, logits, target, merged, grad_loss, token_weight, vocab_start,
              {vocab_size, ignore_index, label_smoothing, z_loss}, divisor);
}

// Rows go through statistics, merge and gradient in groups that stay in a core's cache, their exponentials with them.
Tensor cross_entropy_loss_grad_(Tensor& logits, Tensor target, Tensor loss_grad, std::optional<Tensor> token_weight,
                                int64_t vocab_size, int64_t ignore_index, double label_smoothing, double z_loss) {
  constexpr const char* op = "cross_entropy_loss_grad_";
  check_options(op, label_smoothing, z_loss);
  const Shard shard = local_shard(op, logits, 0, vocab_size);
  const GradOptions options{vocab_size, ignore_index, label_smoothing, z_loss};
  const bool with_sum = label_smoothing > 0;
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  loss_grad = per_token(op, "loss_grad", loss_grad, tokens, dtype);
  if (token_weight) token_weight = per_token(op, "token_weight", *token_weight, tokens, dtype);
  Tensor loss = empty({tokens}, dtype, logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto stats_of = FASTMP_BEST(stats<T, A>);
    const auto grad_of = FASTMP_BEST(grad<T, A>);
    T* x = logits.mutable_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    const A* upstream = loss_grad.const_data_ptr<A>();
    const A* weight = token_weight ? token_weight->const_data_ptr<A>() : nullptr;
    A* losses = loss.mutable_data_ptr<A>();
    const int64_t stride = (shard.real + kPadding - 1) / kPadding * kPadding;
    const int64_t group = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(1, stride * sizeof(A)), 1, kMostRows);
    parallel_for(0, tokens, grain_of(shard.columns), [&](int64_t begin, int64_t end) {
      const std::unique_ptr<A[]> values(new (std::nothrow) A[group * stride]);
      A own[5 * kMostRows], merged[2 * kMostRows], references[kMostRows];
      const Exponentials<A> exponentials{values.get(), references, stride};
      const auto* kept = values ? &exponentials : nullptr;
      for (int64_t first = begin; first < end; first += group) {
        const int64_t rows = std::min(group, end - first);
        T* some = x + first * shard.row_stride;
        const A* weights = weight == nullptr ? nullptr : weight + first;
        // First pass over the group, from memory; second pass, from the cache.
        stats_of(some, ids + first, own, shard, with_sum, kept, 0, rows);
        merge_tokens(own, 1, rows, with_sum, ids + first, weights, options, losses + first, merged, 0, rows);
        grad_of(some, some, ids + first, merged, upstream + first, weights, shard, shard.row_stride, options, kept, 0,
                rows);
      }
    });
  });
  return loss;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "cross_entropy", cross_entropy);
  FASTMP_IMPL(m, "cross_entropy_stats", cross_entropy_stats);
  FASTMP_IMPL(m, "cross_entropy_merge", cross_entropy_merge);
  FASTMP_IMPL(m, "cross_entropy_grad", cross_entropy_grad);
  FASTMP_IMPL(m, "cross_entropy_grad_", cross_entropy_grad_);
  FASTMP_IMPL(m, "cross_entropy_loss_grad_", cross_entropy_loss_grad_);
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
