// topk_router in CUDA C++: a warp a token, whose logits stay in registers from the scores to the choice.
//
// A lane has `kEach` experts that follow each other. A round of the choice compares integers of the same order as the
// scores: one maximum over the warp, and one ballot, whose first lane has the lowest expert of equal ones. That lane
// alone looks for its next best. A block's sums go to a row of partial sums, which a second kernel adds in order.
// The semantics are those of the reference in fastmp/ops/router.py.
#include "common.cuh"
#include "router.h"
#include "rows.h"

#include <algorithm>
#include <string>
#include <vector>

namespace fastmp {
namespace {

constexpr int kWarps = 8;            // of a block
constexpr int64_t kMaxBlocks = 264;  // two a multiprocessor of an H100; as many rows of partial sums
constexpr int64_t kMaxExperts = 512;
constexpr int64_t kMaxGroups = kWarp;          // a lane each
constexpr int64_t kMaxSteps = 1 << 15;         // tokens of a warp: counts have 16 bits
constexpr int kSumColumns = 8, kSumRows = 32;  // of a block that adds partial sums
constexpr unsigned kAll = 0xffffffffu;

// Integers of the order of numbers: NaN above all, -0 equal to 0. kClosed cannot be chosen, kTaken has been.
template <class C>
struct Keys;
template <>
struct Keys<float> {
  using type = int32_t;
  static constexpr type kMost = INT32_MAX, kClosed = INT32_MIN, kTaken = INT32_MIN + 1;
};
template <>
struct Keys<double> {
  using type = int64_t;
  static constexpr type kMost = INT64_MAX, kClosed = INT64_MIN, kTaken = INT64_MIN + 1;
};
template <class C>
using Key = typename Keys<C>::type;

template <class C>
__device__ Key<C> sortable(C x) {
  Key<C> bits;
  memcpy(&bits, &x, sizeof(C));
  if (x == 0) return 0;
  if (x != x) return Keys<C>::kMost;
  return bits < 0 ? bits ^ Keys<C>::kMost : bits;
}
template <class C>
__device__ C unsorted(Key<C> key) {
  const Key<C> bits = key < 0 ? key ^ Keys<C>::kMost : key;
  C x;
  memcpy(&x, &bits, sizeof(C));
  return x;
}

__device__ inline int32_t warp_max(int32_t value) { return __reduce_max_sync(kAll, value); }
__device__ inline int64_t warp_max(int64_t value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAll, value, distance));
  }
  return value;
}
template <class C>
__device__ C warp_sum(C value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAll, value, distance);
  return value;
}
// The first lane of a warp in which `is` holds.
__device__ inline int first_lane(bool is) { return __ffs(__ballot_sync(kAll, is)) - 1; }

// sigmoid(x), or sqrt(log(1 + e^x)); 0 for -inf.
template <class C>
__device__ C score_of(C x, bool softplus) {
  if (!softplus) return fast_reciprocal(1 + fast_exp(-x));
  const C u = fast_exp(-fabs(x));
  const C w = 1 + u;  // rounded: log(w) u / (w - 1) is log(1 + u) all the same, also for small u
  return fast_sqrt((x > 0 ? x : C(0)) + (w == 1 ? u : log(w) * u * fast_reciprocal(w - 1)));
}

// Arguments that all tokens share, and where results go; tokens are (num_steps, num_sequences) rows.
template <class T>
struct Routing {
  using C = Compute<T>;
  const T* logits;
  const C* bias;  // or null
  int32_t* indices;
  C* probs;
  C* partials;              // (num_strips, num_sequences, num_experts)
  int32_t *loads, *wishes;  // the same; wishes or null
  C* squares;               // (num_strips, num_sequences)
  int64_t num_steps, num_sequences, strip_steps, pitch;
  int num_experts, k, num_groups, group_topk;
  Score score;
  bool normalize;
  C scale;
};

// A lane's experts: their keys, and the best of these.
template <class C, int kEach>
struct Lane {
  Key<C> key[kEach];
  Key<C> best;
  int at;

  __device__ void find() {
    best = key[0];
    at = 0;
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      if (key[i] > best) {
        best = key[i];
        at = i;
      }
    }
  }

  // Takes the best expert of the warp `count` times; take(slot, i) is called in its lane.
  template <class Take>
  __device__ void rounds(int count, const Take& take) {
    find();
    for (int slot = 0; slot < count; ++slot) {
      const Key<C> top = warp_max(best);
      if (first_lane(best == top) != static_cast<int>(threadIdx.x % kWarp)) continue;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i != at) continue;
        take(slot, i);
        key[i] = Keys<C>::kTaken;
      }
      find();
    }
  }

  // Closes the experts outside of the best groups. `pairs`: the score of a group is the sum of its two best experts',
  // else its best. `value` makes a score of a key.
  template <class Value>
  __device__ void close_groups(int size, int num_groups, int group_topk, bool pairs, const Value& value) {
    const int lane = threadIdx.x % kWarp;
    Key<C> own = Keys<C>::kClosed;  // of the group with this lane's number
    for (int group = 0; group < num_groups; ++group) {
      const int first = group * size - lane * kEach;
      Key<C> high = Keys<C>::kClosed, next = Keys<C>::kClosed;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i < first || i >= first + size) continue;
        next = max(next, min(high, key[i]));
        high = max(high, key[i]);
      }
      Key<C> found = warp_max(high);
      if (pairs) {
        C total = value(found);
        const bool owner = first_lane(high == found) == lane;
        const Key<C> second = warp_max(owner ? next : high);
        if (size > 1) total += value(second);
        found = sortable(total);
      }
      if (lane == group) own = found;
    }
    unsigned open = 0;
    for (int i = 0; i < group_topk; ++i) {
      const int chosen = first_lane(own == warp_max(own));
      open |= 1u << chosen;
      if (lane == chosen) own = Keys<C>::kClosed;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = lane * kEach + i;
      if (expert >= size * num_groups || !(open >> (expert / size) & 1)) key[i] = Keys<C>::kClosed;
    }
  }
};

// Routes the tokens of a strip of one sequence, a warp a token.
template <class T, int kEach>
__global__ void __launch_bounds__(kWarps* kWarp) route_kernel(Routing<T> route) {
  using C = Compute<T>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, experts = route.num_experts;
  const bool softplus = route.score == Score::kSqrtSoftplus;
  const bool alone = elementwise(route.score);  // a score is a function of its own logit
  // Of each warp the logits and numbers of its chosen experts; then the block's sums.
  C* const chosen_x = dynamic_shared<C>() + warp * route.k;
  C* const block_sums = dynamic_shared<C>() + kWarps * route.k;
  auto* const block_loads = reinterpret_cast<int32_t*>(block_sums + experts);
  int32_t* const block_wishes = block_loads + experts;
  int32_t* const chosen = block_wishes + experts + warp * route.k;
  const int64_t sequence = blockIdx.x % route.num_sequences, strip = blockIdx.x / route.num_sequences;
  const int64_t end = min((strip + 1) * route.strip_steps, route.num_steps);
  C sums[kEach] = {}, squares = 0;
  unsigned counts[kEach] = {};  // loads, and wishes in the upper half

  for (int64_t step = strip * route.strip_steps + warp; step < end; step += kWarps) {
    const int64_t token = step * route.num_sequences + sequence;
    const T* row = route.logits + token * route.pitch;
    // 1. Logits of this lane's experts, and the softmax over all.
    C x[kEach], share[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = lane * kEach + i;
      x[i] = expert < experts ? widen(row[expert]) : C(-INFINITY);
    }
    Key<C> top_key = sortable(x[0]);
#pragma unroll
    for (int i = 1; i < kEach; ++i) top_key = max(top_key, sortable(x[i]));
    const C top = unsorted<C>(warp_max(top_key));  // NaN if there is any
    const C shift = finite_shift(top);
    C total = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      share[i] = fast_exp(x[i] - shift);
      total += share[i];
    }
    total = warp_sum(total);
    const C per_total = 1 / total;
    const C lse = fabs(top) == INFINITY ? top : shift + log(total);
    squares += lse * lse;
    // 2. Scores, keys to choose by, and shares for the balancing losses. Below -40 alone scores are powers of e to
    // the last bit of f64: where all of them may underflow, shares are relative to the largest.
    Lane<C, kEach> best;
    C all = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = lane * kEach + i;
      const C score = alone ? score_of(x[i], softplus) : share[i] * per_total;
      C key = x[i];
      if (route.bias != nullptr && expert < experts) {
        key = (route.score == Score::kLogits ? x[i] : score) + route.bias[expert];
      }
      best.key[i] = expert < experts ? sortable(key) : Keys<C>::kClosed;
      if (!alone || !(shift < -40)) {
        share[i] = score;
      } else if (softplus) {
        share[i] = fast_sqrt(share[i]);
      }
      all += share[i];
    }
    const C sum = alone ? warp_sum(all) : C(1);
    const C per_sum = 1 / (sum == 0 ? C(1) : sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sums[i] += share[i] * per_sum;
    // 3. Choose k experts.
    if (route.group_topk < route.num_groups) {
      const bool of_logits = route.bias == nullptr;
      best.close_groups(experts / route.num_groups, route.num_groups, route.group_topk, alone, [&](Key<C> key) {
        return of_logits ? score_of(unsorted<C>(key), softplus) : unsorted<C>(key);
      });
    }
    best.rounds(route.k, [&](int slot, int i) {
      chosen[slot] = lane * kEach + i;
      chosen_x[slot] = x[i];
      ++counts[i];
    });
    // 4. Once more without bias and groups, for the counts of the balancing losses.
    if (route.wishes != nullptr) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        best.key[i] = lane * kEach + i < experts ? sortable(x[i]) : Keys<C>::kClosed;
      }
      best.rounds(route.k, [&](int, int i) { counts[i] += 1u << 16; });
    }
    __syncwarp();
    // 5. Probabilities of the chosen experts, a lane each.
    C most = -INFINITY, norm = 0;
    const bool soft = route.normalize && !alone;
    if (soft) {
      Key<C> highest = Keys<C>::kClosed;
      for (int slot = lane; slot < route.k; slot += kWarp) highest = max(highest, sortable(chosen_x[slot]));
      most = unsorted<C>(warp_max(highest));
    }
    for (int slot = lane; slot < route.k; slot += kWarp) {
      const C own = chosen_x[slot];
      const C prob = alone ? score_of(own, softplus) : soft ? fast_exp(own - most) : fast_exp(own - shift) * per_total;
      chosen_x[slot] = prob;
      norm += prob;
    }
    norm = route.normalize ? warp_sum(norm) + (soft ? C(0) : static_cast<C>(1e-20)) : C(1);
    for (int slot = lane; slot < route.k; slot += kWarp) {
      route.indices[token * route.k + slot] = chosen[slot];
      route.probs[token * route.k + slot] = chosen_x[slot] / norm * route.scale;
    }
    __syncwarp();
  }
  // 6. The block's sums, warp by warp, and its row of partial sums.
  for (int turn = 0; turn < kWarps; ++turn) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int expert = lane * kEach + i;
      if (turn != warp || expert >= experts) continue;
      block_sums[expert] = turn == 0 ? sums[i] : block_sums[expert] + sums[i];
      block_loads[expert] = (turn == 0 ? 0 : block_loads[expert]) + static_cast<int32_t>(counts[i] & 0xffffu);
      block_wishes[expert] = (turn == 0 ? 0 : block_wishes[expert]) + static_cast<int32_t>(counts[i] >> 16);
    }
    __syncthreads();
  }
  const int64_t place = (strip * route.num_sequences + sequence) * experts;
  for (int expert = threadIdx.x; expert < experts; expert += kWarps * kWarp) {
    route.partials[place + expert] = block_sums[expert];
    route.loads[place + expert] = block_loads[expert];
    if (route.wishes != nullptr) route.wishes[place + expert] = block_wishes[expert];
  }
  __syncthreads();
  if (lane == 0) block_sums[warp] = squares;  // the same in all lanes
  __syncthreads();
  if (threadIdx.x == 0) {
    C z = 0;
    for (int other = 0; other < kWarps; ++other) z += block_sums[other];
    route.squares[blockIdx.x] = z;
  }
}

// Adds `num_rows` rows of partial sums in order; all threads of a block come, and row 0 of the block has the result.
template <class S>
__device__ S add_rows(const S* rows, int64_t num_rows, int64_t num_cols, int64_t column, S (*parts)[kSumColumns]) {
  const int part = threadIdx.x / kSumColumns, col = threadIdx.x % kSumColumns;
  S sum = 0;
  for (int64_t row = part; column < num_cols && row < num_rows; row += kSumRows) sum += rows[row * num_cols + column];
  parts[part][col] = sum;
  __syncthreads();
  S total = 0;
  if (part == 0) {
    for (int other = 0; other < kSumRows; ++other) total += parts[other][col];
  }
  __syncthreads();
  return total;
}

// A block adds kSumColumns columns; the last one has the squares.
template <class C>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    router_sums_kernel(const C* partials, const int32_t* loads, const int32_t* wishes, const C* squares, C* score_sums,
                       int32_t* counts, int32_t* balance_counts, C* z_sum, int64_t num_strips, int64_t num_sums,
                       int64_t num_squares) {
  __shared__ C parts[kSumRows][kSumColumns];
  __shared__ int32_t part_counts[kSumRows][kSumColumns];
  if (blockIdx.x == gridDim.x - 1) {
    const C z = add_rows(squares, num_squares, int64_t{1}, int64_t{threadIdx.x % kSumColumns}, parts);
    if (threadIdx.x == 0) *z_sum = z;
    return;
  }
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x % kSumColumns;
  const C sum = add_rows(partials, num_strips, num_sums, column, parts);
  const int32_t load = add_rows(loads, num_strips, num_sums, column, part_counts);
  const int32_t wish = wishes == nullptr ? 0 : add_rows(wishes, num_strips, num_sums, column, part_counts);
  if (threadIdx.x < kSumColumns && column < num_sums) {
    score_sums[column] = sum;
    counts[column] = load;
    if (wishes != nullptr) balance_counts[column] = wish;
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> topk_router(const Tensor& logits,
                                                                       std::optional<Tensor> expert_bias, int64_t k,
                                                                       std::string score, int64_t num_groups,
                                                                       int64_t group_topk, bool normalize, double scale,
                                                                       bool balance) {
  constexpr const char* kOp = "topk_router";
  const DeviceGuard guard(logits);
  Routed routed = empty_routed(kOp, logits, k, num_groups, group_topk, balance);
  const int64_t experts = logits.size(logits.dim() - 1);
  FASTMP_CHECK(experts <= kMaxExperts && num_groups <= kMaxGroups, kOp, ": CUDA C++ takes at most ", kMaxExperts,
               " experts in ", kMaxGroups, " groups, got ", experts, " in ", num_groups, "; use Triton's kernel");
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  std::optional<Tensor> bias;
  if (expert_bias) bias = wide_numbers(kOp, "expert_bias", *expert_bias, logits, experts);
  if (logits.numel() == 0) {
    for (Tensor each : {routed.counts, routed.score_sums, routed.z_sum, routed.balance_counts}) {
      torch::stable::zero_(each);
    }
    return routed.all();
  }
  const int64_t num_steps = logits.size(0), num_sequences = logits.dim() == 3 ? logits.size(1) : 1;
  const int64_t wanted = std::max<int64_t>(1, kMaxBlocks / num_sequences);
  int64_t strip_steps = ceil_div(ceil_div(num_steps, wanted), kWarps) * kWarps;
  strip_steps = std::min(strip_steps, kMaxSteps * kWarps);
  const int64_t num_strips = ceil_div(num_steps, strip_steps), num_sums = num_sequences * experts;
  const int64_t blocks = num_strips * num_sequences;
  const Tensor partials = fastmp::empty({num_strips, num_sums}, dtype, logits);
  const Tensor loads = fastmp::empty({num_strips, num_sums}, ScalarType::Int, logits);
  const Tensor wishes = fastmp::empty({balance ? num_strips : 0, num_sums}, ScalarType::Int, logits);
  const Tensor squares = fastmp::empty({blocks}, dtype, logits);
  const Rows rows(logits);
  dispatch_device(logits.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const Routing<T> routing{data<T>(rows.tensor),
                             bias ? data<C>(*bias) : nullptr,
                             mutable_data<int32_t>(routed.indices),
                             mutable_data<C>(routed.probs),
                             mutable_data<C>(partials),
                             mutable_data<int32_t>(loads),
                             balance ? mutable_data<int32_t>(wishes) : nullptr,
                             mutable_data<C>(squares),
                             num_steps,
                             num_sequences,
                             strip_steps,
                             rows.pitch,
                             static_cast<int>(experts),
                             static_cast<int>(k),
                             static_cast<int>(num_groups),
                             static_cast<int>(group_topk),
                             score_named(kOp, score),
                             normalize,
                             static_cast<C>(scale)};
    const int64_t reduced = std::max<int64_t>(experts, kWarps) * (sizeof(C) + 2 * sizeof(int32_t));
    const int64_t bytes = kWarps * k * (sizeof(C) + sizeof(int32_t)) + reduced;
    const auto run = [&](auto kernel) {
      launch(Grid{blocks, kWarps * kWarp, bytes}, current_stream(logits), kernel, routing);
    };
    experts <= 4 * kWarp   ? run(route_kernel<T, 4>)
    : experts <= 8 * kWarp ? run(route_kernel<T, 8>)
                           : run(route_kernel<T, 16>);
    launch(Grid{ceil_div(num_sums, kSumColumns) + 1, kSumColumns * kSumRows}, current_stream(logits),
           router_sums_kernel<C>, data<C>(partials), data<int32_t>(loads), balance ? data<int32_t>(wishes) : nullptr,
           data<C>(squares), mutable_data<C>(routed.score_sums), mutable_data<int32_t>(routed.counts),
           balance ? mutable_data<int32_t>(routed.balance_counts) : nullptr, mutable_data<C>(routed.z_sum), num_strips,
           num_sums, blocks);
  });
  return routed.all();
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def(
      "topk_router(Tensor logits, Tensor? expert_bias, int k, str score, int num_groups, int group_topk, "
      "bool normalize, float scale, bool balance) -> (Tensor indices, Tensor probs, Tensor counts, Tensor score_sums, "
      "Tensor z_sum, Tensor balance_counts)");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) { FASTMP_IMPL(m, "topk_router", fastmp::topk_router); }
