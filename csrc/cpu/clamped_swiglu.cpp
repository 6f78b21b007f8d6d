// clamped_swiglu and its backward on the CPU, with interleaved pairs (gate, up).
//
// Threads share the rows, which are independent. 16-bit types are computed in fp32 and rounded once.
// Reference: fastmp/ops/clamped_swiglu.py.
#include "activations.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <vector>

namespace fastmp {

// `num_rows` rows of `num_pairs` pairs; pitches are in elements.
struct ClampedRows {
  const void* grad;  // (num_rows, num_pairs), backward only
  const void* x;     // (num_rows, 2 num_pairs)
  void* out;         // y (num_rows, num_pairs) or dx (num_rows, 2 num_pairs), contiguous
  int64_t num_rows, num_pairs, grad_pitch, x_pitch;
  double alpha, limit;
  ScalarType dtype;
};

FASTMP_DECLARE(void clamped_swiglu_rows(const ClampedRows&); void clamped_swiglu_backward_rows(const ClampedRows&);)

namespace FASTMP_ISA {

// (up + 1) gate sigmoid(alpha gate) of clamped gate and up, and its gradient.
template <class T>
struct ClampedGate {
  using V = lanes_of<T>;
  using S = scalar_of<T>;
  S alpha, limit;

  explicit ClampedGate(const ClampedRows& rows) : alpha(S(rows.alpha)), limit(S(rows.limit)) {}

  FASTMP_INLINE V capped(V gate) const { return select(gate > limit, broadcast<V>(limit), gate); }
  FASTMP_INLINE V bounded(V up) const { return select(up < -limit, broadcast<V>(-limit), capped(up)); }

  FASTMP_INLINE V value(Pair<V> x) const {
    const V gate = capped(x.first);
    return (bounded(x.second) + S(1)) * (gate * sigmoid(alpha * gate));
  }

  FASTMP_INLINE Pair<V> gradient(Pair<V> x, V grad) const {
    const V gate = capped(x.first), zero{};
    const auto [p, q] = sigmoid_parts(alpha * gate);
    const V dgate = grad * ((bounded(x.second) + S(1)) * (p + gate * q * alpha)), dup = grad * (gate * p);
    return {select(x.first <= limit, dgate, zero), select(abs(x.second) <= limit, dup, zero)};
  }
};

void clamped_swiglu_rows(const ClampedRows& rows) {
  dispatch_float(rows.dtype, "clamped_swiglu", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int64_t kStep = num_lanes<lanes_of<T>>;
    const ClampedGate<T> gate(rows);
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      const T* x = static_cast<const T*>(rows.x) + row * rows.x_pitch;
      T* y = static_cast<T*>(rows.out) + row * rows.num_pairs;
      int64_t i = 0;
      for (; i + kStep <= rows.num_pairs; i += kStep) {
        prefetch(x + 2 * i);
        store(y + i, gate.value(load_neighbours(x + 2 * i)));
      }
      if (const int64_t rest = rows.num_pairs - i; rest > 0) {
        T last[2 * kStep] = {};
        std::memcpy(last, x + 2 * i, 2 * rest * sizeof(T));
        store(y + i, gate.value(load_neighbours(last)), rest);
      }
    }
  });
}

void clamped_swiglu_backward_rows(const ClampedRows& rows) {
  dispatch_float(rows.dtype, "clamped_swiglu_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int64_t kStep = num_lanes<lanes_of<T>>;
    const ClampedGate<T> gate(rows);
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      const T* grad = static_cast<const T*>(rows.grad) + row * rows.grad_pitch;
      const T* x = static_cast<const T*>(rows.x) + row * rows.x_pitch;
      T* dx = static_cast<T*>(rows.out) + row * 2 * rows.num_pairs;
      int64_t i = 0;
      for (; i + kStep <= rows.num_pairs; i += kStep) {
        prefetch(x + 2 * i);
        prefetch(grad + i);
        store_neighbours(dx + 2 * i, gate.gradient(load_neighbours(x + 2 * i), load(grad + i)));
      }
      if (const int64_t rest = rows.num_pairs - i; rest > 0) {
        T last[2 * kStep] = {};
        std::memcpy(last, x + 2 * i, 2 * rest * sizeof(T));
        store_neighbours(last, gate.gradient(load_neighbours(last), load(grad + i, rest, 0)));
        std::memcpy(dx + 2 * i, last, 2 * rest * sizeof(T));
      }
    }
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void check_pairs(const char* op, const Tensor& x, double limit) {
  FASTMP_CHECK(limit > 0, op, ": limit must be positive, got ", limit);
  FASTMP_CHECK(x.dim() > 0 && x.size(x.dim() - 1) % 2 == 0, op, ": x must end in a dimension of even size");
  dispatch_float(x.scalar_type(), op, [](auto) {});
}

// Calls kernel(rows) on ranges of rows, over all threads.
template <class Kernel>
void for_rows(const Kernel& kernel, const Rows* grad, const Rows& x, const Tensor& out, double alpha, double limit) {
  const auto itemsize = static_cast<int64_t>(x.tensor.element_size());
  const int64_t out_pitch = (grad ? 2 : 1) * x.num_cols / 2;
  parallel_for(0, x.num_rows, std::max<int64_t>(1, 16384 / x.num_cols), [&](int64_t begin, int64_t end) {
    ClampedRows rows{};
    rows.num_rows = end - begin, rows.num_pairs = x.num_cols / 2;
    rows.x_pitch = x.pitch, rows.x = at(x.tensor.const_data_ptr(), begin * x.pitch, itemsize);
    if (grad)
      rows.grad_pitch = grad->pitch, rows.grad = at(grad->tensor.const_data_ptr(), begin * grad->pitch, itemsize);
    rows.out = const_cast<char*>(at(out.mutable_data_ptr(), begin * out_pitch, itemsize));
    rows.alpha = alpha, rows.limit = limit, rows.dtype = x.tensor.scalar_type();
    kernel(rows);
  });
}

Tensor clamped_swiglu(const Tensor& x, double alpha, double limit) {
  check_pairs("clamped_swiglu", x, limit);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  Tensor y = fastmp::empty(sizes, x.scalar_type(), x);
  if (x.numel() > 0) for_rows(FASTMP_BEST(clamped_swiglu_rows), nullptr, Rows(x), y, alpha, limit);
  return y;
}

Tensor clamped_swiglu_backward(const Tensor& grad, const Tensor& x, double alpha, double limit) {
  constexpr const char* kOp = "clamped_swiglu_backward";
  check_pairs(kOp, x, limit);
  FASTMP_CHECK(grad.scalar_type() == x.scalar_type() && grad.dim() == x.dim() && 2 * grad.numel() == x.numel() &&
                   2 * grad.size(grad.dim() - 1) == x.size(x.dim() - 1),
               kOp, ": grad is ", described(grad), ", which does not fit x, ", described(x));
  Tensor dx = fastmp::empty(x.sizes(), x.scalar_type(), x);
  if (x.numel() == 0) return dx;
  const Rows grad_rows(grad);
  for_rows(FASTMP_BEST(clamped_swiglu_backward_rows), &grad_rows, Rows(x), dx, alpha, limit);
  return dx;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "clamped_swiglu", fastmp::clamped_swiglu);
  FASTMP_IMPL(m, "clamped_swiglu_backward", fastmp::clamped_swiglu_backward);
}

#endif  // FASTMP_ISA_BASE
