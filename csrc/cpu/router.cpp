// topk_router and its backward on the CPU.
//
// A token's logits are read once into a row of fp32 (f64) scratch, where scores, choice and probabilities are made.
// Tokens come in strips that depend on the shape alone; a strip sums its scores in fp32 over a
// few tokens at a time and in f64 over all of them, and strips are added in order: results do not depend on the number
// of threads. The semantics are those of the references in fastmp/ops/router.py.
#include "best.h"
#include "router.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace fastmp {

// Arguments that all tokens share. Scores and gradients are in the compute dtype.
struct Router {
  const void* logits;
  const void* bias;                             // or null
  const int32_t* chosen;                        // backward only
  const void *grad_probs, *grad_sums, *grad_z;  // backward only, or null
  int64_t pitch, num_experts, num_sequences, k, num_groups, group_topk;
  Score score;
  bool normalize;
  double scale;
};

// Where a strip of tokens puts its results: the first three by token, the others of the strip alone.
struct RouterOut {
  int32_t* indices;
  void* probs;
  void* grad;  // backward only
  double* score_sums;
  double* z_sum;
  int32_t* counts;
  int32_t* balance_counts;  // or null
};

FASTMP_DECLARE(template <typename T> void route(const Router& router, const RouterOut& out, int64_t begin, int64_t end);
               template <typename T>
               void route_backward(const Router& router, const RouterOut& out, int64_t begin, int64_t end);)

namespace FASTMP_ISA {

constexpr double kTiny = 1e-20;  // in the denominator of probabilities, as in the reference
constexpr double kLow = -40;     // below it sigmoid(x) and softplus(x) are e^x to the last bit of f64
constexpr int64_t kFlush = 16;   // tokens of a sequence that are summed in fp32
constexpr int64_t kInsert = 64;  // from so many experts on, sorting beats insertion

// Scratch of one thread.
template <typename A>
struct Scratch {
  std::vector<A> x, scores, keys, best, groups;
  std::vector<int32_t> order, chosen;
  std::vector<uint8_t> open;

  explicit Scratch(const Router& router)
      : x(router.num_experts),
        scores(router.num_experts),
        keys(router.num_experts),
        best(router.k),
        groups(router.num_groups),
        order(std::max(router.num_experts, router.num_groups)),
        chosen(router.k),
        open(router.num_groups) {}
};

// The largest logit of a row (NaN if there is any), the sum of exponentials relative to it, and the log of that sum.
template <typename A>
struct Row {
  A top, total, lse;
};

// Fills scratch.x with the logits and scratch.scores with the exponentials of the softmax, not yet divided.
template <typename T, typename A = scalar_of<T>>
FASTMP_INLINE Row<A> read(const Router& router, int64_t token, Scratch<A>& scratch) {
  using V = lanes_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  const T* row = static_cast<const T*>(router.logits) + token * router.pitch;
  A* x = scratch.x.data();
  A* e = scratch.scores.data();
  V top = broadcast<V>(-kInfinity), nan = {};
  for_vectors<kStep>(router.num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V lanes = load(row + i, count, -kInfinity);
    store(x + i, lanes, count);
    top = max(lanes, top);
    nan = select(lanes == lanes, nan, lanes);
  });
  A highest = max(top);
  if (std::isnan(sum(nan))) [[unlikely]] {
    for (int64_t i = 0; i < router.num_experts; ++i) highest = std::isnan(x[i]) ? x[i] : highest;
  }
  const A shift = highest == -kInfinity ? 0 : highest;
  V sums = {};
  for_vectors<kStep>(router.num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V lanes = exp(load(x + i, count, -kInfinity) - shift);
    store(e + i, lanes, count);
    sums += lanes;
  });
  const A total = sum(sums);
  return {highest, total, highest == kInfinity ? kInfinity : shift + std::log(total)};
}

// Elementwise scores of logits x; 0 for -infinity.
template <typename V>
FASTMP_INLINE V scores_of(Score score, V x) {
  return score == Score::kSigmoid ? sigmoid(x) : sqrt(softplus(x));
}

// The derivative of elementwise scores s of logits x; 0 where s underflows.
template <typename V>
FASTMP_INLINE V slope_of(Score score, V x, V s) {
  if (score == Score::kSigmoid) return s * (1 - s);
  return select(s == 0, s, sigmoid(x) / (s + s));
}

// The derivative of the logarithm of elementwise scores; of_score: that of the scores.
template <typename V>
FASTMP_INLINE V log_slope_of(Score score, V x, V s, V of_score) {
  if (score == Score::kSigmoid) return 1 - s;
  return select(x < broadcast<V>(kLow), broadcast<V>(0.5), of_score / s);
}

// Turns scratch.scores into scores: softmax from its exponentials, others from the logits. Returns their sum.
template <typename T, typename A = scalar_of<T>>
FASTMP_INLINE A make_scores(const Router& router, const Row<A>& row, Scratch<A>& scratch) {
  using V = lanes_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  A* scores = scratch.scores.data();
  if (!elementwise(router.score)) {
    const A share = 1 / row.total;
    for_vectors<kStep>(router.num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
      store(scores + i, load(scores + i, count, 0) * share, count);
    });
    return 1;
  }
  V sums = {};
  for_vectors<kStep>(router.num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V lanes = scores_of(router.score, load(scratch.x.data() + i, count, -std::numeric_limits<A>::infinity()));
    store(scores + i, lanes, count);
    sums += lanes;  // the filled lanes are 0
  });
  return sum(sums);
}

// Elementwise scores for the balancing losses, or numbers proportional to them, and one over their sum.
template <typename A>
struct Shares {
  const A* relative;
  A factor;
};

// Where all scores may underflow, writes `low`: scores relative to that of the largest logit. A row of -infinity has
// shares of 0. `total`: the sum of scratch.scores.
template <typename T, typename A = scalar_of<T>>
FASTMP_INLINE Shares<A> shares_of(const Router& router, const Row<A>& row, const Scratch<A>& scratch, A total, A* low) {
  using V = lanes_of<T>;
  constexpr A kInfinity = std::numeric_limits<A>::infinity();
  if (!elementwise(router.score)) return {scratch.scores.data(), 1};
  if (!(row.top < static_cast<A>(kLow))) return {scratch.scores.data(), 1 / total};
  if (row.top == -kInfinity) return {scratch.scores.data(), 0};
  const A power = router.score == Score::kSigmoid ? A(1) : A(0.5);
  V sums = {};
  for_vectors<num_lanes<V>>(router.num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V lanes = exp((load(scratch.x.data() + i, count, -kInfinity) - row.top) * power);
    store(low + i, lanes, count);
    sums += lanes;
  });
  return {low, 1 / sum(sums)};
}

// How good each group is: its best key, or the sum of its two best values.
template <typename A>
void rate_groups(const Router& router, const A* keys, const A* values, A* groups) {
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  const int64_t size = router.num_experts / router.num_groups;
  for (int64_t group = 0; group < router.num_groups; ++group) {
    const bool pair = elementwise(router.score);
    const A* from = (pair ? values : keys) + group * size;
    A first = from[0], second = kLowest, sum = from[0];
    for (int64_t i = 1; i < size; ++i) {
      sum += from[i];
      second = std::max(second, std::min(first, from[i]));
      first = std::max(first, from[i]);
    }
    groups[group] = !pair || size == 1 ? first : first + second;
    if (std::isnan(sum) && std::any_of(from, from + size, [](A value) { return std::isnan(value); })) {
      groups[group] = sum;
    }
  }
}

// Writes the k experts of a token, best first.
template <typename A>
void choose(const Router& router, const A* keys, const A* values, bool any_nan, Scratch<A>& scratch, int32_t* indices) {
  const int64_t size = router.num_experts / router.num_groups;
  const bool grouped = router.group_topk < router.num_groups;
  // 1. Open the best groups.
  if (grouped) {
    rate_groups(router, keys, values, scratch.groups.data());
    sort_first(scratch.groups.data(), scratch.order.data(), router.num_groups, router.group_topk);
    std::fill(scratch.open.begin(), scratch.open.end(), 0);
    for (int64_t i = 0; i < router.group_topk; ++i) scratch.open[scratch.order[i]] = 1;
  }
  // 2. Many experts to choose, or NaN: sort.
  if (any_nan || router.k > kInsert) {
    sort_first(keys, scratch.order.data(), router.num_experts, grouped ? router.num_experts : router.k);
    for (int64_t i = 0, filled = 0; filled < router.k; ++i) {
      if (!grouped || scratch.open[scratch.order[i] / size]) indices[filled++] = scratch.order[i];
    }
    return;
  }
  // 3. Few: insert into a sorted list of k.
  Best<A> best{scratch.best.data(), indices, router.k};
  if (!grouped) return best.offer(keys, 0, router.num_experts);
  for (int64_t group = 0; group < router.num_groups; ++group) {
    if (scratch.open[group]) best.offer(keys, group * size, (group + 1) * size);
  }
}

// Probabilities of the chosen experts; the weights of a softmax over their logits if normalised.
template <typename A>
FASTMP_INLINE void probabilities(const Router& router, const Scratch<A>& scratch, const int32_t* chosen, A* probs) {
  const bool soft = router.normalize && !elementwise(router.score);
  A top = -std::numeric_limits<A>::infinity(), total = 0;
  for (int64_t j = 0; soft && j < router.k; ++j) top = std::max(top, scratch.x[chosen[j]]);
  for (int64_t j = 0; j < router.k; ++j) {
    probs[j] = soft ? std::exp(scratch.x[chosen[j]] - top) : scratch.scores[chosen[j]];
    total += probs[j];
  }
  if (!router.normalize) return;
  total += soft ? A(0) : A(kTiny);
  for (int64_t j = 0; j < router.k; ++j) probs[j] /= total;
}

template <typename T>
void route(const Router& router, const RouterOut& out, int64_t begin, int64_t end) {
  using V = lanes_of<T>;
  using A = scalar_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  const int64_t num_experts = router.num_experts, num_sums = num_experts * router.num_sequences;
  const A* bias = static_cast<const A*>(router.bias);
  Router ungrouped = router;
  ungrouped.num_groups = ungrouped.group_topk = 1;
  Scratch<A> scratch(router);
  std::vector<A> sums(num_sums);
  const auto flush = [&] {
    for (int64_t i = 0; i < num_sums; ++i) {
      out.score_sums[i] += sums[i];
      sums[i] = 0;
    }
  };
  for (int64_t token = begin; token < end; ++token) {
    const int64_t place = token % router.num_sequences * num_experts;
    int32_t* indices = out.indices + token * router.k;
    A* probs = static_cast<A*>(out.probs) + token * router.k;
    // 1. Scores of all experts.
    const Row<A> row = read<T>(router, token, scratch);
    const A total = make_scores<T>(router, row, scratch);
    const A* values = router.score == Score::kLogits ? scratch.x.data() : scratch.scores.data();
    const A* keys = scratch.x.data();
    // 2. Choice without bias and groups, for the counts of the balancing losses.
    if (out.balance_counts) {
      choose(ungrouped, keys, keys, std::isnan(row.top), scratch, scratch.chosen.data());
      for (const int32_t expert : scratch.chosen) ++out.balance_counts[place + expert];
    }
    // 3. Keys to choose by: logits, or scores (logits) plus bias.
    bool any_nan = std::isnan(row.top);
    if (bias) {
      V nan = {};
      for_vectors<kStep>(num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
        const V key = load(values + i, count, 0) + load(bias + i, count, 0);
        nan = select(key == key, nan, key);
        store(scratch.keys.data() + i, key, count);
      });
      any_nan = std::isnan(sum(nan));
      keys = values = scratch.keys.data();
    }
    // 4. The k experts, their probabilities, and their loads.
    choose(router, keys, values, any_nan, scratch, indices);
    probabilities(router, scratch, indices, probs);
    for (int64_t j = 0; j < router.k; ++j) {
      probs[j] *= static_cast<A>(router.scale);
      ++out.counts[place + indices[j]];
    }
    // 5. Sums for the auxiliary losses.
    const Shares<A> shares = shares_of<T>(router, row, scratch, total, scratch.keys.data());
    for_vectors<kStep>(num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
      A* to = sums.data() + place + i;
      store(to, load(to, count, 0) + load(shares.relative + i, count, 0) * shares.factor, count);
    });
    *out.z_sum += static_cast<double>(row.lse) * row.lse;
    if ((token - begin + 1) % (kFlush * router.num_sequences) == 0) flush();
  }
  flush();
}

template <typename T>
void route_backward(const Router& router, const RouterOut& out, int64_t begin, int64_t end) {
  using V = lanes_of<T>;
  using A = scalar_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  const int64_t num_experts = router.num_experts, k = router.k;
  const bool single = elementwise(router.score);
  const A* grad_sums = static_cast<const A*>(router.grad_sums);
  const A* grad_z = static_cast<const A*>(router.grad_z);
  const A scale = static_cast<A>(router.scale);
  Scratch<A> scratch(router);
  std::vector<A> weights(single && grad_z ? num_experts : 0), extra(num_experts), zeros(num_experts), probs(k), g(k);
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* chosen = router.chosen + token * k;
    const A* sums = grad_sums ? grad_sums + token % router.num_sequences * num_experts : zeros.data();
    // 1. Recompute the scores.
    const Row<A> row = read<T>(router, token, scratch);
    if (single && grad_z) std::copy(scratch.scores.begin(), scratch.scores.end(), weights.begin());
    const A total = make_scores<T>(router, row, scratch);
    const A* scores = scratch.scores.data();
    const Shares<A> shares = shares_of<T>(router, row, scratch, total, scratch.keys.data());
    // 2. Gradients of the chosen scores (`extra`), or of the chosen logits for a softmax over them.
    const A* from = static_cast<const A*>(router.grad_probs);
    if (from) {
      probabilities(router, scratch, chosen, probs.data());
      A mean = 0;
      for (int64_t j = 0; j < k; ++j) {
        g[j] = from[token * k + j] * scale;
        mean += probs[j] * g[j];
      }
      A chosen_total = static_cast<A>(kTiny);
      for (int64_t j = 0; j < k; ++j) chosen_total += scores[chosen[j]];
      for (int64_t j = 0; j < k; ++j) {
        if (router.normalize) g[j] = single ? (g[j] - mean) / chosen_total : probs[j] * (g[j] - mean);
        extra[chosen[j]] = g[j];
      }
    }
    const bool direct = router.normalize && !single;  // `extra` belongs to the logits
    // 3. Through the softmax, that of the logarithms of elementwise scores, to the logits.
    V dots = {};
    for_vectors<kStep>(num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
      V slope = load(sums + i, count, 0);
      if (!single && !direct) slope += load(extra.data() + i, count, 0);
      dots += load(shares.relative + i, count, 0) * slope;
    });
    const A dot = sum(dots) * shares.factor;
    const A z = grad_z ? 2 * *grad_z * row.lse : A(0);
    T* dx = static_cast<T*>(out.grad) + token * num_experts;
    for_vectors<kStep>(num_experts, [&](int64_t i, auto count) FASTMP_LAMBDA {
      const V s = load(scores + i, count, 0), more = load(extra.data() + i, count, 0);
      V slope = load(sums + i, count, 0) - dot;
      if (single) {
        const V x = load(scratch.x.data() + i, count, 0), of_score = slope_of(router.score, x, s);
        const V share = load(shares.relative + i, count, 0) * shares.factor;
        slope = share * slope * log_slope_of(router.score, x, s, of_score) + more * of_score;
        if (grad_z) slope += load(weights.data() + i, count, 0) * (z / row.total);
      } else {
        slope = s * (direct ? slope + z : slope + more + z);
        if (direct) slope += more;
      }
      store(dx + i, slope, count);
    });
    for (int64_t j = 0; from && j < k; ++j) extra[chosen[j]] = 0;
  }
}

#define FASTMP_INSTANTIATE(T)                                                                     \
  template void route<T>(const Router& router, const RouterOut& out, int64_t begin, int64_t end); \
  template void route_backward<T>(const Router& router, const RouterOut& out, int64_t begin, int64_t end);
FASTMP_INSTANTIATE(float)
FASTMP_INSTANTIATE(double)
FASTMP_INSTANTIATE(BFloat16)
FASTMP_INSTANTIATE(Half)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int64_t kGrain = 8192;         // logits a thread should at least have
constexpr int64_t kStripTokens = 128;    // tokens of a strip, or more
constexpr int64_t kStripSums = 1 << 18;  // sums of all strips, or fewer

// Chosen experts index a token's scratch, so one out of range would access other memory.
void check_chosen(const char* op, const int32_t* chosen, int64_t count, int64_t num_experts) {
  const int32_t* wrong = std::find_if(chosen, chosen + count, [&](int64_t i) { return i < 0 || i >= num_experts; });
  FASTMP_CHECK(wrong == chosen + count, op, ": indices must lie in [0, ", num_experts, "), got ", *wrong);
}

Router describe(const char* op, const Rows& rows, const Tensor& logits, int64_t k, const std::string& score,
                bool normalize, double scale) {
  Router router{};
  router.logits = rows.tensor.const_data_ptr();
  router.pitch = rows.pitch;
  router.num_experts = rows.num_cols;
  router.num_sequences = logits.dim() == 3 ? logits.size(1) : 1;
  router.k = k;
  router.num_groups = router.group_topk = 1;
  router.score = score_named(op, score);
  router.normalize = normalize;
  router.scale = scale;
  return router;
}

// The address of `wide_numbers`, which `kept` holds, or null.
const void* checked(const char* op, const char* name, const std::optional<Tensor>& tensor, std::optional<Tensor>& kept,
                    const Tensor& logits, int64_t numel) {
  if (!tensor) return nullptr;
  kept = wide_numbers(op, name, *tensor, logits, numel);
  return kept->const_data_ptr();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> topk_router(const Tensor& logits,
                                                                       std::optional<Tensor> expert_bias, int64_t k,
                                                                       std::string score, int64_t num_groups,
                                                                       int64_t group_topk, bool normalize, double scale,
                                                                       bool balance) {
  constexpr const char* kOp = "topk_router";
  Routed routed = empty_routed(kOp, logits, k, num_groups, group_topk, balance);
  const int64_t experts = logits.size(logits.dim() - 1);
  const int64_t num_tokens = logits.numel() / experts, num_sums = routed.counts.numel();
  const int64_t most = std::max<int64_t>(1, kStripSums / std::max<int64_t>(1, num_sums));
  const int64_t per_strip = std::max(kStripTokens, (num_tokens + most - 1) / most);
  const int64_t num_strips = (num_tokens + per_strip - 1) / per_strip;
  std::vector<double> partials(num_strips * (num_sums + 1));
  const int64_t num_counts = num_sums * (balance ? 2 : 1);  // of a strip: those for balancing come second
  std::vector<int32_t> loads(num_strips * num_counts);
  dispatch_float(logits.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    if (num_tokens > 0) {
      const Rows rows(logits);
      Router router = describe(kOp, rows, logits, k, score, normalize, scale);
      router.num_groups = num_groups;
      router.group_topk = group_topk;
      std::optional<Tensor> bias;
      router.bias = checked(kOp, "expert_bias", expert_bias, bias, logits, experts);
      const auto kernel = FASTMP_BEST(route<T>);
      RouterOut all{};
      all.indices = routed.indices.mutable_data_ptr<int32_t>();
      all.probs = routed.probs.mutable_data_ptr();
      const int64_t grain = std::max<int64_t>(1, kGrain / (per_strip * experts));
      parallel_for(0, num_strips, grain, [&](int64_t begin, int64_t end) {
        for (int64_t strip = begin; strip < end; ++strip) {
          RouterOut out = all;
          out.score_sums = partials.data() + strip * (num_sums + 1);
          out.z_sum = out.score_sums + num_sums;
          out.counts = loads.data() + strip * num_counts;
          out.balance_counts = balance ? out.counts + num_sums : nullptr;
          kernel(router, out, strip * per_strip, std::min(num_tokens, (strip + 1) * per_strip));
        }
      });
    }
    std::vector<double> total(num_sums + 1);
    std::vector<int32_t> load(num_counts);
    for (int64_t strip = 0; strip < num_strips; ++strip) {
      for (int64_t i = 0; i <= num_sums; ++i) total[i] += partials[strip * (num_sums + 1) + i];
      for (int64_t i = 0; i < num_counts; ++i) load[i] += loads[strip * num_counts + i];
    }
    std::copy(load.begin(), load.begin() + num_sums, routed.counts.mutable_data_ptr<int32_t>());
    std::copy(load.begin() + num_sums, load.end(), routed.balance_counts.mutable_data_ptr<int32_t>());
    std::transform(total.begin(), total.end() - 1, static_cast<A*>(routed.score_sums.mutable_data_ptr()),
                   [](double value) { return static_cast<A>(value); });
    *static_cast<A*>(routed.z_sum.mutable_data_ptr()) = static_cast<A>(total.back());
  });
  return routed.all();
}

Tensor topk_router_backward(std::optional<Tensor> grad_probs, std::optional<Tensor> grad_sums,
                            std::optional<Tensor> grad_z, const Tensor& logits, const Tensor& indices,
                            std::string score, bool normalize, double scale) {
  constexpr const char* kOp = "topk_router_backward";
  check_router_logits(kOp, logits);
  FASTMP_CHECK(indices.scalar_type() == ScalarType::Int && indices.dim() == logits.dim(), kOp,
               ": indices must be int32 with ", logits.dim(), " dimensions, got ", dtype_name(indices.scalar_type()),
               " with ", indices.dim());
  Tensor grad = fastmp::empty(logits.sizes(), logits.scalar_type(), logits);
  if (logits.numel() == 0) return grad;
  dispatch_float(logits.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Rows rows(logits);
    const int64_t k = indices.size(indices.dim() - 1);
    const auto chosen_sizes = indices.sizes();
    FASTMP_CHECK(std::equal(chosen_sizes.begin(), chosen_sizes.end() - 1, logits.sizes().begin()), kOp, ": logits are ",
                 described(logits), ", which does not fit indices of ", described(indices));
    Router router = describe(kOp, rows, logits, k, score, normalize, scale);
    const Tensor chosen = indices.is_contiguous() ? indices : torch::stable::contiguous(indices);
    router.chosen = chosen.const_data_ptr<int32_t>();
    check_chosen(kOp, router.chosen, chosen.numel(), rows.num_cols);
    std::optional<Tensor> kept[3];
    const int64_t sums = router.num_sequences * router.num_experts;
    router.grad_probs = checked(kOp, "grad_probs", grad_probs, kept[0], logits, indices.numel());
    router.grad_sums = checked(kOp, "grad_sums", grad_sums, kept[1], logits, sums);
    router.grad_z = checked(kOp, "grad_z", grad_z, kept[2], logits, 1);
    RouterOut out{};
    out.grad = grad.mutable_data_ptr();
    const auto kernel = FASTMP_BEST(route_backward<T>);
    parallel_for(0, rows.num_rows, std::max<int64_t>(1, kGrain / rows.num_cols),
                 [&](int64_t begin, int64_t end) { kernel(router, out, begin, end); });
  });
  return grad;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "topk_router", fastmp::topk_router);
  FASTMP_IMPL(m, "topk_router_backward", fastmp::topk_router_backward);
}

#endif  // FASTMP_ISA_BASE
