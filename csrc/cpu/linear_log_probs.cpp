// Log-probabilities and entropies from logits on the CPU: shard statistics and the gradient, in place
// (see fastmp/ops/linear_log_probs.py).
//
// A thread takes whole rows. The statistics read a row once: sums are relative to the highest logit so far, and
// rescaled where a group of vectors exceeds it, which is rare: one test a vector would take longer than the
// exponentials. Next to the GEMMs of hidden states and weight these passes take little time, so they walk a row in one
// place. Logits are scaled as differences, so that the highest is 0 exactly, fused or not.
#include "cpu/simd.h"

#include <algorithm>
#include <limits>

#include "cpu/vocabulary.h"
#include "op.h"

namespace fastmp {

// Arguments of the gradient, one number a token each. Null scale: 1; null entropy: only log-probabilities have a
// gradient.
template <typename A>
struct LogProbRows {
  const int64_t* target;
  const A *top, *log_total, *grad_log_prob, *entropy, *grad_entropy, *scale;
  int64_t vocab_size, ignore_index;
};

FASTMP_DECLARE(template <typename T, typename A>
               void log_prob_stats(const T* logits, const int64_t* target, const A* scale, A* out, Shard shard,
                                   bool with_entropy, int64_t begin, int64_t end);
               template <typename T, typename A>
               void log_prob_grad(T* logits, LogProbRows<A> rows, Shard shard, int64_t begin, int64_t end);)

namespace FASTMP_ISA {

constexpr int kNothing = -1000;  // e to this is zero; logits of -inf are held here, for 0 * -inf would be NaN

// The inverse temperature of a row: 1 where none are given, NaN unless it is positive.
template <typename A>
A scale_of(const A* scale, int64_t row) {
  if (scale == nullptr) return 1;
  return scale[row] > 0 ? scale[row] : std::numeric_limits<A>::quiet_NaN();
}

// Maximum, sum of exponentials relative to it (to 0 where it is -inf), and as out[3] that of each times its logarithm.
template <bool kWithEntropy, typename T, typename A>
void log_prob_stats_row(const T* x, int64_t real, A scale, A* out) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  constexpr int kGroup = 4;                                    // vectors
  V top = broadcast<V>(kLowest), base{}, total{}, weighted{};  // base: top, or 0 where that is -inf; lanes are equal
  // 1. A logit exceeds the highest so far: rescale both sums. In `weighted` every term changes by gap * exponential.
  const auto admit = [&](V logits) FASTMP_LAMBDA {
    if (!any_greater(logits, top)) [[likely]]
      return;
    const V higher = broadcast<V>(max(max(logits, top)));
    if (top[0] != kLowest) {
      const A gap = (top[0] - higher[0]) * scale;
      const V shrink = exp(broadcast<V>(gap));
      weighted = (weighted + total * std::max(gap, A(kNothing))) * shrink;
      total *= shrink;
    }
    top = base = higher;
  };
  // 2. Add the exponentials, and each times its logarithm.
  const auto add = [&](V logits) FASTMP_LAMBDA {
    const V below = (logits - base) * scale;
    const V exponentials = exp(below);
    total += exponentials;
    if constexpr (kWithEntropy) weighted += exponentials * max(below, broadcast<V>(A(kNothing)));
  };
  int64_t i = 0;
  for (; i + kGroup * kLanes <= real; i += kGroup * kLanes) {
    V group[kGroup];
    for (int k = 0; k < kGroup; ++k) group[k] = load(x + i + k * kLanes);
    admit(max(max(group[0], group[1]), max(group[2], group[3])));
    for (int k = 0; k < kGroup; ++k) {
      prefetch(x + i + k * kLanes);
      add(group[k]);
    }
  }
  for (; i < real; i += kLanes) {
    const V logits = load(x + i, real - i, kLowest);
    admit(logits);
    add(logits);
  }
  out[0] = top[0];
  out[1] = sum(total);
  if constexpr (kWithEntropy) out[3] = sum(weighted);
}

template <typename T, typename A>
void log_prob_stats(const T* logits, const int64_t* target, const A* scale, A* out, Shard shard, bool with_entropy,
                    int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = logits + row * shard.row_stride;
    A* to = out + row * (with_entropy ? 4 : 3);
    const A factor = scale_of(scale, row);
    const int64_t column = shard.column_of(target[row]);
    to[2] = column < 0 ? 0 : static_cast<A>(x[column]);
    with_entropy ? log_prob_stats_row<true>(x, shard.real, factor, to)
                 : log_prob_stats_row<false>(x, shard.real, factor, to);
  }
}

template <typename T, typename A>
void log_prob_grad(T* logits, LogProbRows<A> rows, Shard shard, int64_t begin, int64_t end) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  for (int64_t row = begin; row < end; ++row) {
    T* x = logits + row * shard.row_stride;
    const int64_t target = rows.target[row];
    const bool ignored = target == rows.ignore_index;
    // 1. Zeros for padding columns, and for the whole row of an ignored token.
    const int64_t live = ignored ? 0 : shard.real;
    std::fill(x + live, x + shard.columns, T(0));
    if (ignored) continue;
    const A scale = scale_of(rows.scale, row);
    A share = scale * rows.grad_log_prob[row];
    if (target < 0 || target >= rows.vocab_size) share = std::numeric_limits<A>::quiet_NaN();
    // 2. d / d logit = share [at the target] - p (share + by_entropy (log p + entropy))
    const A by_entropy = rows.entropy == nullptr ? 0 : scale * rows.grad_entropy[row];
    const A base = rows.entropy == nullptr ? share : share + by_entropy * rows.entropy[row];
    const A top = rows.top[row], log_total = rows.log_total[row];
    const auto gradient = [&](V logit) FASTMP_LAMBDA {
      const V log_p = (logit - top) * scale - log_total;
      return -exp(log_p) * (base + by_entropy * max(log_p, broadcast<V>(A(kNothing))));
    };
    // 3. The target's gradient is computed before its logit is overwritten, and stored last.
    const int64_t column = shard.column_of(target);
    const V there = column < 0 ? V{} : gradient(broadcast<V>(static_cast<A>(x[column]))) + share;
    int64_t i = 0;
    for (; i + kLanes <= live; i += kLanes) store(x + i, gradient(load(x + i)));
    if (i < live) store(x + i, gradient(load(x + i, live - i, 0)), live - i);
    if (column >= 0) store(x + column, there, 1);
  }
}

#define FASTMP_INSTANTIATE(T, A)                                                                       \
  template void log_prob_stats(const T*, const int64_t*, const A*, A*, Shard, bool, int64_t, int64_t); \
  template void log_prob_grad(T*, LogProbRows<A>, Shard, int64_t, int64_t);
FASTMP_INSTANTIATE(float, float)
FASTMP_INSTANTIATE(double, double)
FASTMP_INSTANTIATE(BFloat16, float)
FASTMP_INSTANTIATE(Half, float)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA

#ifdef FASTMP_ISA_BASE

namespace {

template <typename A>
const A* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<A>() : nullptr;
}

Tensor log_probs_stats(Tensor logits, Tensor target, std::optional<Tensor> scale, int64_t vocab_start,
                       int64_t vocab_size, bool with_entropy) {
  constexpr const char* op = "log_probs_stats";
  const Shard shard = local_shard(op, logits, vocab_start, vocab_size);
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  if (scale) scale = per_token(op, "scale", *scale, tokens, dtype);
  Tensor out = empty({tokens, with_entropy ? 4 : 3}, dtype, logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(log_prob_stats<T, A>);
    const T* x = logits.const_data_ptr<T>();
    const int64_t* ids = target.const_data_ptr<int64_t>();
    const A* scales = data_of<A>(scale);
    A* to = out.mutable_data_ptr<A>();
    parallel_for(0, tokens, grain_of(shard.real),
                 [&](int64_t begin, int64_t end) { kernel(x, ids, scales, to, shard, with_entropy, begin, end); });
  });
  return out;
}

void log_probs_grad_(Tensor& logits, Tensor target, Tensor top, Tensor log_total, Tensor grad_log_prob,
                     std::optional<Tensor> entropy, std::optional<Tensor> grad_entropy, std::optional<Tensor> scale,
                     int64_t vocab_start, int64_t vocab_size, int64_t ignore_index) {
  constexpr const char* op = "log_probs_grad_";
  const Shard shard = local_shard(op, logits, vocab_start, vocab_size);
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  FASTMP_CHECK(entropy.has_value() == grad_entropy.has_value(), op, ": entropy and grad_entropy come together");
  target = per_token(op, "target", target, tokens, ScalarType::Long);
  top = per_token(op, "top", top, tokens, dtype);
  log_total = per_token(op, "log_total", log_total, tokens, dtype);
  grad_log_prob = per_token(op, "grad_log_prob", grad_log_prob, tokens, dtype);
  if (entropy) entropy = per_token(op, "entropy", *entropy, tokens, dtype);
  if (grad_entropy) grad_entropy = per_token(op, "grad_entropy", *grad_entropy, tokens, dtype);
  if (scale) scale = per_token(op, "scale", *scale, tokens, dtype);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(log_prob_grad<T, A>);
    T* x = logits.mutable_data_ptr<T>();
    const LogProbRows<A> rows{target.const_data_ptr<int64_t>(),
                              top.const_data_ptr<A>(),
                              log_total.const_data_ptr<A>(),
                              grad_log_prob.const_data_ptr<A>(),
                              data_of<A>(entropy),
                              data_of<A>(grad_entropy),
                              data_of<A>(scale),
                              vocab_size,
                              ignore_index};
    parallel_for(0, tokens, grain_of(shard.columns),
                 [&](int64_t begin, int64_t end) { kernel(x, rows, shard, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "log_probs_stats", log_probs_stats);
  FASTMP_IMPL(m, "log_probs_grad_", log_probs_grad_);
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
