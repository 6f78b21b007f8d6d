// Philox-4x32-10, a counter-based random number generator (Salmon et al. 2011). Key and counter as in
// fastmp/ops/core/philox.py.
//
// A block of words is computed in registers with one counter per 64-bit lane. The lower half of a lane is the operand
// of the 32 x 32-bit multiplier; the upper half holds the rest of the last product and is ignored.
#pragma once

#include "simd.h"

namespace fastmp::FASTMP_ISA {

typedef uint64_t longs __attribute__((vector_size(kVectorBytes)));
constexpr int kLongs = kVectorBytes / 8;
constexpr int kBlock = 4 * kLongs;  // words per call of philox: two vectors of floats

// Products of the lower halves of a's lanes and b.
FASTMP_INLINE longs mul_low(longs a, uint32_t b) {
#if FASTMP_VECTOR_BYTES == 64
  return (longs)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif FASTMP_VECTOR_BYTES == 32
  return (longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__x86_64__)
  return (longs)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// The first, or the second, 64-bit number of every 128 bits of a and of b, in turn.
FASTMP_INLINE longs firsts(longs a, longs b) {
#if FASTMP_VECTOR_BYTES == 64
  return (longs)_mm512_maskz_unpacklo_epi64(0xff, (__m512i)a, (__m512i)b);
#elif FASTMP_VECTOR_BYTES == 32
  return (longs)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
#else
  return longs{a[0], b[0]};
#endif
}
FASTMP_INLINE longs seconds(longs a, longs b) {
#if FASTMP_VECTOR_BYTES == 64
  return (longs)_mm512_maskz_unpackhi_epi64(0xff, (__m512i)a, (__m512i)b);
#elif FASTMP_VECTOR_BYTES == 32
  return (longs)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
#else
  return longs{a[1], b[1]};
#endif
}

// The kBlock words from word 4 * counter on, in order. Lanes 2i and 2i + 1 hold counters i and i + kLongs / 2, which
// makes the two vectors one shuffle each.
struct Words {
  words first, second;
};
FASTMP_INLINE Words philox(uint64_t seed, uint64_t counter, uint32_t stream = 0) {
  longs lanes;
  for (int i = 0; i < kLongs; ++i) lanes[i] = counter + i / 2 + (i % 2) * (kLongs / 2);
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  longs c0 = lanes, c1 = lanes >> 32, c2 = longs{} + stream, c3{};
  for (int round = 0; round < 10; ++round) {
    const longs a = mul_low(c0, 0xD2511F53u), b = mul_low(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ k0;
    c1 = b;
    c2 = (a >> 32) ^ c3 ^ k1;
    c3 = a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const longs low = (c0 & 0xffffffffu) | (c1 << 32), high = (c2 & 0xffffffffu) | (c3 << 32);
  return {(words)firsts(low, high), (words)seconds(low, high)};
}

}  // namespace fastmp::FASTMP_ISA
