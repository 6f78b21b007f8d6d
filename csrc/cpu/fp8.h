// FP8 numbers: the cast and its inverse on vectors, and power-of-two scales of blocks.
//
// Everything is integer code on the bits of float32, equal to torch's clamped cast byte for byte.
// Reference: fastmp/ops/core/fp8.py.
#pragma once

#include "simd.h"
#include "stable.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace fastmp {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint8_t kFp8Nan = 0x7f;  // of both formats

// A format: stored significand bits, exponent bias, exponent of the largest number, its float32 bits (1.75 times a
// power of two), and the first magnitude that is no number.
struct E4m3 {
  static constexpr int kSignificand = 3, kBias = 7, kTop = 8;
  static constexpr uint32_t kLargest = 0x43e00000u, kSpecial = 0x7f;
};
struct E5m2 {
  static constexpr int kSignificand = 2, kBias = 15, kTop = 15;
  static constexpr uint32_t kLargest = 0x47600000u, kSpecial = 0x7c;
};

// Calls body(TypeTag<Format>{}) with the format of a dtype.
template <class Body>
auto dispatch_fp8(ScalarType dtype, const char* op, const Body& body) {
  if (dtype == ScalarType::Float8_e4m3fn) return body(TypeTag<E4m3>{});
  FASTMP_CHECK(dtype == ScalarType::Float8_e5m2, op, ": dtype must be float8_e4m3fn or float8_e5m2, got ",
               dtype_name(dtype));
  return body(TypeTag<E5m2>{});
}

inline void check_block(const char* op, int64_t block) {
  FASTMP_CHECK(block == 128 || block == 32, op, ": block must be 128 or 32, got ", block);
}

// Returns the block that scales of this dtype belong to: 128 for float32, 32 for float8_e8m0fnu, which `scalar_type`
// of torch 2.10's stable ABI does not know.
inline int64_t block_of(const char* op, const Tensor& s) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(s.get(), &dtype));
  const bool narrow = dtype == static_cast<int32_t>(ScalarType::Float8_e8m0fnu);
  FASTMP_CHECK(narrow || dtype == static_cast<int32_t>(ScalarType::Float), op,
               ": scales must be float32 (block 128) or float8_e8m0fnu (block 32)");
  return narrow ? 32 : 128;
}

// Returns an uninitialised contiguous tensor for the scales of blocks of 128 (float32) or 32 (float8_e8m0fnu).
inline Tensor empty_scales(IntHeaderOnlyArrayRef sizes, int64_t block, const Tensor& like) {
  if (block == 128) return fastmp::empty(sizes, ScalarType::Float, like);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  static_cast<int32_t>(ScalarType::Float8_e8m0fnu), device,
                                                  like.get_device_index(), &handle));
  Tensor out(handle);
  if (out.numel() && outputs_by_dispatcher.load(std::memory_order_relaxed)) {
    std::memset(out.mutable_data_ptr(), 0xff, static_cast<size_t>(out.numel()));
  }
  return out;
}

// Returns 2^e in float32, for e from -149 to 127.
inline float power_of_two(int e) {
  const uint32_t bits = e < -126 ? 1u << (e + 149) : static_cast<uint32_t>(e + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the scale of a float8_e8m0fnu byte.
inline float scale_of(uint8_t byte) { return byte == 255 ? NAN : power_of_two(byte - 127); }
inline float scale_of(float scale) { return scale; }

// Returns the exponent of the scale of a block whose largest magnitude has the bits `amax`, which is finite.
inline int scale_exponent(uint32_t amax, int top, int least) {
  if (amax == 0) return 0;
  int e = -127 - top;
  if (amax < 1u << 23) {  // subnormal: an integer times 2^-149
    const auto integer = static_cast<float>(amax);
    std::memcpy(&amax, &integer, sizeof amax);
    e -= 149;
  }
  return std::max(e + static_cast<int>((amax + 0x1fffffu) >> 23), least);  // above 1.75 it carries
}

// Returns the number of rows of a tensor (..., K).
inline int64_t num_rows_of(const char* op, const char* name, const Tensor& tensor) {
  FASTMP_CHECK(tensor.dim() > 0, op, ": ", name, " must have at least one dimension");
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return rows;
}

// Returns uninitialised scales (num_rows, num_cols / block), M-major: columns are a multiple of 16 bytes apart.
inline Tensor empty_row_scales(const char* op, int64_t num_rows, int64_t num_cols, int64_t block, const Tensor& like) {
  check_block(op, block);
  FASTMP_CHECK(num_cols % block == 0, op, ": K must be a multiple of block (", block, "), got ", num_cols);
  const int64_t vector = block == 128 ? 4 : 16;
  const int64_t pitch = (std::max<int64_t>(num_rows, 1) + vector - 1) / vector * vector;
  const int64_t sizes[] = {num_cols / block, pitch};
  Tensor columns = empty_scales({sizes, 2}, block, like);
  Tensor used = torch::stable::narrow(columns, 1, 0, num_rows);
  return torch::stable::transpose(used, 0, 1);
}

// Rows [0, num_rows); pitches are in elements. `x` are the wide numbers, read or written.
struct QuantizedRows {
  void* x;
  uint8_t* q;
  void* s;
  int64_t num_rows, num_cols, block, x_pitch, q_pitch, s_row, s_col;
  ScalarType dtype, form;

  // Returns rows [row, row + count), whose wide numbers are at `wide`.
  QuantizedRows part(int64_t row, int64_t count, const void* wide) const {
    QuantizedRows rows = *this;
    rows.x = const_cast<void*>(wide), rows.num_rows = count;
    rows.q += row * q_pitch;
    rows.s = static_cast<char*>(s) + row * s_row * (block == 128 ? sizeof(float) : sizeof(uint8_t));
    return rows;
  }
};

// Returns the rows of q and of s (see `empty_row_scales`), to quantise numbers of `dtype` without gaps into.
inline QuantizedRows rows_into(const Tensor& q, const Tensor& s, int64_t block, ScalarType dtype) {
  QuantizedRows rows{};
  rows.q = static_cast<uint8_t*>(q.mutable_data_ptr()), rows.s = s.mutable_data_ptr();
  rows.num_rows = s.size(0), rows.num_cols = rows.x_pitch = rows.q_pitch = s.size(1) * block, rows.block = block;
  rows.s_row = 1, rows.s_col = s.stride(1), rows.dtype = dtype, rows.form = q.scalar_type();
  return rows;
}

FASTMP_DECLARE(void quantize_rows(const QuantizedRows&);)  // of quantize.cpp

// Returns activation(gate) * up in FP8 and its scales; the op of gated.cpp.
std::tuple<Tensor, Tensor> gated_activation_quantized(const Tensor& x, std::optional<Tensor> bias,
                                                      std::string activation, std::optional<Tensor> up, int64_t block,
                                                      ScalarType dtype);

}  // namespace fastmp

namespace fastmp::FASTMP_ISA {

typedef uint8_t bytes __attribute__((vector_size(kVectorBytes / 4)));

FASTMP_INLINE words constant(uint32_t bits) { return words{} + bits; }

// Casts to FP8 bytes: to nearest even, clamped to the largest number; NaN keeps its sign.
template <class Format>
FASTMP_INLINE words fp8_bytes(floats v) {
  constexpr int kShift = 23 - Format::kSignificand;
  constexpr uint32_t kAdded = static_cast<uint32_t>(127 + 24 - Format::kBias - Format::kSignificand) << 23;
  const words bits = bits_of(v), magnitude = bits & 0x7fffffffu;
  const words a = select(magnitude > Format::kLargest, constant(Format::kLargest), magnitude);
  const words half = ((a >> kShift) & 1u) + ((1u << (kShift - 1)) - 1);
  const words normal = ((a + half) >> kShift) - (static_cast<uint32_t>(127 - Format::kBias) << Format::kSignificand);
  const words subnormal = bits_of(floats_of(a) + floats_of(constant(kAdded))) - kAdded;  // the addition rounds
  const words number = select(a < static_cast<uint32_t>(128 - Format::kBias) << 23, subnormal, normal);
  return select(magnitude > kInfinityBits, constant(kFp8Nan), number) | ((bits >> 24) & 0x80u);
}

FASTMP_INLINE void store_bytes(uint8_t* p, words v) {
  const bytes out = __builtin_convertvector(v, bytes);
  std::memcpy(p, &out, sizeof out);
}

// Loads a vector of FP8 numbers.
template <class Format>
FASTMP_INLINE floats load_fp8(const uint8_t* p) {
  bytes packed;
  std::memcpy(&packed, p, sizeof packed);
  const words b = __builtin_convertvector(packed, words);
  const words magnitude = (b & 0x7fu) << (23 - Format::kSignificand);
  const floats finite = floats_of(magnitude) * power_of_two(127 - Format::kBias);  // moves the exponent's bias
  const words special = magnitude | kInfinityBits;
  return floats_of(select((b & 0x7fu) >= Format::kSpecial, special, bits_of(finite)) | ((b & 0x80u) << 24));
}

// Loads a vector of any element type as float32; float64 is rounded.
template <class T>
FASTMP_INLINE floats load_float(const T* p) {
  if constexpr (std::is_same_v<T, double>) {
    floats v;
    for (int i = 0; i < kFloats; ++i) v[i] = static_cast<float>(p[i]);
    return v;
  } else {
    return load(p);
  }
}

// Joins the largest magnitudes, as bits, of `count` elements, a multiple of kFloats, to `top`.
template <class T>
FASTMP_INLINE words magnitudes(const T* x, int64_t count, words top) {
  for (int64_t i = 0; i < count; i += kFloats) {
    const words magnitude = bits_of(load_float(x + i)) & 0x7fffffffu;
    top = select(magnitude > top, magnitude, top);
  }
  return top;
}

FASTMP_INLINE uint32_t largest(words v) {
  uint32_t top = v[0];
  for (int i = 1; i < kFloats; ++i) top = std::max<uint32_t>(top, v[i]);
  return top;
}

// The scale of a block, and the two factors whose product is 1 / scale: neither they nor products with them overflow.
template <class Format>
struct BlockScale {
  bool finite;
  int exponent;
  float first, second;

  BlockScale(uint32_t amax, int64_t block) : finite(amax < kInfinityBits) {
    exponent = finite ? scale_exponent(amax, Format::kTop, block == 128 ? -149 : -127) : 0;
    const int half = -exponent >> 1;
    first = power_of_two(half), second = power_of_two(-exponent - half);
  }

  // Writes element `at` of float32 (block 128) or float8_e8m0fnu scales.
  void write(void* scales, int64_t at, int64_t block) const {
    if (block == 128) {
      static_cast<float*>(scales)[at] = finite ? power_of_two(exponent) : NAN;
    } else {
      static_cast<uint8_t*>(scales)[at] = finite ? static_cast<uint8_t>(exponent + 127) : uint8_t{255};
    }
  }

  // Quantises `count` elements, a multiple of kFloats.
  template <class T>
  FASTMP_INLINE void quantize(const T* x, int64_t count, uint8_t* q) const {
    if (!finite) {
      std::fill_n(q, count, kFp8Nan);
      return;
    }
    for (int64_t i = 0; i < count; i += kFloats)
      store_bytes(q + i, fp8_bytes<Format>(load_float(x + i) * first * second));
  }
};

// Quantises a row of whole blocks; scale i is element i * s_pitch of `scales`.
template <class Format, class T>
void quantize_row(const T* x, int64_t num_cols, int64_t block, uint8_t* q, void* scales, int64_t s_pitch) {
  for (int64_t first = 0, i = 0; first < num_cols; first += block, ++i) {
    const BlockScale<Format> scale(largest(magnitudes(x + first, block, words{})), block);
    scale.write(scales, i * s_pitch, block);
    scale.quantize(x + first, block, q + first);
  }
}

// Multiplies `count` FP8 numbers, a multiple of kFloats, by their scale, rounded once to T.
template <class Format, class T>
FASTMP_INLINE void dequantize(const uint8_t* q, int64_t count, float scale, T* out) {
  for (int64_t i = 0; i < count; i += kFloats) {
    const floats value = load_fp8<Format>(q + i);
    if constexpr (std::is_same_v<T, double>) {
      for (int lane = 0; lane < kFloats; ++lane) out[i + lane] = static_cast<double>(value[lane]) * scale;
    } else {
      store(out + i, value * scale);
    }
  }
}

}  // namespace fastmp::FASTMP_ISA
