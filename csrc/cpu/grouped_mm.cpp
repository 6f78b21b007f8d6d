// grouped_mm, the gradient of its weights, and the first product of an expert's MLP on the CPU.
//
// A job is a block of rows and columns of one expert's product. It packs the columns of the right operand once, in
// the order in which they are used, and then strips of a few rows of the left one; a strip's sums are kept in fp32
// (fp64 for fp64) and go through the epilogue while they are in the caches. Jobs depend on the shape alone, and each
// writes its own block: results do not depend on the number of threads. 16-bit types are widened when packed, except
// that bfloat16 goes to the matrix unit (AMX) as it is where there is one; it also sums in fp32.
// The semantics are those of the references in fastmp/ops/grouped_mm.py.
#include "activations.h"
#include "rows.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__AVX512F__) && defined(__linux__)
#define FASTMP_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastmp {

// Element (outer, term) lies at outer * `outer` + term * `term`; one of the two is 1. Outer are rows of the left
// operand, columns of the right one.
struct Operand {
  const void* data;
  int64_t outer, term;
};

enum class Epilogue { kStore, kAdd, kSwiglu, kGelu };

// `cols` columns of the product, beginning where `b` does; kSwiglu has as many again that begin at `up`. `out` is
// where the block's first element goes, `kept` (or null) the same of the pre-activation, `bias` of the first column;
// up's are `up_offset` elements further in `kept` and `bias`.
struct ProductJob {
  Operand a, b;
  const void* up;
  const void* bias;
  void* out;
  void* kept;
  int64_t rows, cols, terms, out_pitch, kept_pitch, up_offset;
  ScalarType dtype, out_dtype;
  Epilogue epilogue;
};

// Memory that a thread packs into; it grows, and lives as long as one call of an op.
struct Scratch {
  void* get(int64_t bytes) {
    if (bytes > size) {
      size = (bytes + 4095) / 4096 * 4096;
      memory.reset(std::aligned_alloc(4096, size));
    }
    return memory.get();
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory;
  int64_t size = 0;
};

FASTMP_DECLARE(void product_job(const ProductJob&, Scratch&);)

namespace FASTMP_ISA {

constexpr int kStripRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 6 : 4;  // sums of a strip fill the registers
constexpr int kStrips = 4;            // packed at a time: where rows are neighbours, that uses whole cache lines
constexpr int64_t kTermBlock = 128;   // summed up before it is added: more accurate than one long sum

template <class S>
constexpr int64_t kPanel = 2 * num_lanes<lanes_of<S>>;  // columns

FASTMP_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// `count` columns from `b` on as panels [panel][term][column], zeros beyond the last column.
template <class T, class S>
void pack_columns(const T* b, const Operand& at, int64_t count, int64_t terms, S* out) {
  constexpr int64_t kCols = kPanel<S>;
  using V = lanes_of<S>;
  for (int64_t first = 0; first < count; first += kCols, out += kCols * terms) {
    const int64_t here = std::min(kCols, count - first);
    const T* from = b + first * at.outer;
    if (at.outer == 1) {
      for (int64_t t = 0; t < terms; ++t) {
        for (int64_t j = 0; j < kCols; j += num_lanes<V>) {
          V v{};
          if (here > j) v = load(from + t * at.term + j, here - j, S(0));
          store(out + t * kCols + j, v);
        }
      }
      continue;
    }
    if (here < kCols) std::fill(out, out + kCols * terms, S(0));
    for (int64_t begin = 0; begin < terms; begin += num_lanes<V>) {
      const int64_t some = std::min<int64_t>(num_lanes<V>, terms - begin);
      for (int64_t j = 0; j < here; ++j) {
        const V v = load(from + j * at.outer + begin, some, S(0));
        for (int64_t t = 0; t < some; ++t) out[(begin + t) * kCols + j] = v[t];
      }
    }
  }
}

// kStrips strips of kStripRows rows of the left operand, widened, each [row][term], or [term][row] where rows are
// neighbours in memory. Zeros for rows that are not there.
template <class T, class S>
void pack_strips(const T* a, const Operand& at, int64_t rows, int64_t terms, S* out) {
  using V = lanes_of<S>;
  constexpr int64_t kRows = kStrips * kStripRows;
  if (at.term == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      for_vectors<num_lanes<V>>(terms, [&](int64_t t, auto count) FASTMP_LAMBDA {
        store(out + i * terms + t, load(a + i * at.outer + t, count, S(0)), count);
      });
    }
    std::fill(out + rows * terms, out + kRows * terms, S(0));
    return;
  }
  S line[kRows + num_lanes<V>];
  for (int64_t t = 0; t < terms; ++t) {
    std::fill(line + rows, line + kRows, S(0));
    for_vectors<num_lanes<V>>(rows, [&](int64_t i, auto count) FASTMP_LAMBDA {
      store(line + i, load(a + t * at.term + i, count, S(0)), count);
    });
    for (int64_t strip = 0; strip < kStrips; ++strip) {
      std::memcpy(out + (strip * terms + t) * kStripRows, line + strip * kStripRows, kStripRows * sizeof(S));
    }
  }
}

// sums (kStripRows, a panel) of a strip and a panel over `terms` terms, added to what is there unless it is the first.
// Rows are unrolled by their numbers, a pack: as a loop, GCC keeps the sums in memory.
template <class S, bool kRowsApart, int... kRow>
void multiply(const S* a, int64_t a_pitch, const S* b, int64_t terms, S* sums, int64_t pitch, bool first,
              std::integer_sequence<int, kRow...>) {
  using V = lanes_of<S>;
  constexpr int64_t kLanes = num_lanes<V>;
  V left[sizeof...(kRow)] = {}, right[sizeof...(kRow)] = {};
  for (int64_t t = 0; t < terms; ++t) {
    const V b_left = load(b + t * 2 * kLanes), b_right = load(b + t * 2 * kLanes + kLanes);
    const auto row = [&](V& l, V& r, S x) FASTMP_LAMBDA {
      l += x * b_left;
      r += x * b_right;
    };
    (row(left[kRow], right[kRow], kRowsApart ? a[kRow * a_pitch + t] : a[t * kStripRows + kRow]), ...);
  }
  const auto add = [&](S* sum, V l, V r) FASTMP_LAMBDA {
    store(sum, first ? l : load(sum) + l);
    store(sum + kLanes, first ? r : load(sum + kLanes) + r);
  };
  (add(sums + kRow * pitch, left[kRow], right[kRow]), ...);
}

// One row of the epilogue: `sums`, and for kSwiglu `up`, hold job.cols columns.
template <class T, class Out, Epilogue epilogue>
FASTMP_INLINE void finish_row(const ProductJob& job, int64_t row, const scalar_of<T>* sums, const scalar_of<T>* up) {
  using V = lanes_of<T>;
  Out* out = static_cast<Out*>(job.out) + row * job.out_pitch;
  T* kept = job.kept ? static_cast<T*>(job.kept) + row * job.kept_pitch : nullptr;
  const T* bias = static_cast<const T*>(job.bias);
  for_vectors<num_lanes<V>>(job.cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
    V v = load(sums + col, count, 0);
    if constexpr (epilogue == Epilogue::kAdd) v += load(out + col, count, 0);
    if constexpr (epilogue == Epilogue::kSwiglu || epilogue == Epilogue::kGelu) {
      if (bias) v += load(bias + col, count, 0);
      if (kept) store(kept + col, v, count);
      if constexpr (epilogue == Epilogue::kSwiglu) {
        V u = load(up + col, count, 0);
        if (bias) u += load(bias + job.up_offset + col, count, 0);
        if (kept) store(kept + job.up_offset + col, u, count);
        v = activation<Form::kSilu>(v) * u;
      } else {
        v = activation<Form::kGeluTanh>(v);
      }
    }
    store(out + col, v, count);
  });
}

// The epilogue of `rows` rows from `first` on, whose sums are `pitch` apart; those of up lie `up_offset` further.
template <class T>
void finish(const ProductJob& job, int64_t first, int64_t rows, const scalar_of<T>* sums, int64_t pitch,
            int64_t up_offset) {
  const auto all = [&](auto out, auto epilogue) {
    using Out = typename decltype(out)::type;
    for (int64_t i = 0; i < rows; ++i) {
      finish_row<T, Out, epilogue.value>(job, first + i, sums + i * pitch, sums + i * pitch + up_offset);
    }
  };
  using Wide = TypeTag<scalar_of<T>>;
  using Same = TypeTag<T>;
  switch (job.epilogue) {
    case Epilogue::kStore: return all(Same{}, std::integral_constant<Epilogue, Epilogue::kStore>{});
    case Epilogue::kSwiglu: return all(Same{}, std::integral_constant<Epilogue, Epilogue::kSwiglu>{});
    case Epilogue::kGelu: return all(Same{}, std::integral_constant<Epilogue, Epilogue::kGelu>{});
    case Epilogue::kAdd: {
      constexpr std::integral_constant<Epilogue, Epilogue::kAdd> add{};
      return job.out_dtype == job.dtype ? all(Same{}, add) : all(Wide{}, add);
    }
  }
}

template <class T>
void multiply_job(const ProductJob& job, Scratch& scratch) {
  using S = scalar_of<T>;
  constexpr std::make_integer_sequence<int, kStripRows> rows_of_strip{};
  constexpr int64_t kCols = kPanel<S>;
  const bool pair = job.epilogue == Epilogue::kSwiglu;
  const int64_t width = round_up(job.cols, kCols), pitch = pair ? 2 * width : width, terms = job.terms;
  const int64_t strip_size = kStripRows * terms;
  S* columns = static_cast<S*>(scratch.get((pitch * (terms + kStripRows) + kStrips * strip_size) * sizeof(S)));
  S* strips = columns + pitch * terms;
  S* sums = strips + kStrips * strip_size;
  pack_columns<T, S>(static_cast<const T*>(job.b.data), job.b, job.cols, terms, columns);
  if (pair) pack_columns<T, S>(static_cast<const T*>(job.up), job.b, job.cols, terms, columns + width * terms);
  for (int64_t row = 0; row < job.rows; row += kStripRows) {
    const int64_t left = job.rows - row, number = row / kStripRows % kStrips;
    const T* a = static_cast<const T*>(job.a.data) + row * job.a.outer;
    if (number == 0) pack_strips<T, S>(a, job.a, std::min<int64_t>(left, kStrips * kStripRows), terms, strips);
    if (terms == 0) std::fill(sums, sums + kStripRows * pitch, S(0));
    for (int64_t begin = 0; begin < terms; begin += kTermBlock) {
      const int64_t some = std::min(kTermBlock, terms - begin);
      for (int64_t col = 0; col < pitch; col += kCols) {
        const S* b = columns + col * terms + begin * kCols;
        const S* strip = strips + number * strip_size + begin * (job.a.term == 1 ? 1 : kStripRows);
        if (job.a.term == 1) {
          multiply<S, true>(strip, terms, b, some, sums + col, pitch, begin == 0, rows_of_strip);
        } else {
          multiply<S, false>(strip, 0, b, some, sums + col, pitch, begin == 0, rows_of_strip);
        }
      }
    }
    finish<T>(job, row, std::min<int64_t>(kStripRows, left), sums, pitch, width);
  }
}

#ifdef FASTMP_AMX

constexpr int64_t kTile = 16, kPairs = 16, kTileTerms = 32, kTileBytes = 1024, kTileRows = 32;

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Whether this process may use the matrix unit: asks the system once.
bool has_amx() {
  static const bool there = [] {
    if (!permitted("amx")) return false;
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

// One tile of 16 outer indices and 32 terms: [outer][term] for the left operand, [pair of terms][outer][2] for the
// right one (`pairs_first`). Zeros beyond `outers` and `terms`.
FASTMP_INLINE void pack_tile(const BFloat16* from, const Operand& at, int64_t outers, int64_t terms, bool pairs_first,
                             char* out) {
  __m512i r[16];
  if (at.term == 1) {
    const __mmask32 mask = terms >= kTileTerms ? ~0u : (1u << terms) - 1;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      r[i] = i < outers ? _mm512_maskz_loadu_epi16(mask, from + i * at.outer) : _mm512_setzero_si512();
    }
  } else {
    const __mmask16 mask = outers >= kTile ? 0xffff : static_cast<__mmask16>((1u << outers) - 1);
    const auto wide = [&](int64_t t) FASTMP_LAMBDA {
      if (t >= terms) return _mm512_setzero_si512();
      return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(mask, from + t * at.term));
    };
#pragma GCC unroll 16
    for (int p = 0; p < 16; ++p) {
      r[p] = _mm512_or_si512(wide(2 * p), _mm512_maskz_slli_epi32(0xffff, wide(2 * p + 1), 16));
    }
  }
  if ((at.term == 1) == pairs_first) transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + 64 * i, r[i]);
}

// 32 outer indices as [32 terms][2 tiles].
void pack_tiles(const BFloat16* from, const Operand& at, int64_t outers, int64_t terms, bool pairs_first, char* out) {
  for (int64_t t = 0; t < terms; t += kTileTerms) {
    for (int64_t i = 0; i < 2 * kTile; i += kTile, out += kTileBytes) {
      const BFloat16* tile = from + i * at.outer + t * at.term;
      pack_tile(tile, at, std::max<int64_t>(0, outers - i), terms - t, pairs_first, out);
    }
  }
}

// sums (32, 32) over `steps` times 32 terms.
void multiply_tiles(const char* a, const char* b, int64_t steps, float* sums, int64_t pitch, bool first) {
  float *low = sums + kTile * pitch, *corner = low + kTile, *right = sums + kTile;
  const int64_t stride = pitch * 4;
  if (first) {
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
  for (int64_t step = 0; step < steps; ++step, a += 2 * kTileBytes, b += 2 * kTileBytes) {
    FASTMP_TILE_LOAD(4, a, 64);
    FASTMP_TILE_LOAD(6, b, 64);
    FASTMP_TILE_LOAD(5, a + kTileBytes, 64);
    FASTMP_TILE_LOAD(7, b + kTileBytes, 64);
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

void tile_job(const ProductJob& job, Scratch& scratch) {
  constexpr int64_t kCols = 2 * kTile, kSteps = 16;  // so many of a strip and a panel stay in L1
  const bool pair = job.epilogue == Epilogue::kSwiglu;
  const int64_t steps = (job.terms + kTileTerms - 1) / kTileTerms, panel = steps * 2 * kTileBytes;
  const int64_t width = round_up(job.cols, kCols), pitch = pair ? 2 * width : width;
  const int64_t panels = pitch / kCols;
  char* columns = static_cast<char*>(scratch.get((panels + 1) * panel + kTileRows * pitch * 4));
  char* strip = columns + panels * panel;
  float* sums = reinterpret_cast<float*>(strip + panel);
  for (int64_t col = 0; col < pitch; col += kCols) {
    const bool is_up = col >= width;
    const auto* b = static_cast<const BFloat16*>(is_up ? job.up : job.b.data);
    const int64_t first = is_up ? col - width : col;
    pack_tiles(b + first * job.b.outer, job.b, job.cols - first, job.terms, true, columns + col / kCols * panel);
  }
  for (int64_t row = 0; row < job.rows; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, job.rows - row);
    const auto* a = static_cast<const BFloat16*>(job.a.data) + row * job.a.outer;
    pack_tiles(a, job.a, rows, job.terms, false, strip);
    if (steps == 0) std::fill(sums, sums + kTileRows * pitch, 0.0f);
    for (int64_t step = 0; step < steps; step += kSteps) {
      const int64_t offset = step * 2 * kTileBytes, some = std::min(kSteps, steps - step);
      for (int64_t p = 0; p < panels; ++p) {
        multiply_tiles(strip + offset, columns + p * panel + offset, some, sums + p * kCols, pitch, step == 0);
      }
    }
    finish<BFloat16>(job, row, rows, sums, pitch, width);
  }
}

// The tiles' configuration is left as it was: others in this thread may count on theirs.
void configured_tile_job(const ProductJob& job, Scratch& scratch) {
  alignas(64) TileConfig before, ours;
  __asm__ volatile("sttilecfg %0" : "=m"(before));
  __asm__ volatile("ldtilecfg %0" ::"m"(ours));
  tile_job(job, scratch);
  if (before.palette == 0) {
    __asm__ volatile("tilerelease" ::);
  } else {
    __asm__ volatile("ldtilecfg %0" ::"m"(before));
  }
}

#endif  // FASTMP_AMX

void product_job(const ProductJob& job, Scratch& scratch) {
#ifdef FASTMP_AMX
  if (job.dtype == ScalarType::BFloat16 && has_amx()) return configured_tile_job(job, scratch);
#endif
  dispatch_float(job.dtype, "grouped_mm", [&](auto tag) { multiply_job<typename decltype(tag)::type>(job, scratch); });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

using Span = std::pair<int64_t, int64_t>;

// (start, end) of each expert's rows. An end before its start, or beyond all rows, is moved there.
std::vector<Span> spans(const char* op, const Tensor& offsets, int64_t num_rows) {
  FASTMP_CHECK(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Int, op, ": offsets must be int32 (E,)");
  const Tensor ends = torch::stable::contiguous(offsets);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  std::vector<Span> found;
  int64_t start = 0;
  for (int64_t expert = 0; expert < offsets.size(0); ++expert) {
    const int64_t next = std::max(start, std::min<int64_t>(end[expert], num_rows));
    found.emplace_back(start, next);
    start = next;
  }
  return found;
}

// With unit last stride; copied only where it has another.
Tensor along_rows(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 || t.numel() == 0 ? t : torch::stable::contiguous(t);
}

void check_operands(const char* op, const Tensor& a, const Tensor& b, int64_t a_dim, int64_t b_dim) {
  FASTMP_CHECK(a.dim() == a_dim && b.dim() == b_dim, op, ": operands have ", a.dim(), " and ", b.dim(), " dimensions");
  FASTMP_CHECK(a.scalar_type() == b.scalar_type(), op, ": operands are ", dtype_name(a.scalar_type()), " and ",
               dtype_name(b.scalar_type()));
  dispatch_float(a.scalar_type(), op, [](auto) {});
}

void* place(const Tensor& t, int64_t element) {
  return const_cast<char*>(at(t.const_data_ptr(), element, static_cast<int64_t>(t.element_size())));
}

void zero(const Tensor& t, int64_t element, int64_t count) {
  if (count > 0) std::memset(place(t, element), 0, static_cast<size_t>(count) * t.element_size());
}

// Splits whole products into blocks of at most 1024 rows, and so many columns that those of the right operand stay
// in the second-level cache; runs them over all threads.
void run_products(const std::vector<ProductJob>& products, int64_t itemsize, int64_t out_size) {
  constexpr int64_t kRows = 1024, kUnit = 32, kBytes = 1 << 20;
  std::vector<ProductJob> jobs;
  for (const ProductJob& whole : products) {
    const int64_t fit = kBytes / std::max<int64_t>(1, whole.terms * itemsize) / kUnit * kUnit;
    const int64_t cols = std::clamp<int64_t>(fit, 4 * kUnit, 16 * kUnit);
    for (int64_t col = 0; col < whole.cols; col += cols) {
      for (int64_t row = 0; row < whole.rows; row += kRows) {
        ProductJob job = whole;
        const auto move = [](auto& p, int64_t bytes) {
          if (p) p = const_cast<char*>(static_cast<const char*>(p)) + bytes;
        };
        job.rows = std::min(kRows, whole.rows - row);
        job.cols = std::min(cols, whole.cols - col);
        move(job.a.data, row * whole.a.outer * itemsize);
        move(job.b.data, col * whole.b.outer * itemsize);
        move(job.up, col * whole.b.outer * itemsize);
        move(job.bias, col * itemsize);
        move(job.out, (row * whole.out_pitch + col) * out_size);
        move(job.kept, (row * whole.kept_pitch + col) * itemsize);
        jobs.push_back(job);
      }
    }
  }
  parallel_for(0, static_cast<int64_t>(jobs.size()), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t index = begin; index < end; ++index) FASTMP_BEST(product_job)(jobs[index], scratch);
  });
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  check_operands(kOp, x, w, 2, 3);
  const int64_t cols = w.size(transposed ? 2 : 1), terms = w.size(transposed ? 1 : 2);
  FASTMP_CHECK(x.size(1) == terms && offsets.numel() == w.size(0), kOp, ": shapes do not fit");
  Tensor y = fastmp::empty({x.size(0), cols}, x.scalar_type(), x);
  const Tensor left = along_rows(x), right = along_rows(w);
  std::vector<ProductJob> products;
  int64_t done = 0;
  const std::vector<Span> experts = spans(kOp, offsets, x.size(0));
  for (size_t expert = 0; expert < experts.size(); ++expert) {
    const auto [start, end] = experts[expert];
    done = end;
    if (start == end) continue;
    ProductJob job{};
    job.a = {place(left, start * left.stride(0)), left.stride(0), 1};
    job.b = {place(right, static_cast<int64_t>(expert) * right.stride(0)), right.stride(1), 1};
    if (transposed) std::swap(job.b.outer, job.b.term);
    job.rows = end - start, job.cols = cols, job.terms = terms;
    job.out = place(y, start * cols), job.out_pitch = cols;
    job.dtype = job.out_dtype = x.scalar_type(), job.epilogue = Epilogue::kStore;
    products.push_back(job);
  }
  const auto itemsize = static_cast<int64_t>(x.element_size());
  run_products(products, itemsize, itemsize);
  zero(y, done * cols, (x.size(0) - done) * cols);
  return y;
}

void weight_gradient(const char* op, const Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets,
                     Epilogue epilogue) {
  check_operands(op, grad, x, 2, 2);
  FASTMP_CHECK(out.dim() == 3 && grad.size(0) == x.size(0) && out.size(0) == offsets.numel() &&
                   out.size(1) == grad.size(1) && out.size(2) == x.size(1),
               op, ": shapes do not fit");
  if (out.numel() == 0) return;
  const Tensor left = along_rows(grad), right = along_rows(x);
  std::vector<ProductJob> products;
  const std::vector<Span> experts = spans(op, offsets, x.size(0));
  for (size_t expert = 0; expert < experts.size(); ++expert) {
    const auto [start, end] = experts[expert];
    const int64_t first = static_cast<int64_t>(expert) * out.stride(0);
    if (start == end) {
      if (epilogue == Epilogue::kStore) zero(out, first, out.size(1) * out.size(2));
      continue;
    }
    ProductJob job{};
    job.a = {place(left, start * left.stride(0)), 1, left.stride(0)};
    job.b = {place(right, start * right.stride(0)), 1, right.stride(0)};
    job.rows = out.size(1), job.cols = out.size(2), job.terms = end - start;
    job.out = place(out, first), job.out_pitch = out.stride(1);
    job.dtype = x.scalar_type(), job.out_dtype = out.scalar_type(), job.epilogue = epilogue;
    products.push_back(job);
  }
  run_products(products, static_cast<int64_t>(x.element_size()), static_cast<int64_t>(out.element_size()));
}

Tensor grouped_mm_wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  Tensor out = fastmp::empty({offsets.size(0), grad.size(1), x.size(1)}, x.scalar_type(), x);
  weight_gradient("grouped_mm_wgrad", out, grad, x, offsets, Epilogue::kStore);
  return out;
}

void grouped_mm_wgrad_(const Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  const ScalarType wide = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  FASTMP_CHECK(out.scalar_type() == wide || out.scalar_type() == x.scalar_type(), kOp, ": x is ",
               dtype_name(x.scalar_type()), " but the sum is ", dtype_name(out.scalar_type()));
  if (out.numel() == 0) return;
  if (out.stride(2) == 1) return weight_gradient(kOp, out, grad, x, offsets, Epilogue::kAdd);
  const Tensor sums = torch::stable::contiguous(out);  // of a parameter that lies transposed
  weight_gradient(kOp, sums, grad, x, offsets, Epilogue::kAdd);
  Tensor target = out;
  torch::stable::copy_(target, sums);
}

std::tuple<Tensor, Tensor> grouped_mlp_in(const Tensor& x, const Tensor& w, std::optional<Tensor> bias,
                                          const Tensor& offsets, std::string activation, bool keep) {
  constexpr const char* kOp = "grouped_mlp_in";
  check_operands(kOp, x, w, 2, 3);
  const bool gated = activation == "swiglu";
  FASTMP_CHECK(gated || activation == "bias_gelu", kOp, ": activation must be 'swiglu' or 'bias_gelu', got '",
               activation, "'");
  const int64_t columns = w.size(1), cols = gated ? columns / 2 : columns, terms = w.size(2);
  FASTMP_CHECK(x.size(1) == terms && offsets.numel() == w.size(0) && (!gated || columns % 2 == 0), kOp,
               ": shapes do not fit");
  Tensor y = fastmp::empty({x.size(0), cols}, x.scalar_type(), x);
  Tensor h = keep ? fastmp::empty({x.size(0), columns}, x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  const Tensor left = along_rows(x), right = along_rows(w);
  if (bias) bias = torch::stable::contiguous(*bias);
  std::vector<ProductJob> products;
  int64_t done = 0;
  const std::vector<Span> experts = spans(kOp, offsets, x.size(0));
  for (size_t index = 0; index < experts.size(); ++index) {
    const auto [start, end] = experts[index];
    done = end;
    if (start == end) continue;
    const auto expert = static_cast<int64_t>(index);
    ProductJob job{};
    job.a = {place(left, start * left.stride(0)), left.stride(0), 1};
    job.b = {place(right, expert * right.stride(0)), right.stride(1), 1};
    if (gated) job.up = place(right, expert * right.stride(0) + cols * right.stride(1));
    if (bias) job.bias = place(*bias, expert * columns);
    if (keep) job.kept = place(h, start * columns);
    job.rows = end - start, job.cols = cols, job.terms = terms;
    job.out = place(y, start * cols), job.out_pitch = cols, job.kept_pitch = columns, job.up_offset = cols;
    job.dtype = job.out_dtype = x.scalar_type(), job.epilogue = gated ? Epilogue::kSwiglu : Epilogue::kGelu;
    products.push_back(job);
  }
  const auto itemsize = static_cast<int64_t>(x.element_size());
  run_products(products, itemsize, itemsize);
  zero(y, done * cols, (x.size(0) - done) * cols);
  if (keep) zero(h, done * columns, (x.size(0) - done) * columns);
  return {y, h};
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  m.impl("grouped_mm", TORCH_BOX(&fastmp::grouped_mm));
  m.impl("grouped_mm_wgrad", TORCH_BOX(&fastmp::grouped_mm_wgrad));
  m.impl("grouped_mm_wgrad_", TORCH_BOX(&fastmp::grouped_mm_wgrad_));
  m.impl("grouped_mlp_in", TORCH_BOX(&fastmp::grouped_mlp_in));
}

#endif  // FASTMP_ISA_BASE
