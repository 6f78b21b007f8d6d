// bfloat16 GEMM units of x86 processors, summed in fp32: the matrix unit (AMX), in tiles of 16 x 16, and dot products
// of pairs (AVX512_BF16). Both flush numbers below 2^-126 to zero.
//
// Inline assembly needs no compiler flag; `has_amx` and `has_dot_products` say at run time whether it may run.
// FASTMP_AMX is defined where they can exist.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__linux__)
#define FASTMP_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

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
    if (permitted() < Isa::kBFloat16) return false;
    uint32_t a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr uint32_t kBf16AndTiles = (1u << 22) | (1u << 24);
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return (d & kBf16AndTiles) == kBf16AndTiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return there;
}

inline bool has_dot_products() {
  static const bool there = permitted() >= Isa::kBFloat16 && __builtin_cpu_supports("avx512bf16");
  return there;
}

#define FASTMP_TILE_ZERO(c) __asm__ volatile("tilezero %%tmm" #c::)
#define FASTMP_TILE_LOAD(c, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #c::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define FASTMP_TILE_STORE(c, p, stride) \
  __asm__ volatile("tilestored %%tmm" #c ", (%0,%1,1)" ::"r"(p), "r"(static_cast<int64_t>(stride)) : "memory")
#define FASTMP_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// 16 x 16 transpose of 32-bit elements, in place. (With full masks: GCC warns of what its own plain forms leave open.)
FASTMP_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  // 1. Interleave the elements of neighbouring rows, then pairs of elements: 4 x 4 blocks are transposed.
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
  // 2. Gather the 128-bit blocks of rows 4 apart, then 8 apart: the blocks are transposed.
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

// 16 outer indices and 32 terms as one tile: [outer][term] for the left operand, [pair of terms][outer][2] for the
// right one (`pairs_first`). Element (o, t) of `from` is at o * outer + t * term; zeros beyond `outers` and `terms`.
// The first `lines` vectors of the tile are stored, `pitch` elements apart.
FASTMP_INLINE void pack_tile(const BFloat16* from, int64_t outer, int64_t term, int64_t outers, int64_t terms,
                             bool pairs_first, BFloat16* out, int64_t lines = 16, int64_t pitch = 32) {
  __m512i r[16];
  // 1. Load 16 vectors of 32: an outer index each if terms are neighbours in memory, else a pair of terms each.
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
  // 2. Transpose pairs of terms and outer indices, unless the loads have the order that is asked for; store.
  if ((term == 1) == pairs_first) transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < lines) _mm512_store_si512(out + pitch * i, r[i]);
  }
}

// 32 x 32 blocks of a GEMM of bfloat16 operands: four tiles of sums, over at most 16 steps of 32 terms, which keeps a
// strip and a panel in L1. Its lifetime is that of its tile configuration; the one before, which other code of this
// thread may rely on, is restored.
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
    // 1. Tiles 0 to 3 hold the sums of the block's quadrants: zero, or those of the terms before.
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
    // 2. 32 terms a step: tiles 4 and 5 of the strip, 6 and 7 of the panel, and their four products.
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
    // 3. Store the sums.
    FASTMP_TILE_STORE(0, sums, stride);
    FASTMP_TILE_STORE(1, right, stride);
    FASTMP_TILE_STORE(2, low, stride);
    FASTMP_TILE_STORE(3, corner, stride);
  }

 private:
  static constexpr int64_t kTile = 512;  // elements

  // Packs 32 outer indices as [32 terms][2 tiles]; returns the end of what it wrote.
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

// Pairs of neighbouring terms in lanes, and their products added to a total of lanes, as `Lanes` of gemm.cpp.
struct Pairs {
  using Stored = BFloat16;
  using Terms = __m512i;
  static constexpr int64_t kTerms = 32;
  template <class Count>
  static FASTMP_INLINE Terms terms(const BFloat16* p, Count count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(0xffffffffu >> (kTerms - count)), p);
  }
  static FASTMP_INLINE void add(floats& total, Terms a, Terms b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
  }
};

// Dot products of pairs of terms, in lanes: 12 x 32 blocks, whose sums fill the registers.
struct PairUnit {
  using Stored = BFloat16;
  using Packed = BFloat16;
  static constexpr int64_t kRows = 12, kCols = 32, kStrips = 8, kTermUnit = 2, kTermBlock = 512;

  // Columns as panels [panel][pair of terms][column][2].
  static void pack_columns(const BFloat16* b, int64_t outer, int64_t term, int64_t count, int64_t terms,
                           BFloat16* out) {
    for (int64_t first = 0; first < count; first += kCols) {
      for (int64_t t = 0; t < terms; t += 32) {
        const int64_t lines = std::min<int64_t>(16, (terms - t + 1) / 2);
        for (int64_t j = 0; j < kCols; j += 16) {
          const int64_t left = std::max<int64_t>(0, count - first - j);
          pack_tile(b + (first + j) * outer + t * term, outer, term, left, terms - t, true, out + 2 * j, lines,
                    2 * kCols);
        }
        out += 2 * kCols * lines;
      }
    }
  }

  // kStrips strips, each [row][term], or [pair of terms][row][2] where rows are neighbours in memory.
  static void pack_strips(const BFloat16* a, int64_t outer, int64_t term, int64_t rows, int64_t terms, BFloat16* out) {
    constexpr int64_t kAll = kStrips * kRows;
    const int64_t width = (terms + 1) / 2 * 2;
    // 1. Terms are neighbours in memory: copy rows; zeros fill odd terms and missing rows.
    if (term == 1) {
      for (int64_t i = 0; i < rows; ++i, out += width) {
        std::copy_n(a + i * outer, terms, out);  // without terms the pointers may be null, which memcpy forbids
        std::fill(out + terms, out + width, BFloat16(0));
      }
      std::fill(out, out + (kAll - rows) * width, BFloat16(0));
      return;
    }
    // 2. Rows are neighbours in memory: interleave two terms of kRows rows, strip by strip.
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t t = 0; t < terms; t += 2, out += 2 * kRows) {
      for (int64_t strip = 0; strip < kStrips; ++strip) {
        const int64_t left = std::clamp<int64_t>(rows - strip * kRows, 0, kRows);
        const auto mask = static_cast<__mmask16>((1u << left) - 1);
        const BFloat16* from = a + t * term + strip * kRows;
        const __m256i even = _mm256_maskz_loadu_epi16(mask, from);
        const __m256i odd = t + 1 < terms ? _mm256_maskz_loadu_epi16(mask, from + term) : _mm256_setzero_si256();
        const __m512i both = _mm512_mask_broadcast_i64x4(_mm512_maskz_broadcast_i64x4(0xff, even), 0xf0, odd);
        _mm512_mask_storeu_epi32(out + strip * kRows * width, 0xfff, _mm512_maskz_permutexvar_epi16(~0u, pairs, both));
      }
    }
  }

  static void multiply(const BFloat16* strip, int64_t strip_pitch, const BFloat16* panel, int64_t begin, int64_t terms,
                       float* sums, int64_t pitch) {
    constexpr std::make_integer_sequence<int, kRows> rows{};
    const BFloat16* b = panel + begin * kCols;
    if (strip_pitch > 0) {
      multiply_rows<true>(strip + begin, strip_pitch, b, terms, sums, pitch, begin == 0, rows);
    } else {
      multiply_rows<false>(strip + begin * kRows, 0, b, terms, sums, pitch, begin == 0, rows);
    }
  }

 private:
  template <bool kRowsApart, int... kRow>
  static void multiply_rows(const BFloat16* a, int64_t a_pitch, const BFloat16* b, int64_t terms, float* sums,
                            int64_t pitch, bool first, std::integer_sequence<int, kRow...>) {
    // 1. A pair of terms of each row, in all lanes, times 32 columns: the sums of the block stay in registers.
    floats left[kRows] = {}, right[kRows] = {};
    for (int64_t t = 0; t < terms; t += 2, b += 2 * kCols) {
      const __m512i b_left = _mm512_load_si512(b), b_right = _mm512_load_si512(b + kCols);
      const auto row = [&](floats& l, floats& r, const BFloat16* pair) FASTMP_LAMBDA {
        int32_t both;
        std::memcpy(&both, pair, sizeof both);
        const __m512i x = _mm512_set1_epi32(both);
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(l) : "v"(b_left), "v"(x));
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(r) : "v"(b_right), "v"(x));
      };
      (row(left[kRow], right[kRow], kRowsApart ? a + kRow * a_pitch + t : a + t * kRows + 2 * kRow), ...);
    }
    // 2. Add them to the sums of the terms before.
    const auto add = [&](float* sum, floats l, floats r) FASTMP_LAMBDA {
      store(sum, first ? l : load(sum) + l);
      store(sum + kFloats, first ? r : load(sum + kFloats) + r);
    };
    (add(sums + kRow * pitch, left[kRow], right[kRow]), ...);
  }
};

}  // namespace fastmp::FASTMP_ISA

#endif
