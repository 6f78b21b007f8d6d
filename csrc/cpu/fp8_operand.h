// Dequantisation of FP8 operands of a GEMM, a panel at a time.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace fastmp::FASTMP_ISA {

typedef uint8_t fp8_bytes __attribute__((vector_size(kFloats)));

// Returns kFloats FP8 numbers as fp32, exactly. Subnormal ones are sums of normal fp32 numbers, which processors that
// flush subnormal numbers do not flush.
template <bool kE5m2>
FASTMP_INLINE floats load_fp8(const uint8_t* p) {
  constexpr uint32_t kMantissa = kE5m2 ? 2 : 3, kRebias = (kE5m2 ? 127 - 15 : 127 - 7) << 23;
  fp8_bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const words w = __builtin_convertvector(bytes, words);
  const words magnitude = (w & 0x7fu) << (23 - kMantissa);
  const words normal = magnitude + kRebias;
  const words least = magnitude * 0u + (kRebias + (1u << 23));  // of the normal numbers
  const words subnormal = bits_of(floats_of(magnitude + least) - floats_of(least));
  words out = select(magnitude < (1u << 23), subnormal, normal);
  const words special = magnitude | 0x7f800000u;
  out = select(magnitude >= (kE5m2 ? 0x1fu << 23 : 0x7fu << 20), special, out);
  return floats_of(out | ((w & 0x80u) << 24));
}

// Returns the scale at `index`: a float32, or 2^(byte - 127), of which 255 is NaN and 0 a subnormal number.
FASTMP_INLINE float scale_at(const Scales& scales, int64_t index) {
  if (scales.term_block != 32) return static_cast<const float*>(scales.data)[index];
  const uint32_t exponent = static_cast<const uint8_t*>(scales.data)[index];
  const uint32_t bits = exponent == 0 ? 0x400000u : exponent == 255 ? 0x7fc00000u : exponent << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

template <class T, bool kE5m2>
void dequantize_as(const Operand& operand, int64_t first, int64_t count, int64_t terms, T* out) {
  const Scales& scales = operand.scales;
  for (int64_t i = first; i < first + count; ++i, out += terms) {
    const auto* q = static_cast<const uint8_t*>(operand.data) + i * operand.outer;
    const int64_t line = (scales.first + i) / scales.outer_block * scales.outer_pitch;
    for (int64_t t = 0; t < terms; t += scales.term_block) {
      const float scale = scale_at(scales, line + t / scales.term_block * scales.term_pitch);
      for (int64_t j = t; j < t + scales.term_block; j += kFloats) {
        const floats value = load_fp8<kE5m2>(q + j);
        if constexpr (std::is_same_v<T, double>) {
          for (int lane = 0; lane < kFloats; ++lane) out[j + lane] = static_cast<double>(value[lane]) * scale;
        } else {
          store(out + j, value * scale);
        }
      }
    }
  }
}

// Stores outer indices from `first` on as rows of `terms` elements of T; all blocks of terms are whole.
template <class T>
void dequantize(const Operand& operand, int64_t first, int64_t count, int64_t terms, T* out) {
  if (operand.scales.e5m2) return dequantize_as<T, true>(operand, first, count, terms, out);
  dequantize_as<T, false>(operand, first, count, terms, out);
}

}  // namespace fastmp::FASTMP_ISA
