// GEMMs on the CPU.
//
// A GEMM is split into blocks of rows and columns, each described by a GemmDesc:
// 1. A block packs the columns of the right operand once, in the order of their use.
// 2. It packs strips of a few rows of the left operand, and multiplies each strip by all columns.
// 3. A strip's sums, in fp32 (fp64 for fp64), go through the epilogue while they are in the caches.
// Blocks write disjoint memory, and an element is summed in the same order in any block: results do not depend on the
// number of threads. 16-bit types are widened when packed, except bfloat16 for the units of bfloat16.h, which multiply
// it as it is and sum in fp32.
//
// A GEMM of a few rows, as in decoding, is bound by reading the right operand: it is read in place, and an element is
// summed in lanes.
#include "gemm.h"

#include "bfloat16.h"
#include "fp8_operand.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace fastmp {

// Memory that a thread packs into; it grows, and lives as long as one call of an op.
struct Scratch {
  void* get(int64_t bytes) {
    if (bytes > size) {
      size = (bytes + 4095) / 4096 * 4096;
      memory.reset(std::aligned_alloc(4096, size));
      if (!memory) throw std::bad_alloc();
    }
    return memory.get();
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory;
  int64_t size = 0;
};

FASTMP_DECLARE(void gemm_block(const GemmDesc&, Scratch&);)

namespace FASTMP_ISA {

// A unit multiplies a strip of kRows rows and a panel of kCols columns, both packed, over up to kTermBlock terms, and
// adds to the sums of the terms before. It packs kStrips strips at a time, and kTermUnit terms together; zeros pad
// rows, columns and terms. VectorUnit multiplies in lanes; MatrixUnit (tiles) and PairUnit (pairs of terms) multiply
// bfloat16, see bfloat16.h. Operands come unpacked as a pointer and (outer, term), see Operand.
template <class T>
struct VectorUnit {
  using Stored = T;
  using Packed = scalar_of<T>;
  using V = lanes_of<T>;
  static constexpr int64_t kLanes = num_lanes<V>;
  // sums of a strip and a panel fill the registers
  static constexpr int64_t kRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 6 : 4, kCols = 2 * kLanes;
  static constexpr int64_t kStrips = 4;  // where rows are neighbours, that uses whole cache lines
  static constexpr int64_t kTermUnit = 1;
  static constexpr int64_t kTermBlock = 128;  // more accurate than one long sum

  // `count` columns from `b` on as panels [panel][term][column].
  static void pack_columns(const T* b, int64_t outer, int64_t term, int64_t count, int64_t terms, Packed* out) {
    for (int64_t first = 0; first < count; first += kCols, out += kCols * terms) {
      const int64_t here = std::min(kCols, count - first);
      const T* from = b + first * outer;
      if (outer == 1) {
        for (int64_t t = 0; t < terms; ++t) {
          for (int64_t j = 0; j < kCols; j += kLanes) {
            V v{};
            if (here > j) v = load(from + t * term + j, here - j, 0);
            store(out + t * kCols + j, v);
          }
        }
        continue;
      }
      if (here < kCols) std::fill(out, out + kCols * terms, Packed(0));
      for (int64_t begin = 0; begin < terms; begin += kLanes) {
        const int64_t some = std::min(kLanes, terms - begin);
        for (int64_t j = 0; j < here; ++j) {
          const V v = load(from + j * outer + begin, some, 0);
          for (int64_t t = 0; t < some; ++t) out[(begin + t) * kCols + j] = v[t];
        }
      }
    }
  }

  // kStrips strips of rows from `a` on, each [row][term], or [term][row] where rows are neighbours in memory.
  static void pack_strips(const T* a, int64_t outer, int64_t term, int64_t rows, int64_t terms, Packed* out) {
    constexpr int64_t kAll = kStrips * kRows;
    if (term == 1) {
      for (int64_t i = 0; i < rows; ++i) {
        for_vectors<kLanes>(terms, [&](int64_t t, auto count) FASTMP_LAMBDA {
          store(out + i * terms + t, load(a + i * outer + t, count, 0), count);
        });
      }
      std::fill(out + rows * terms, out + kAll * terms, Packed(0));
      return;
    }
    Packed line[kAll + kLanes];
    for (int64_t t = 0; t < terms; ++t) {
      std::fill(line + rows, line + kAll, Packed(0));
      for_vectors<kLanes>(
          rows, [&](int64_t i, auto count) FASTMP_LAMBDA { store(line + i, load(a + t * term + i, count, 0), count); });
      for (int64_t strip = 0; strip < kStrips; ++strip) {
        std::memcpy(out + (strip * terms + t) * kRows, line + strip * kRows, kRows * sizeof(Packed));
      }
    }
  }

  // sums (kRows, kCols), `pitch` apart, over `terms` terms from `begin` on. Rows of the strip are `strip_pitch` apart,
  // or neighbours if that is 0.
  static void multiply(const Packed* strip, int64_t strip_pitch, const Packed* panel, int64_t begin, int64_t terms,
                       Packed* sums, int64_t pitch) {
    constexpr std::make_integer_sequence<int, kRows> rows{};
    const Packed* b = panel + begin * kCols;
    if (strip_pitch > 0) {
      multiply_rows<true>(strip + begin, strip_pitch, b, terms, sums, pitch, begin == 0, rows);
    } else {
      multiply_rows<false>(strip + begin * kRows, 0, b, terms, sums, pitch, begin == 0, rows);
    }
  }

 private:
  // Rows are unrolled by their numbers, a pack: as a loop, GCC keeps the sums in memory.
  template <bool kRowsApart, int... kRow>
  static void multiply_rows(const Packed* a, int64_t a_pitch, const Packed* b, int64_t terms, Packed* sums,
                            int64_t pitch, bool first, std::integer_sequence<int, kRow...>) {
    V left[sizeof...(kRow)] = {}, right[sizeof...(kRow)] = {};
    for (int64_t t = 0; t < terms; ++t) {
      const V b_left = load(b + t * kCols), b_right = load(b + t * kCols + kLanes);
      const auto row = [&](V& l, V& r, Packed x) FASTMP_LAMBDA {
        l += x * b_left;
        r += x * b_right;
      };
      (row(left[kRow], right[kRow], kRowsApart ? a[kRow * a_pitch + t] : a[t * kRows + kRow]), ...);
    }
    const auto add = [&](Packed* sum, V l, V r) FASTMP_LAMBDA {
      store(sum, first ? l : load(sum) + l);
      store(sum + kLanes, first ? r : load(sum + kLanes) + r);
    };
    (add(sums + kRow * pitch, left[kRow], right[kRow]), ...);
  }
};

// One row of the epilogue: `sums`, and for kGate `up`, hold gemm.cols columns.
template <class T, class Out, Epilogue epilogue, Form form>
FASTMP_INLINE void finish_row(const GemmDesc& gemm, int64_t row, const scalar_of<T>* sums, const scalar_of<T>* up) {
  using V = lanes_of<T>;
  Out* out = static_cast<Out*>(gemm.out) + row * gemm.out_pitch;
  T* kept = gemm.kept ? static_cast<T*>(gemm.kept) + row * gemm.kept_pitch : nullptr;
  const T* bias = static_cast<const T*>(gemm.bias);
  for_vectors<num_lanes<V>>(gemm.cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
    V v = load(sums + col, count, 0);
    if constexpr (epilogue == Epilogue::kAdd) v += load(out + col, count, 0);
    if (epilogue != Epilogue::kAdd && bias) v += load(bias + col, count, 0);
    if constexpr (epilogue == Epilogue::kActivate || epilogue == Epilogue::kGate) {
      if (kept) store(kept + col, v, count);
      v = activation<form>(v);
      if constexpr (epilogue == Epilogue::kGate) {
        V u = load(up + col, count, 0);
        if (bias) u += load(bias + gemm.up_offset + col, count, 0);
        if (kept) store(kept + gemm.up_offset + col, u, count);
        v = v * u;
      }
    }
    store(out + col, v, count);
  });
}

// The epilogue of `rows` rows from `first` on, whose sums are `pitch` apart; those of up lie `up_offset` further.
template <class T>
void finish(const GemmDesc& gemm, int64_t first, int64_t rows, const scalar_of<T>* sums, int64_t pitch,
            int64_t up_offset) {
  const auto all = [&](auto out, auto epilogue, auto form) {
    using Out = typename decltype(out)::type;
    for (int64_t i = 0; i < rows; ++i) {
      finish_row<T, Out, epilogue.value, form.value>(gemm, first + i, sums + i * pitch, sums + i * pitch + up_offset);
    }
  };
  using Wide = TypeTag<scalar_of<T>>;
  using Same = TypeTag<T>;
  constexpr std::integral_constant<Form, Form::kSilu> silu{};
  const auto activated = [&](auto epilogue) {
    switch (gemm.form) {
      case Form::kSilu: return all(Same{}, epilogue, silu);
      case Form::kGeluTanh: return all(Same{}, epilogue, std::integral_constant<Form, Form::kGeluTanh>{});
      case Form::kGelu: return all(Same{}, epilogue, std::integral_constant<Form, Form::kGelu>{});
    }
  };
  switch (gemm.epilogue) {
    case Epilogue::kStore: return all(Same{}, std::integral_constant<Epilogue, Epilogue::kStore>{}, silu);
    case Epilogue::kActivate: return activated(std::integral_constant<Epilogue, Epilogue::kActivate>{});
    case Epilogue::kGate: return activated(std::integral_constant<Epilogue, Epilogue::kGate>{});
    case Epilogue::kAdd: {
      constexpr std::integral_constant<Epilogue, Epilogue::kAdd> add{};
      return gemm.out_dtype == gemm.dtype ? all(Same{}, add, silu) : all(Wide{}, add, silu);
    }
  }
}

template <class Unit>
void multiply_block(const GemmDesc& gemm, Scratch& scratch) {
  using T = typename Unit::Stored;
  using P = typename Unit::Packed;
  using S = scalar_of<T>;
  constexpr int64_t kRows = Unit::kRows, kCols = Unit::kCols;
  const auto round_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
  const bool pair = gemm.epilogue == Epilogue::kGate;
  const int64_t width = round_up(gemm.cols, kCols), pitch = pair ? 2 * width : width;
  const int64_t terms = round_up(gemm.terms, Unit::kTermUnit), strip_pitch = gemm.a.term == 1 ? terms : 0;
  constexpr int64_t kAll = Unit::kStrips * kRows;
  const bool fp8_rows = gemm.a.scales.data, fp8_cols = gemm.b.scales.data;
  const int64_t packed = (pitch + kAll) * terms, plain = fp8_rows || fp8_cols ? std::max(kAll, kCols) * gemm.terms : 0;
  P* columns = static_cast<P*>(scratch.get(packed * sizeof(P) + kRows * pitch * sizeof(S) + plain * sizeof(T)));
  P* strips = columns + pitch * terms;
  S* sums = reinterpret_cast<S*>(columns + packed);
  T* dequantized = reinterpret_cast<T*>(sums + kRows * pitch);
  const Unit unit{};
  const auto pack = [&](const void* b, int64_t first, P* out) {
    if (!fp8_cols)
      return unit.pack_columns(static_cast<const T*>(b), gemm.b.outer, gemm.b.term, gemm.cols, gemm.terms, out);
    for (int64_t col = 0; col < gemm.cols; col += kCols) {
      const int64_t here = std::min(kCols, gemm.cols - col);
      dequantize_panel(gemm.b, first + col, here, gemm.terms, dequantized);
      unit.pack_columns(dequantized, gemm.terms, 1, here, gemm.terms, out + col * terms);
    }
  };
  // 1. Pack all columns, those of gate and up one after the other.
  pack(gemm.b.data, 0, columns);
  if (pair) pack(gemm.up, gemm.up_offset, columns + width * terms);
  for (int64_t row = 0; row < gemm.rows; row += kRows) {
    const int64_t left = gemm.rows - row, number = row / kRows % Unit::kStrips;
    // 2. Pack the next kStrips strips.
    if (number == 0) {
      const int64_t here = std::min(left, kAll);
      if (fp8_rows) {
        dequantize_panel(gemm.a, row, here, gemm.terms, dequantized);
        unit.pack_strips(dequantized, gemm.terms, 1, here, gemm.terms, strips);
      } else {
        const T* a = static_cast<const T*>(gemm.a.data) + row * gemm.a.outer;
        unit.pack_strips(a, gemm.a.outer, gemm.a.term, here, gemm.terms, strips);
      }
    }
    // 3. Multiply the strip by all columns, kTermBlock terms at a time.
    if (terms == 0) std::fill(sums, sums + kRows * pitch, S(0));
    for (int64_t begin = 0; begin < terms; begin += Unit::kTermBlock) {
      const int64_t some = std::min(Unit::kTermBlock, terms - begin);
      for (int64_t col = 0; col < pitch; col += kCols) {
        unit.multiply(strips + number * kRows * terms, strip_pitch, columns + col * terms, begin, some, sums + col,
                      pitch);
      }
    }
    // 4. The epilogue of the strip's rows.
    finish<T>(gemm, row, std::min(kRows, left), sums, pitch, width);
  }
}

// Terms of a row in lanes, and their products added to a total of lanes.
template <class T>
struct Lanes {
  using Stored = T;
  using Terms = lanes_of<T>;
  static constexpr int64_t kTerms = num_lanes<Terms>;
  template <class Count>
  static FASTMP_INLINE Terms terms(const T* p, Count count) {
    return load(p, count, 0);
  }
  static FASTMP_INLINE void add(Terms& total, Terms a, Terms b) { total += a * b; }
};

// Computes sums (kRows, kCols), `pitch` apart, of rows of `a` and columns of `b` whose terms are neighbours in memory.
// The next columns are prefetched: the loop is bound by memory.
template <class L, int64_t kRows, int64_t kCols, class T = typename L::Stored>
FASTMP_INLINE void dot_products(const T* a, int64_t a_outer, const T* b, int64_t b_outer, int64_t terms,
                                scalar_of<T>* sums, int64_t pitch) {
  lanes_of<T> totals[kRows][kCols] = {};
  for_vectors<L::kTerms>(terms, [&](int64_t t, auto count) FASTMP_LAMBDA {
    typename L::Terms right[kCols];
    for (int64_t j = 0; j < kCols; ++j) {
      right[j] = L::terms(b + j * b_outer + t, count);
      __builtin_prefetch(b + (j + kCols) * b_outer + t);
    }
    for (int64_t i = 0; i < kRows; ++i) {
      const auto left = L::terms(a + i * a_outer + t, count);
      for (int64_t j = 0; j < kCols; ++j) L::add(totals[i][j], left, right[j]);
    }
  });
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kCols; ++j) sums[i * pitch + j] = sum(totals[i][j]);
  }
}

// A GEMM of few rows, whose operands both have their terms next to each other in memory.
template <class L>
void multiply_few(const GemmDesc& gemm, Scratch& scratch) {
  using T = typename L::Stored;
  using S = scalar_of<T>;
  constexpr int64_t kRows = 4, kCols = kVectorBytes == 64 ? 4 : 2;  // totals, which fill half of the registers
  const int64_t pitch = (gemm.epilogue == Epilogue::kGate ? 2 : 1) * gemm.cols;
  const bool fp8_rows = gemm.a.scales.data, fp8_cols = gemm.b.scales.data;
  const int64_t plain = (fp8_rows ? gemm.rows : 0) + (fp8_cols ? kCols : 0);
  T* dequantized = static_cast<T*>(scratch.get(plain * gemm.terms * sizeof(T) + gemm.rows * pitch * sizeof(S)));
  T* rows_of_a = dequantized + (fp8_cols ? kCols * gemm.terms : 0);
  S* sums = reinterpret_cast<S*>(dequantized + plain * gemm.terms);
  if (fp8_rows) dequantize_panel(gemm.a, 0, gemm.rows, gemm.terms, rows_of_a);
  const T* a = fp8_rows ? rows_of_a : static_cast<const T*>(gemm.a.data);
  const int64_t a_outer = fp8_rows ? gemm.terms : gemm.a.outer, b_outer = fp8_cols ? gemm.terms : gemm.b.outer;
  const auto columns = [&](const void* data, int64_t first, S* into) {
    const auto block = [&](int64_t col, auto width) {
      if (fp8_cols) dequantize_panel(gemm.b, first + col, width.value, gemm.terms, dequantized);
      const T* b = fp8_cols ? dequantized : static_cast<const T*>(data) + col * b_outer;
      const auto rows = [&](int64_t row, auto height) {
        dot_products<L, height.value, width.value>(a + row * a_outer, a_outer, b, b_outer, gemm.terms,
                                                   into + row * pitch + col, pitch);
      };
      int64_t row = 0;
      for (; row + kRows <= gemm.rows; row += kRows) rows(row, std::integral_constant<int64_t, kRows>{});
      for (; row < gemm.rows; ++row) rows(row, std::integral_constant<int64_t, 1>{});
    };
    int64_t col = 0;
    for (; col + kCols <= gemm.cols; col += kCols) block(col, std::integral_constant<int64_t, kCols>{});
    for (; col < gemm.cols; ++col) block(col, std::integral_constant<int64_t, 1>{});
  };
  columns(gemm.b.data, 0, sums);
  if (gemm.epilogue == Epilogue::kGate) columns(gemm.up, gemm.up_offset, sums + gemm.cols);
  finish<T>(gemm, 0, gemm.rows, sums, pitch, gemm.cols);
}

void gemm_block(const GemmDesc& gemm, Scratch& scratch) {
  if (gemm.few) {
#ifdef FASTMP_AMX
    if (gemm.dtype == ScalarType::BFloat16 && has_dot_products()) return multiply_few<Pairs>(gemm, scratch);
#endif
    return dispatch_float(gemm.dtype, "grouped_mm",
                          [&](auto tag) { multiply_few<Lanes<typename decltype(tag)::type>>(gemm, scratch); });
  }
#ifdef FASTMP_AMX
  if (gemm.dtype == ScalarType::BFloat16 && has_amx()) return multiply_block<MatrixUnit>(gemm, scratch);
  if (gemm.dtype == ScalarType::BFloat16 && has_dot_products()) return multiply_block<PairUnit>(gemm, scratch);
#endif
  dispatch_float(gemm.dtype, "grouped_mm",
                 [&](auto tag) { multiply_block<VectorUnit<typename decltype(tag)::type>>(gemm, scratch); });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// A sum that continues in the compute dtype takes a block of terms at a time, so that packed panels stay small.
int64_t terms_at_a_time(const GemmDesc& gemm) {
  constexpr int64_t kTerms = 512;
  const bool goes_on = gemm.epilogue == Epilogue::kAdd && gemm.out_dtype == compute_dtype(gemm.dtype);
  return goes_on ? kTerms : std::max<int64_t>(1, gemm.terms);
}

// Whether reading the right operand takes longer than multiplying it.
bool few(const GemmDesc& whole) {
  constexpr int64_t kRows = 8;
  return whole.rows <= kRows && whole.a.term == 1 && whole.b.term == 1 && whole.epilogue != Epilogue::kAdd;
}

}  // namespace

// Splits GEMMs into blocks of at most 1024 rows, and so many columns that the right operand's stay in the second-level
// cache; runs them over all threads. If that makes few blocks, they get fewer rows.
void run_gemms(const std::vector<GemmDesc>& gemms, const Tensor& x, const Tensor& out) {
  const auto itemsize = static_cast<int64_t>(x.element_size()), out_size = static_cast<int64_t>(out.element_size());
  constexpr int64_t kRows = 1024, kRowUnit = 48, kUnit = 32, kBytes = 1 << 20;  // whole strips, or nearly so
  const auto move = [](auto& p, int64_t bytes) {
    if (p) p = const_cast<char*>(static_cast<const char*>(p)) + bytes;
  };
  const auto columns = [&](const GemmDesc& whole) {
    const int64_t terms = std::clamp<int64_t>(whole.terms, 1, terms_at_a_time(whole));
    const int64_t fit = kBytes / (terms * itemsize);
    return std::clamp<int64_t>(fit / kUnit * kUnit, 4 * kUnit, 16 * kUnit);
  };
  // 1. Split.
  int64_t count = 0;
  for (const GemmDesc& whole : gemms) count += divide_up(whole.cols, columns(whole));
  const int64_t wanted = divide_up(2 * num_threads(), std::max<int64_t>(1, count));
  std::vector<GemmDesc> all_blocks;
  for (const GemmDesc& whole : gemms) {
    const int64_t cols = columns(whole), blocks = std::max(wanted, divide_up(whole.rows, kRows));
    const int64_t rows = divide_up(divide_up(whole.rows, blocks), kRowUnit) * kRowUnit;
    for (int64_t col = 0; col < whole.cols; col += cols) {
      for (int64_t row = 0; row < whole.rows; row += rows) {
        GemmDesc block = whole;
        block.few = few(whole);  // by the rows of all blocks: their number depends on that of threads
        block.rows = std::min(rows, whole.rows - row);
        block.cols = std::min(cols, whole.cols - col);
        const int64_t row_size = whole.a.scales.data ? 1 : itemsize, col_size = whole.b.scales.data ? 1 : itemsize;
        move(block.a.data, row * whole.a.outer * row_size);
        move(block.b.data, col * whole.b.outer * col_size);
        move(block.up, col * whole.b.outer * col_size);
        block.a.scales.first += row, block.b.scales.first += col;
        move(block.bias, col * itemsize);
        move(block.out, (row * whole.out_pitch + col) * out_size);
        move(block.kept, (row * whole.kept_pitch + col) * itemsize);
        all_blocks.push_back(block);
      }
    }
  }
  // 2. Run the blocks; a continued sum, a block of terms at a time.
  parallel_for(0, static_cast<int64_t>(all_blocks.size()), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t index = begin; index < end; ++index) {
      const GemmDesc& block = all_blocks[index];
      const int64_t some = terms_at_a_time(block);
      for (int64_t first = 0; first == 0 || first < block.terms; first += some) {
        GemmDesc part = block;
        part.terms = std::min(some, block.terms - first);
        move(part.a.data, first * block.a.term * itemsize);
        move(part.b.data, first * block.b.term * itemsize);
        FASTMP_BEST(gemm_block)(part, scratch);
      }
    }
  });
}

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
