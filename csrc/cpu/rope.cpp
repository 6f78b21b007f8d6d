// rope on the CPU: rotates pairs of elements of every row by the angle of the row's token.
//
// Threads share the rows; a thread processes runs of rows that are evenly spaced in memory, for any leading dimensions.
// Rows are independent, so results do not depend on the number of threads. 16-bit types are computed in fp32 and
// rounded once. Reference: fastmp/ops/rope.py.
#include "op.h"
#include "rope.h"
#include "simd.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace fastmp {

namespace FASTMP_ISA {

// Rotates pairs (a, b) to (a c - b s, b c + a s).
template <class V>
FASTMP_INLINE Pair<V> turn(Pair<V> v, V c, V s) {
  return {v.first * c - v.second * s, v.second * c + v.first * s};
}

// Rotates one row: whole vectors of pairs, then the remaining pairs.
template <class T, bool kInterleaved, bool kInverse>
FASTMP_INLINE void rope_row(const T* x, T* y, const scalar_of<T>* cos, const scalar_of<T>* sin, int64_t half) {
  using V = lanes_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  int64_t i = 0;
  for (; i + kStep <= half; i += kStep) {
    const V c = load(cos + i), s = kInverse ? -load(sin + i) : load(sin + i);
    if constexpr (kInterleaved) {
      store_neighbours(y + 2 * i, turn(load_neighbours(x + 2 * i), c, s));
    } else {
      const Pair<V> turned = turn(Pair<V>{load(x + i), load(x + half + i)}, c, s);
      store(y + i, turned.first);
      store(y + half + i, turned.second);
    }
  }
  if (const int64_t rest = half - i; rest > 0) {
    const V c = load(cos + i, rest, 0), s = kInverse ? -load(sin + i, rest, 0) : load(sin + i, rest, 0);
    if constexpr (kInterleaved) {
      T buffer[2 * kStep] = {};
      std::memcpy(buffer, x + 2 * i, 2 * rest * sizeof(T));
      store_neighbours(buffer, turn(load_neighbours(buffer), c, s));
      std::memcpy(y + 2 * i, buffer, 2 * rest * sizeof(T));
    } else {
      const Pair<V> turned = turn(Pair<V>{load(x + i, rest, 0), load(x + half + i, rest, 0)}, c, s);
      store(y + i, turned.first, rest);
      store(y + half + i, turned.second, rest);
    }
  }
}

void rope_run(const RopeRun& run) {
  const auto rows = [&](auto tag, auto interleaved, auto inverse) {
    using T = typename decltype(tag)::type;
    const T* x = static_cast<const T*>(run.x);
    T* y = static_cast<T*>(run.y);
    auto *cos = static_cast<const scalar_of<T>*>(run.cos), *sin = static_cast<const scalar_of<T>*>(run.sin);
    const int64_t rest = run.num_cols - 2 * run.half;
    for (int64_t row = 0; row < run.num_rows; ++row) {
      rope_row<T, interleaved, inverse>(x, y, cos, sin, run.half);
      if (rest > 0) std::memcpy(y + 2 * run.half, x + 2 * run.half, rest * sizeof(T));
      x += run.x_pitch, y += run.y_pitch, cos += run.turn_pitch, sin += run.turn_pitch;
    }
  };
  dispatch_float(run.dtype, "rope", [&](auto tag) {
    using yes = std::true_type;
    using no = std::false_type;
    if (run.interleaved) {
      run.inverse ? rows(tag, yes{}, yes{}) : rows(tag, yes{}, no{});
    } else {
      run.inverse ? rows(tag, no{}, yes{}) : rows(tag, no{}, no{});
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

struct Form {
  bool interleaved, inverse;
};

// A leading dimension of x, or several that fold into one: its strides in x, in y, and in cos and sin.
struct Level {
  int64_t size, x_stride, y_stride, turn_stride;
};

std::vector<Level> levels(const Tensor& x, const Tensor& y, const Tensor& cos) {
  std::vector<Level> found;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    if (x.size(dim) == 1) continue;
    const bool turns = dim + 1 < cos.dim() && cos.size(dim) > 1;
    Level level{x.size(dim), x.stride(dim), y.stride(dim), turns ? cos.stride(dim) : 0};
    if (!found.empty()) {
      const Level& outer = found.back();
      if (outer.x_stride == level.size * level.x_stride && outer.y_stride == level.size * level.y_stride &&
          outer.turn_stride == level.size * level.turn_stride) {
        level.size *= outer.size;
        found.pop_back();
      }
    }
    found.push_back(level);
  }
  if (found.empty()) found.push_back({1, 0, 0, 0});
  return found;
}

void check_arguments(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  dispatch_float(x.scalar_type(), "rope", [](auto) {});
  const ScalarType compute = compute_dtype(x.scalar_type());
  FASTMP_CHECK(cos.scalar_type() == compute && sin.scalar_type() == compute, "rope: cos and sin must be ",
               dtype_name(compute), ", got ", dtype_name(cos.scalar_type()), " and ", dtype_name(sin.scalar_type()));
  FASTMP_CHECK(cos.dim() > 0 && cos.dim() <= x.dim() && 2 * cos.size(cos.dim() - 1) <= x.size(x.dim() - 1),
               "rope: cos with ", cos.dim(), " dimensions and ", cos.numel(), " elements does not fit x with ", x.dim(),
               " dimensions and ", x.numel(), " elements");
  FASTMP_CHECK(sin.dim() == cos.dim(), "rope: cos has ", cos.dim(), " dimensions but sin ", sin.dim());
  for (int64_t dim = 0; dim < cos.dim(); ++dim) {
    FASTMP_CHECK(cos.size(dim) == sin.size(dim), "rope: cos and sin have ", cos.size(dim), " and ", sin.size(dim),
                 " elements in dimension ", dim);
    FASTMP_CHECK(dim + 1 == cos.dim() || cos.size(dim) == 1 || cos.size(dim) == x.size(dim), "rope: cos has ",
                 cos.size(dim), " elements in dimension ", dim, ", but x has ", x.size(dim));
  }
}

char* at(const void* base, int64_t element, size_t itemsize) {
  return static_cast<char*>(const_cast<void*>(base)) + element * static_cast<int64_t>(itemsize);
}

// Writes x rotated to y; both have unit stride in the last dimension and may be the same tensor.
void rotate(const Tensor& x, const Tensor& y, const Tensor& cos, const Tensor& sin, Form form) {
  const std::vector<Level> found = levels(x, y, cos);
  const Level inner = found.back();
  const size_t itemsize = x.element_size(), turn_itemsize = cos.element_size();
  const void* const x_data = x.const_data_ptr();
  void* const y_data = y.mutable_data_ptr();
  const bool in_place = x_data == y_data;
  const auto walk = [&](int64_t row, int64_t end) {
    while (row < end) {
      int64_t outer = row / inner.size, x_at = 0, y_at = 0, turn_at = 0;
      const int64_t first = row % inner.size;
      for (size_t i = found.size() - 1; i-- > 0;) {
        const Level& level = found[i];
        const int64_t index = outer % level.size;
        outer /= level.size;
        x_at += index * level.x_stride, y_at += index * level.y_stride, turn_at += index * level.turn_stride;
      }
      x_at += first * inner.x_stride, y_at += first * inner.y_stride, turn_at += first * inner.turn_stride;
      RopeRun run{};
      run.x = at(x_data, x_at, itemsize);
      run.y = at(y_data, y_at, itemsize);
      run.cos = at(cos.const_data_ptr(), turn_at, turn_itemsize);
      run.sin = at(sin.const_data_ptr(), turn_at, turn_itemsize);
      run.num_rows = std::min(inner.size - first, end - row);
      run.half = cos.size(cos.dim() - 1);
      run.num_cols = in_place ? 2 * run.half : x.size(x.dim() - 1);
      run.x_pitch = inner.x_stride, run.y_pitch = inner.y_stride, run.turn_pitch = inner.turn_stride;
      run.dtype = x.scalar_type();
      run.interleaved = form.interleaved, run.inverse = form.inverse;
      FASTMP_BEST(rope_run)(run);
      row += run.num_rows;
    }
  };
  const int64_t num_cols = x.size(x.dim() - 1);
  parallel_for(0, x.numel() / num_cols, std::max<int64_t>(1, 16384 / num_cols), walk);
}

Tensor dense(const Tensor& x) { return x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x); }

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, Form form) {
  check_arguments(x, cos, sin);
  Tensor y = fastmp::empty(x.sizes(), x.scalar_type(), x);
  if (x.numel() > 0) rotate(dense(x), y, torch::stable::contiguous(cos), torch::stable::contiguous(sin), form);
  return y;
}

void rotate_in_place(Tensor x, const Tensor& cos, const Tensor& sin, Form form) {
  check_arguments(x, cos, sin);
  if (x.numel() == 0) return;
  const Tensor rows = dense(x);
  rotate(rows, rows, torch::stable::contiguous(cos), torch::stable::contiguous(sin), form);
  if (rows.const_data_ptr() != x.const_data_ptr()) torch::stable::copy_(x, rows);
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, std::optional<Tensor> k, const Tensor& cos, const Tensor& sin,
                                bool interleaved, bool inverse) {
  const Form form{interleaved, inverse};
  return {rotated(q, cos, sin, form), k ? rotated(*k, cos, sin, form) : fastmp::empty({0}, q.scalar_type(), q)};
}

void rope_(Tensor& q, std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  const Form form{interleaved, inverse};
  rotate_in_place(q, cos, sin, form);
  if (k) rotate_in_place(*k, cos, sin, form);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "rope", fastmp::rope);
  FASTMP_IMPL(m, "rope_", fastmp::rope_);
}

#endif  // FASTMP_ISA_BASE
