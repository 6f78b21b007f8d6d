// The matrix unit (AMX) of x86 processors: products of bfloat16 in tiles of 16 x 16, summed in fp32.
//
// Inline assembly, so no compiler flag is needed and nothing runs where `has_amx` says no. FASTMP_AMX is defined where
// the unit can exist.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__linux__)
#define FASTMP_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace fastmp::FASTMP_ISA {

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Whether this process may use the matrix unit: asks the system once.
inline bool has_amx() {
  static const bool there = [] {
    if (permitted() < Isa::kAmx) return false;
    uint32_t a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr uint32_t kBf16AndTiles = (1u << 22) | (1u << 24);
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return (d & kBf16AndTiles) == kBf16AndTiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return there;
}

#define FASTMP_TILE_ZERO(c) __asm__ volatile("tilezero %%tmm" #c ::)
#define FASTMP_TILE_LOAD(c, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #c ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define FASTMP_TILE_STORE(c, p, stride) \
  __asm__ volatile("tilestored %%tmm" #c ", (%0,%1,1)" ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define FASTMP_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// 16 x 16 transpose of 32-bit elements, in place. (With full masks: GCC warns of what its own plain forms leave open.)
FASTMP_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_maskz_unpacklo_epi32(0xffff, r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_maskz_unpacklo_epi64(0xff, t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_maskz_unpackhi_epi64(0xff, t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_maskz_unpacklo_epi64(0xff, t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_maskz_unpackhi_epi64(0xff, t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_maskz_shuffle_i32x4(0xffff, r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_maskz_shuffle_i32x4(0xffff, r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_maskz_shuffle_i32x4(0xffff, r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_maskz_shuffle_i32x4(0xffff, r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_maskz_shuffle_i32x4(0xffff, t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_maskz_shuffle_i32x4(0xffff, t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_maskz_shuffle_i32x4(0xffff, t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_maskz_shuffle_i32x4(0xffff, t[4 + i], t[12 + i], 0xdd);
  }
}

// 16 outer indices and 32 terms as one tile: [outer][term] for the left operand, [pair of terms][outer][2] for the right
// one (`pairs_first`). Element (o, t) of `from` is at o * outer + t * term; zeros beyond `outers` and `terms`.
FASTMP_INLINE void pack_tile(const BFloat16* from, int64_t outer, int64_t term, int64_t outers, int64_t terms,
                             bool pairs_first, BFloat16* out) {
  __m512i r[16];
  if (term == 1) {
    const __mmask32 mask = terms >= 32 ? ~0u : (1u << terms) - 1;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = i < outers ? _mm512_maskz_loadu_epi16(mask, from + i * outer) : _mm512_setzero_si512();
    }
  } else {
    const __mmask16 mask = outers >= 16 ? 0xffff : static_cast<__mmask16>((1u << outers) - 1);
    const auto wide = [&](int64_t t) FASTMP_LAMBDA {
      if (t >= terms) return _mm512_setzero_si512();
      return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(mask, from + t * term));
    };
#pragma GCC unroll 16
    for (int p = 0; p < 16; ++p) {
      r[p] = _mm512_or_si512(wide(2 * p), _mm512_maskz_slli_epi32(0xffff, wide(2 * p + 1), 16));
    }
  }
  if ((term == 1) == pairs_first) transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + 32 * i, r[i]);
}

// 32 x 32 blocks of a product of bfloat16 operands: four tiles of sums, over 16 steps of 32 terms at the most, which
// keeps a strip and a panel in L1. While it lives, the tiles are configured for it; others in this thread may count on
// theirs, so it leaves them as they were.
class MatrixUnit {
 public:
  using Stored = BFloat16;
  using Packed = BFloat16;
  static constexpr int64_t kRows = 32, kCols = 32, kStrips = 1, kTermUnit = 32, kTermBlock = 16 * kTermUnit;

  MatrixUnit() {
    alignas(64) TileConfig ours;
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    __asm__ volatile("ldtilecfg %0" ::"m"(ours));
  }
  ~MatrixUnit() {
    if (before_.palette == 0) {
      __asm__ volatile("tilerelease" ::);
    } else {
      __asm__ volatile("ldtilecfg %0" ::"m"(before_));
    }
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  static void pack_columns(const BFloat16* b, int64_t outer, int64_t term, int64_t count, int64_t terms,
                           BFloat16* out) {
    for (int64_t first = 0; first < count; first += kCols) {
      out = pack(b + first * outer, outer, term, count - first, terms, true, out);
    }
  }
  static void pack_strips(const BFloat16* a, int64_t outer, int64_t term, int64_t rows, int64_t terms, BFloat16* out) {
    pack(a, outer, term, rows, terms, false, out);
  }

  static void multiply(const BFloat16* strip, int64_t, const BFloat16* panel, int64_t begin, int64_t terms, float* sums,
                       int64_t pitch) {
    float *low = sums + 16 * pitch, *corner = low + 16, *right = sums + 16;
    const int64_t stride = pitch * 4;
    if (begin == 0) {
      FASTMP_TILE_ZERO(0);
      FASTMP_TILE_ZERO(1);
      FASTMP_TILE_ZERO(2);
      FASTMP_TILE_ZERO(3);
    } else {
      FASTMP_TILE_LOAD(0, sums, stride);
      FASTMP_TILE_LOAD(1, right, stride);
      FASTMP_TILE_LOAD(2, low, stride);
      FASTMP_TILE_LOAD(3, corner, stride);
    }
    const BFloat16 *a = strip + begin * kRows, *b = panel + begin * kCols;
    for (int64_t t = 0; t < terms; t += kTermUnit, a += 2 * kTile, b += 2 * kTile) {
      FASTMP_TILE_LOAD(4, a, 64);
      FASTMP_TILE_LOAD(6, b, 64);
      FASTMP_TILE_LOAD(5, a + kTile, 64);
      FASTMP_TILE_LOAD(7, b + kTile, 64);
      FASTMP_TILE_DOT(0, 4, 6);
      FASTMP_TILE_DOT(1, 4, 7);
      FASTMP_TILE_DOT(2, 5, 6);
      FASTMP_TILE_DOT(3, 5, 7);
    }
    FASTMP_TILE_STORE(0, sums, stride);
    FASTMP_TILE_STORE(1, right, stride);
    FASTMP_TILE_STORE(2, low, stride);
    FASTMP_TILE_STORE(3, corner, stride);
  }

 private:
  static constexpr int64_t kTile = 512;  // elements

  // 32 outer indices as [32 terms][2 tiles]; returns where they end.
  static BFloat16* pack(const BFloat16* from, int64_t outer, int64_t term, int64_t outers, int64_t terms,
                        bool pairs_first, BFloat16* out) {
    for (int64_t t = 0; t < terms; t += kTermUnit) {
      for (int64_t i = 0; i < 32; i += 16, out += kTile) {
        const int64_t left = std::max<int64_t>(0, outers - i);
        pack_tile(from + i * outer + t * term, outer, term, left, terms - t, pairs_first, out);
      }
    }
    return out;
  }

  alignas(64) TileConfig before_;
};

}  // namespace fastmp::FASTMP_ISA

#endif
