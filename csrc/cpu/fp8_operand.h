// Dequantisation of FP8 operands of a GEMM, a panel at a time.
#pragma once

#include "fp8.h"
#include "gemm.h"

namespace fastmp::FASTMP_ISA {

// Stores outer indices from `first` on as rows of `terms` elements of T; all blocks of terms are whole.
template <class Format, class Scale, class T>
void dequantize_panel(const Operand& operand, int64_t first, int64_t count, int64_t terms, T* out) {
  const Scales& scales = operand.scales;
  for (int64_t i = first; i < first + count; ++i, out += terms) {
    const auto* q = static_cast<const uint8_t*>(operand.data) + i * operand.outer;
    const Scale* scale =
        static_cast<const Scale*>(scales.data) + (scales.first + i) / scales.outer_block * scales.outer_pitch;
    for (int64_t t = 0; t < terms; t += scales.term_block, scale += scales.term_pitch) {
      dequantize<Format>(q + t, scales.term_block, scale_of(*scale), out + t);
    }
  }
}

template <class T>
void dequantize_panel(const Operand& operand, int64_t first, int64_t count, int64_t terms, T* out) {
  const auto with = [&](auto format) {
    using Format = typename decltype(format)::type;
    if (operand.scales.term_block == 32) return dequantize_panel<Format, uint8_t>(operand, first, count, terms, out);
    dequantize_panel<Format, float>(operand, first, count, terms, out);
  };
  operand.scales.e5m2 ? with(TypeTag<E5m2>{}) : with(TypeTag<E4m3>{});
}

}  // namespace fastmp::FASTMP_ISA
