// Rows of (token, expert) assignments, wherever they lie: copies past the caches, weighted sums, and weighted rows with
// the dot products that are the gradients of their weights.
#pragma once

#include "simd.h"
#include "stable.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fastmp {

constexpr int64_t kGrainBytes = 65536;                 // what a thread moves at the least
constexpr int64_t kStreamedBytes = int64_t{16} << 20;  // outputs from this size on do not stay in the caches

// Tokens that keep a thread busy.
inline int64_t token_grain(int64_t num_slots, int64_t row_bytes) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, num_slots * row_bytes));
}

namespace FASTMP_ISA {

// Copies past the caches where `to` is aligned to vectors; `fence` has to follow before others read it.
FASTMP_INLINE void stream(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0) {
    for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
#if FASTMP_VECTOR_BYTES == 64
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif FASTMP_VECTOR_BYTES == 32
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
    }
  }
#endif
  if (i < bytes) std::memcpy(to + i, from + i, bytes - i);
}

FASTMP_INLINE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <typename T>
FASTMP_INLINE void copy_row(T* to, const T* from, int64_t count, bool streamed) {
  const auto bytes = static_cast<int64_t>(count * sizeof(T));
  if (streamed) {
    stream(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// A weighted sum of rows, of at most `most`, in the order in which they are added, rounded once.
template <typename T>
class RowSum {
 public:
  using S = scalar_of<T>;

  RowSum(int64_t most, int64_t num_cols)
      : rows_(most), weights_(most), sums_(most > kAtOnce ? num_cols : 0), num_cols_(num_cols) {}

  void add(const T* row, S weight) {
    rows_[count_] = row;
    weights_[count_++] = weight;
  }

  // Writes the sum, and begins another one.
  void finish(T* out) {
    int64_t first = 0;
    if (count_ <= kAtOnce) {
      run<true, true>(0, count_, out);
    } else {
      run<true, false>(0, kAtOnce, out);
      for (first = kAtOnce; count_ - first > kAtOnce; first += kAtOnce) run<false, false>(first, kAtOnce, out);
      run<false, true>(first, count_ - first, out);
    }
    count_ = 0;
  }

 private:
  static constexpr int64_t kAtOnce = 8;  // rows that are summed in registers

  // Adds rows [first, first + count), or begins the sum with them.
  template <bool kStart, bool kEnd>
  FASTMP_INLINE void run(int64_t first, int64_t count, T* out) {
    using V = lanes_of<T>;
    const T* const* rows = rows_.data() + first;
    const S* weights = weights_.data() + first;
    S* sums = sums_.data();
    for_vectors<num_lanes<V>>(num_cols_, [&](int64_t col, auto lanes) FASTMP_LAMBDA {
      V total = broadcast<V>(0);
      if constexpr (!kStart) total = load(sums + col, lanes, 0);
      for (int64_t i = 0; i < count; ++i) {
        prefetch<1024>(rows[i] + col);
        total += load(rows[i] + col, lanes, 0) * weights[i];
      }
      if constexpr (kEnd) {
        store(out + col, total, lanes);
      } else {
        store(sums + col, total, lanes);
      }
    });
  }

  std::vector<const T*> rows_;
  std::vector<S> weights_, sums_;
  int64_t num_cols_, count_ = 0;
};

// to = x * weight; where kDot, dots += x * y as well.
template <bool kDot, typename T>
FASTMP_INLINE void weigh(const T* x, const T* y, scalar_of<T> weight, T* to, int64_t count, lanes_of<T>& dots) {
  using V = lanes_of<T>;
  for_vectors<num_lanes<V>>(count, [&](int64_t col, auto lanes) FASTMP_LAMBDA {
    const V value = load(x + col, lanes, 0);
    if constexpr (kDot) {
      prefetch<1024>(y + col);
      dots += value * load(y + col, lanes, 0);
    }
    store(to + col, value * weight, lanes);
  });
}

constexpr int64_t kTile = 1024;  // elements of a row that are weighted at once, in a tile or where they belong

}  // namespace FASTMP_ISA
}  // namespace fastmp
