// The k largest keys of a row, in order, with ties to the lower index.
//
// The best k so far are kept in order. A vector is skipped if none of its lanes beats the last of them, as in nearly
// all vectors.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fastmp::FASTMP_ISA {

// NaN is above everything; equal keys keep their order.
template <typename A>
bool above(A a, A b) {
  return a > b || (std::isnan(a) && !std::isnan(b));
}

// The first `count` of all indices, by key.
template <typename A>
void sort_first(const A* keys, int32_t* indices, int64_t size, int64_t count) {
  std::iota(indices, indices + size, 0);
  std::partial_sort(indices, indices + count, indices + size, [&](int32_t i, int32_t j) {
    return above(keys[i], keys[j]) || (!above(keys[j], keys[i]) && i < j);
  });
}

// The best experts in order of descending key, ties to the lower one; keys must not be NaN.
template <typename A>
struct Best {
  A* keys;
  int32_t* experts;
  int64_t k, filled = 0;

  FASTMP_INLINE void offer(A key, int32_t expert) {
    if (filled == k && !(key > keys[k - 1])) return;
    // Insertion: move the lower keys down. An equal key keeps its place, for it came first.
    int64_t place = filled < k ? filled++ : k - 1;
    for (; place > 0 && key > keys[place - 1]; --place) {
      keys[place] = keys[place - 1];
      experts[place] = experts[place - 1];
    }
    keys[place] = key;
    experts[place] = expert;
  }

  FASTMP_INLINE void offer(const A* from, int64_t begin, int64_t end) {
    using V = std::conditional_t<std::is_same_v<A, double>, doubles, floats>;
    constexpr int64_t kStep = num_lanes<V>;
    // 1. The first k keys, one by one.
    int64_t i = begin;
    for (; i < end && filled < k; ++i) offer(from[i], static_cast<int32_t>(i));
    // 2. Whole vectors: one comparison, and single lanes only if one of them is among the best.
    for (; i + kStep <= end; i += kStep) {
      if (!any_greater(load(from + i), broadcast<V>(keys[k - 1]))) continue;
      for (int64_t lane = 0; lane < kStep; ++lane) offer(from[i + lane], static_cast<int32_t>(i + lane));
    }
    // 3. The remaining keys.
    for (; i < end; ++i) offer(from[i], static_cast<int32_t>(i));
  }
};

}  // namespace fastmp::FASTMP_ISA
