// quantize_rows, dequantize_rows and quantize_weight on the CPU.
//
// Threads share rows, or the square blocks of a weight: all are independent.
// Reference: fastmp/ops/quantize.py.
#include "fp8.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace fastmp {

// Square blocks [begin, end) of `num_rows` rows in all, of matrices of `rows` rows.
struct QuantizedWeight {
  const void* x;
  uint8_t *q, *q_t;
  void* s;
  int64_t rows, num_cols, block, x_pitch, begin, end;
  ScalarType dtype;
};

FASTMP_DECLARE(void dequantize_rows(const QuantizedRows&); void quantize_blocks(const QuantizedWeight&);
               void cast_rows(const QuantizedRows&);)

namespace FASTMP_ISA {

void quantize_rows(const QuantizedRows& rows) {
  dispatch_float(rows.dtype, "quantize_rows", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_fp8(rows.form, "quantize_rows", [&](auto form) {
      using Format = typename decltype(form)::type;
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        const T* x = static_cast<const T*>(rows.x) + row * rows.x_pitch;
        const QuantizedRows one = rows.part(row, 1, x);
        quantize_row<Format>(x, rows.num_cols, rows.block, one.q, one.s, rows.s_col);
      }
    });
  });
}

template <class Scale, class Format, class T>
void dequantize_all(const QuantizedRows& rows) {
  const auto* scales = static_cast<const Scale*>(rows.s);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const uint8_t* q = rows.q + row * rows.q_pitch;
    T* out = static_cast<T*>(rows.x) + row * rows.x_pitch;
    for (int64_t first = 0, i = 0; first < rows.num_cols; first += rows.block, ++i) {
      const float scale = scale_of(scales[row * rows.s_row + i * rows.s_col]);
      dequantize<Format>(q + first, rows.block, scale, out + first);
    }
  }
}

void dequantize_rows(const QuantizedRows& rows) {
  dispatch_float(rows.dtype, "dequantize_rows", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_fp8(rows.form, "dequantize_rows", [&](auto form) {
      using Format = typename decltype(form)::type;
      rows.block == 128 ? dequantize_all<float, Format, T>(rows) : dequantize_all<uint8_t, Format, T>(rows);
    });
  });
}

void cast_rows(const QuantizedRows& rows) {
  dispatch_fp8(rows.form, "cast", [&](auto form) {
    using Format = typename decltype(form)::type;
    const auto* x = static_cast<const float*>(rows.x);
    for (int64_t i = 0; i < rows.num_rows * rows.num_cols; i += kFloats) {
      store_bytes(rows.q + i, fp8_bytes<Format>(load(x + i)));
    }
  });
}

// Transposes 16 x 16 bytes: four rounds that interleave row i with row i + 8.
typedef uint8_t line __attribute__((vector_size(16)));
FASTMP_INLINE void transpose_16(const uint8_t* from, int64_t from_pitch, uint8_t* to, int64_t to_pitch) {
  line a[16], b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], from + i * from_pitch, sizeof(line));
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = __builtin_shuffle(a[i], a[i + 8], line{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      b[2 * i + 1] =
          __builtin_shuffle(a[i], a[i + 8], line{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    std::copy_n(b, 16, a);
  }
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_pitch, &a[i], sizeof(line));
}

void quantize_blocks(const QuantizedWeight& w) {
  dispatch_float(w.dtype, "quantize_weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t across = w.num_cols / w.block, down = w.rows / w.block;
    for (int64_t at = w.begin; at < w.end; ++at) {
      const int64_t matrix = at / (down * across), i = at / across % down, j = at % across;
      const int64_t row = matrix * w.rows + i * w.block, col = j * w.block;
      const T* x = static_cast<const T*>(w.x) + row * w.x_pitch + col;
      uint8_t* q = w.q + row * w.num_cols + col;
      uint8_t* q_t = w.q_t + (matrix * w.num_cols + col) * w.rows + i * w.block;
      // 1. The largest magnitude of the block, and its scale.
      words top{};
      for (int64_t r = 0; r < w.block; ++r) top = magnitudes(x + r * w.x_pitch, w.block, top);
      const BlockScale<E4m3> scale(largest(top), w.block);
      scale.write(w.s, at, w.block);
      // 2. Quantise the rows, then transpose their bytes.
      for (int64_t r = 0; r < w.block; ++r) scale.quantize(x + r * w.x_pitch, w.block, q + r * w.num_cols);
      for (int64_t r = 0; r < w.block; r += 16) {
        for (int64_t c = 0; c < w.block; c += 16)
          transpose_16(q + r * w.num_cols + c, w.num_cols, q_t + c * w.rows + r, w.rows);
      }
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int64_t kGrain = 16384;  // elements

// Calls kernel(rows) on ranges of rows, over all threads.
template <class Kernel>
void for_rows(const Kernel& kernel, const QuantizedRows& all, int64_t x_size) {
  parallel_for(0, all.num_rows, std::max<int64_t>(1, kGrain / all.num_cols), [&](int64_t begin, int64_t end) {
    kernel(all.part(begin, end - begin, at(all.x, begin * all.x_pitch, x_size)));
  });
}

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, int64_t block, ScalarType dtype) {
  constexpr const char* kOp = "quantize_rows";
  const int64_t num_rows = num_rows_of(kOp, "x", x), num_cols = x.size(x.dim() - 1);
  dispatch_float(x.scalar_type(), kOp, [](auto) {});
  dispatch_fp8(dtype, kOp, [](auto) {});
  Tensor s = empty_row_scales(kOp, num_rows, num_cols, block, x);
  Tensor q = fastmp::empty(x.sizes(), dtype, x);
  if (x.numel() == 0) return {q, s};
  const Rows given(x);
  QuantizedRows rows = rows_into(q, s, block, x.scalar_type());
  rows.x = const_cast<void*>(given.tensor.const_data_ptr()), rows.x_pitch = given.pitch;
  for_rows(FASTMP_BEST(quantize_rows), rows, static_cast<int64_t>(x.element_size()));
  return {q, s};
}

Tensor dequantize_rows(const Tensor& q, const Tensor& s, ScalarType dtype) {
  constexpr const char* kOp = "dequantize_rows";
  const int64_t num_rows = num_rows_of(kOp, "q", q), num_cols = q.size(q.dim() - 1);
  dispatch_float(dtype, kOp, [](auto) {});
  dispatch_fp8(q.scalar_type(), kOp, [](auto) {});
  const int64_t block = block_of(kOp, s);
  FASTMP_CHECK(s.dim() == 2 && s.size(0) == num_rows && s.size(1) * block == num_cols, kOp, ": q is ", described(q),
               ", which does not fit its scales");
  Tensor x = fastmp::empty(q.sizes(), dtype, q);
  if (q.numel() == 0) return x;
  const Rows given(q);
  QuantizedRows rows{};
  rows.x = x.mutable_data_ptr();
  rows.q = static_cast<uint8_t*>(const_cast<void*>(given.tensor.const_data_ptr()));
  rows.s = const_cast<void*>(s.const_data_ptr());
  rows.num_rows = num_rows, rows.num_cols = num_cols, rows.block = block;
  rows.x_pitch = num_cols, rows.q_pitch = given.pitch, rows.s_row = s.stride(0), rows.s_col = s.stride(1);
  rows.dtype = dtype, rows.form = q.scalar_type();
  for_rows(FASTMP_BEST(dequantize_rows), rows, static_cast<int64_t>(x.element_size()));
  return x;
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w, int64_t block) {
  constexpr const char* kOp = "quantize_weight";
  const int64_t dims = w.dim();
  FASTMP_CHECK(dims == 2 || dims == 3, kOp, ": w must be (N, K) or (L, N, K), got ", described(w));
  dispatch_float(w.scalar_type(), kOp, [](auto) {});
  check_block(kOp, block);
  const int64_t rows = w.size(dims - 2), num_cols = w.size(dims - 1);
  FASTMP_CHECK(rows % block == 0 && num_cols % block == 0, kOp, ": N and K must be multiples of block (", block,
               "), got ", described(w));
  std::vector<int64_t> sizes(w.sizes().begin(), w.sizes().end());
  Tensor q = fastmp::empty(sizes, ScalarType::Float8_e4m3fn, w);
  sizes[dims - 2] = num_cols, sizes[dims - 1] = rows;
  Tensor q_t = fastmp::empty(sizes, ScalarType::Float8_e4m3fn, w);
  sizes[dims - 2] = rows / block, sizes[dims - 1] = num_cols / block;
  Tensor s = empty_scales(sizes, block, w);
  if (w.numel() == 0) return {q, q_t, s};
  const Rows given(w);
  QuantizedWeight all{};
  all.x = given.tensor.const_data_ptr();
  all.q = static_cast<uint8_t*>(q.mutable_data_ptr()), all.q_t = static_cast<uint8_t*>(q_t.mutable_data_ptr());
  all.s = s.mutable_data_ptr();
  all.rows = rows, all.num_cols = num_cols, all.block = block, all.x_pitch = given.pitch;
  all.dtype = w.scalar_type();
  parallel_for(0, s.numel(), std::max<int64_t>(1, kGrain / (block * block)), [&](int64_t begin, int64_t end) {
    QuantizedWeight part = all;
    part.begin = begin, part.end = end;
    FASTMP_BEST(quantize_blocks)(part);
  });
  return {q, q_t, s};
}

// The cast alone, which tests compare with torch's on every float32 number; x has a multiple of 64 elements.
Tensor cast(const Tensor& x, ScalarType dtype) {
  FASTMP_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous() && x.numel() % 64 == 0,
               "cast: x must be contiguous float32 of a multiple of 64 elements, got ", described(x));
  Tensor q = fastmp::empty(x.sizes(), dtype, x);
  QuantizedRows rows{};
  rows.x = const_cast<void*>(x.const_data_ptr()), rows.q = static_cast<uint8_t*>(q.mutable_data_ptr());
  rows.num_rows = x.numel() / 64, rows.num_cols = 64, rows.form = dtype;
  FASTMP_BEST(cast_rows)(rows);
  return q;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY(fastmp_fp8, m) { m.def("cast(Tensor x, ScalarType dtype) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(fastmp_fp8, CPU, m) { FASTMP_IMPL(m, "cast", fastmp::cast); }

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "quantize_rows", fastmp::quantize_rows);
  FASTMP_IMPL(m, "dequantize_rows", fastmp::dequantize_rows);
  FASTMP_IMPL(m, "quantize_weight", fastmp::quantize_weight);
}

#endif  // FASTMP_ISA_BASE
