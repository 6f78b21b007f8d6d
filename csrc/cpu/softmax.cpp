// scaled_masked_softmax and its backward on the CPU.
//
// A thread computes whole rows, so results do not depend on the number of threads. A row is read from memory once; the
// scaled scores, then their exponentials, stay in cache, in the output itself if that is float32 or float64.
// 16-bit types are computed in fp32 and rounded once. Reference: fastmp/ops/softmax.py.
#include "op.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace fastmp {

// The mask of hidden keys (nonzero bytes) by rows of scores; broadcast dimensions have stride 0.
struct MaskRows {
  const uint8_t* data = nullptr;  // null: no mask
  std::vector<int64_t> sizes, strides;
  int64_t key_stride = 1;

  const uint8_t* at(int64_t row) const {
    const uint8_t* p = data;
    for (size_t dim = sizes.size(); dim-- > 0; row /= sizes[dim]) p += row % sizes[dim] * strides[dim];
    return p;
  }
};

struct SoftmaxRow {
  const void* x;          // scores; y in the backward
  const void* grad;       // backward only
  void* out;              // y or dx
  void* scratch;          // num_keys numbers in the compute type
  const uint8_t* hidden;  // one byte per key, or null
  int64_t end, num_keys;  // keys from `end` on are hidden (causal)
  double scale;
};

FASTMP_DECLARE(template <typename T> void softmax_row(const SoftmaxRow& row);
               template <typename T> void softmax_backward_row(const SoftmaxRow& row);)

namespace FASTMP_ISA {

// Vectors with one byte, or one 64-bit word, per lane.
typedef uint8_t float_flags __attribute__((vector_size(kFloats)));
typedef uint8_t double_flags __attribute__((vector_size(kDoubles)));
typedef uint64_t long_words __attribute__((vector_size(kVectorBytes)));
template <typename V>
using flags_of = std::conditional_t<std::is_same_v<V, doubles>, double_flags, float_flags>;

// Returns `scores` with -inf where `hidden` is nonzero and in the lanes from `count` on.
template <typename V>
FASTMP_INLINE V visible(V scores, const uint8_t* hidden, int64_t count) {
  using S = std::remove_reference_t<decltype(scores[0])>;
  constexpr S kLowest = -std::numeric_limits<S>::infinity();
  flags_of<V> flags;
  std::memset(&flags, 1, sizeof flags);
  std::memcpy(&flags, hidden, count);
  const V lowest = broadcast<V>(kLowest);
  if constexpr (std::is_same_v<V, floats>) {  // the compiler widens 8 to 32 bits lane by lane, but not in two steps
    return select(__builtin_convertvector(__builtin_convertvector(flags, shorts), words) != 0, lowest, scores);
  } else {
    return select(__builtin_convertvector(flags, long_words) != 0, lowest, scores);
  }
}

template <typename T>
void softmax_row(const SoftmaxRow& row) {
  using V = lanes_of<T>;
  using A = scalar_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  const T* x = static_cast<const T*>(row.x);
  T* y = static_cast<T*>(row.out);
  A* scores = static_cast<A*>(row.scratch);
  const A scale = static_cast<A>(row.scale);
  const int64_t end = row.end;
  const uint8_t* hidden = row.hidden;
  // 1. Scale and mask the scores; find the maximum.
  V top = broadcast<V>(kLowest);
  const auto read = [&](auto masked) {
    for_vectors<kStep>(end, [&](int64_t i, auto count) FASTMP_LAMBDA {
      prefetch(x + i);
      V lanes = load(x + i, count, 0) * scale;
      if constexpr (masked) lanes = visible(lanes, hidden + i, count);
      store(scores + i, lanes, count);
      top = max(count < kStep ? load(scores + i, count, kLowest) : lanes, top);  // ignores NaN
    });
  };
  hidden ? read(std::true_type{}) : read(std::false_type{});
  const A highest = max(top), shift = highest == kLowest ? 0 : highest;
  // 2. Exponentials and their sum.
  V sums = {};
  for_vectors<kStep>(end, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V e = exp(load(scores + i, count, kLowest) - shift);
    store(scores + i, e, count);
    sums += e;
  });
  const A total = sum(sums);
  // 3. Normalise; a row with NaN is NaN at its visible keys, a row without visible keys is 0.
  if (std::isnan(total)) [[unlikely]] {
    for (int64_t i = 0; i < end; ++i) y[i] = static_cast<T>(hidden && hidden[i] ? A(0) : total);
  } else {
    const A share = total == 0 ? 0 : 1 / total;
    for_vectors<kStep>(
        end, [&](int64_t i, auto count) FASTMP_LAMBDA { store(y + i, load(scores + i, count, 0) * share, count); });
  }
  std::fill(y + end, y + row.num_keys, T(0));
}

template <typename T>
void softmax_backward_row(const SoftmaxRow& row) {
  using V = lanes_of<T>;
  using A = scalar_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  const T* y = static_cast<const T*>(row.x);
  const T* grad = static_cast<const T*>(row.grad);
  T* dx = static_cast<T*>(row.out);
  const A scale = static_cast<A>(row.scale);
  const V zero = {};
  // 1. sum(grad y), in two chains.
  V sums[2] = {};
  for_vectors<kStep>(row.end, [&](int64_t i, auto count) FASTMP_LAMBDA {
    prefetch(y + i);
    prefetch(grad + i);
    const V weight = load(y + i, count, 0);
    sums[i / kStep % 2] += select(weight == 0, zero, load(grad + i, count, 0) * weight);
  });
  // 2. dx = scale y (grad - sum).
  const A total = sum(sums[0] + sums[1]);
  for_vectors<kStep>(row.end, [&](int64_t i, auto count) FASTMP_LAMBDA {
    const V weight = load(y + i, count, 0);
    const V slope = (load(grad + i, count, 0) - total) * (weight * scale);
    store(dx + i, select(weight == 0, zero, slope), count);
  });
  std::fill(dx + row.end, dx + row.num_keys, T(0));
}

#define FASTMP_INSTANTIATE(T)                          \
  template void softmax_row<T>(const SoftmaxRow& row); \
  template void softmax_backward_row<T>(const SoftmaxRow& row);
FASTMP_INSTANTIATE(float)
FASTMP_INSTANTIATE(double)
FASTMP_INSTANTIATE(BFloat16)
FASTMP_INSTANTIATE(Half)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int64_t kGrain = 16384;  // minimum number of scores per thread

MaskRows mask_rows(const char* op, const Tensor& mask, const Tensor& x) {
  FASTMP_CHECK(mask.scalar_type() == ScalarType::Bool, op, ": mask must be bool, got ", dtype_name(mask.scalar_type()));
  const int64_t extra = x.dim() - mask.dim();
  FASTMP_CHECK(extra >= 0, op, ": mask of ", mask.dim(), " dimensions does not fit x of ", x.dim());
  MaskRows rows;
  rows.data = static_cast<const uint8_t*>(mask.const_data_ptr());
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const int64_t size = dim < extra ? 1 : mask.size(dim - extra);
    FASTMP_CHECK(size == 1 || size == x.size(dim), op, ": mask of size ", size, " does not fit x of size ", x.size(dim),
                 " in dimension ", dim);
    const int64_t stride = size == 1 ? 0 : mask.stride(dim - extra);
    if (dim + 1 == x.dim()) {
      rows.key_stride = stride;
    } else {
      rows.sizes.push_back(x.size(dim));
      rows.strides.push_back(stride);
    }
  }
  return rows;
}

// Calls kernel(row) on every row, over all threads. With a causal mask short and long rows alternate, to balance the
// threads. In the backward `x` is y, and `grad` is passed.
template <typename T, class Kernel>
void for_rows(const Kernel& kernel, const Rows& x, const Rows* grad, const MaskRows& mask, const Tensor& out,
              double scale, bool causal) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr bool kInPlace = std::is_same_v<T, A>;
  const int64_t num_rows = x.num_rows, num_keys = x.num_cols, num_queries = out.size(out.dim() - 2);
  const T* from = static_cast<const T*>(x.tensor.const_data_ptr());
  const T* upstream = grad ? static_cast<const T*>(grad->tensor.const_data_ptr()) : nullptr;
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const bool gather = mask.data && mask.key_stride != 1;
  parallel_for(0, num_rows, std::max<int64_t>(1, kGrain / num_keys), [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(kInPlace || grad ? 0 : num_keys);
    std::vector<uint8_t> hidden(gather ? num_keys : 0);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t r = !causal ? index : index % 2 ? num_rows - 1 - index / 2 : index / 2;
      SoftmaxRow row{};
      row.x = from + r * x.pitch;
      if (grad) row.grad = upstream + r * grad->pitch;
      row.out = to + r * num_keys;
      row.scratch = kInPlace ? row.out : static_cast<void*>(scratch.data());
      if (mask.data) row.hidden = mask.at(r);
      if (gather) {
        for (int64_t key = 0; key < num_keys; ++key) hidden[key] = row.hidden[key * mask.key_stride];
        row.hidden = hidden.data();
      }
      row.num_keys = num_keys;
      row.end = causal ? std::clamp<int64_t>(r % num_queries + 1 + num_keys - num_queries, 0, num_keys) : num_keys;
      row.scale = scale;
      kernel(row);
    }
  });
}

void check_scores(const char* op, const Tensor& x) {
  FASTMP_CHECK(x.dim() >= 2, op, ": scores must be (..., queries, keys), got ", x.dim(), " dimensions");
}

Tensor scaled_masked_softmax(const Tensor& x, std::optional<Tensor> mask, double scale, bool causal) {
  constexpr const char* kOp = "scaled_masked_softmax";
  check_scores(kOp, x);
  MaskRows hidden;
  if (mask) hidden = mask_rows(kOp, *mask, x);
  Tensor y = fastmp::empty(x.sizes(), x.scalar_type(), x);
  dispatch_float(x.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (x.numel() > 0) for_rows<T>(FASTMP_BEST(softmax_row<T>), Rows(x), nullptr, hidden, y, scale, causal);
  });
  return y;
}

Tensor scaled_masked_softmax_backward(const Tensor& grad, const Tensor& y, double scale, bool causal) {
  constexpr const char* kOp = "scaled_masked_softmax_backward";
  check_scores(kOp, y);
  check_same(kOp, "grad", grad, "y", y);
  Tensor dx = fastmp::empty(y.sizes(), y.scalar_type(), y);
  dispatch_float(y.scalar_type(), kOp, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (y.numel() == 0) return;
    const Rows grad_rows(grad);
    for_rows<T>(FASTMP_BEST(softmax_backward_row<T>), Rows(y), &grad_rows, {}, dx, scale, causal);
  });
  return dx;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "scaled_masked_softmax", fastmp::scaled_masked_softmax);
  FASTMP_IMPL(m, "scaled_masked_softmax_backward", fastmp::scaled_masked_softmax_backward);
}

#endif  // FASTMP_ISA_BASE
