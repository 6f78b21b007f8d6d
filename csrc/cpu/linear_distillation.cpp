// Divergences between a student and a teacher from their logits on the CPU, and their gradient, in place
// (see fastmp/ops/linear_distillation_reference.py for the formulas).
//
// A thread takes whole rows, and walks the student's and the teacher's side by side. Normalisers are known, so both
// passes have no order but that of the sums.
#include "cpu/simd.h"

#include <algorithm>
#include <limits>

#include "cpu/vocabulary.h"
#include "op.h"

namespace fastmp {

// Student and teacher rows of a shard, and numbers of each token. Null scale: 1.
template <typename T, typename A>
struct DistillationRows {
  const T* teacher;
  int64_t teacher_stride;
  const A *normalisers, *scale;  // (N, 4): top and log total of the student, then of the teacher
  A beta;
};

FASTMP_DECLARE(template <typename T, typename A>
               void distillation_sums(const T* logits, DistillationRows<T, A> rows, A* out, Shard shard, int64_t begin,
                                      int64_t end);
               template <typename T, typename A>
               void distillation_grad(T* logits, DistillationRows<T, A> rows, const A* kl_p, const A* grad_loss,
                                      Shard shard, int64_t begin, int64_t end);)

namespace FASTMP_ISA {

enum class Divergence { kForward, kReverse, kMixture };

typedef int32_t ints __attribute__((vector_size(kVectorBytes)));

// log x for 0 < x <= 1, normal numbers, relative error below 2e-7. With x = 2^k m and m in [2/3, 4/3),
// log m = 2 atanh(t) where t = (m - 1) / (m + 1), |t| <= 1/5: five terms of atanh's series.
FASTMP_INLINE floats log_share(floats x) {
  constexpr int32_t kTwoThirds = 0x3f2aaaab;
  const ints above = (ints)x - kTwoThirds;
  const ints k = above >> 23;
  const floats m = (floats)((above & 0x7fffff) + kTwoThirds);
  const floats t = (m - 1.0f) / (m + 1.0f);
  const floats square = t * t;
  floats q = square * 0.111111111f + 0.142857143f;
  q = q * square + 0.2f;
  q = q * square + 0.333333333f;
  q = q * square + 1.0f;
  return __builtin_convertvector(k, floats) * 0.693147181f + 2.0f * t * q;
}
FASTMP_INLINE doubles log_share(doubles x) {
  for (int i = 0; i < kDoubles; ++i) x[i] = std::log(x[i]);
  return x;
}

// Terms of KL(w || m), w (e^gap - 1 - gap) where m = w e^gap; by the series where that cancels, m where w is zero.
template <typename V>
FASTMP_INLINE V kl_terms(V weight, V mixture, V gap) {
  V terms = mixture - weight - weight * gap;
  if constexpr (std::is_same_v<V, floats>) {
    floats series = gap * 2.75573192e-6f + 2.48015873e-5f;
    series = series * gap + 1.98412698e-4f;
    series = series * gap + 1.38888889e-3f;
    series = series * gap + 8.33333333e-3f;
    series = series * gap + 4.16666667e-2f;
    series = series * gap + 1.66666667e-1f;
    series = series * gap + 0.5f;
    terms = select(abs(gap) < 0.5f, weight * gap * gap * series, terms);
  }
  return select(weight == 0, mixture, terms);
}

// log m relative to the larger of p and q, where m = beta q + (1 - beta) p.
template <typename V, typename A>
FASTMP_INLINE V mixture_log(V gap, A beta) {
  const V small = exp(-abs(gap));
  const V student = (1 - beta) + beta * small, teacher = beta + (1 - beta) * small;
  return log_share(select(gap >= 0, student, teacher));
}

// What turns the logits of a row into log-probabilities.
template <typename A>
struct RowNormaliser {
  A top, log_total, teacher_top, teacher_log_total, scale;

  template <typename T>
  RowNormaliser(const DistillationRows<T, A>& rows, int64_t row)
      : top(rows.normalisers[4 * row]),
        log_total(rows.normalisers[4 * row + 1]),
        teacher_top(rows.normalisers[4 * row + 2]),
        teacher_log_total(rows.normalisers[4 * row + 3]),
        scale(1) {
    if (rows.scale == nullptr) return;
    scale = rows.scale[row] > 0 ? rows.scale[row] : std::numeric_limits<A>::quiet_NaN();
  }
  template <typename V>
  FASTMP_INLINE V student(V logits) const {
    return (logits - top) * scale - log_total;
  }
  template <typename V>
  FASTMP_INLINE V teacher(V logits) const {
    return (logits - teacher_top) * scale - teacher_log_total;
  }
};

template <Divergence kKind, typename T, typename A>
void distillation_sums_row(const T* x, const T* y, RowNormaliser<A> row, A beta, int64_t real, A* out) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  constexpr A kLowest = -std::numeric_limits<A>::infinity();
  V of_q{}, of_p{};
  const auto take = [&](V logits, V teacher_logits) FASTMP_LAMBDA {
    const V log_p = row.student(logits), log_q = row.teacher(teacher_logits);
    const V p = exp(log_p), q = exp(log_q), gap = log_p - log_q;
    if constexpr (kKind == Divergence::kForward) {
      of_q += kl_terms(q, p, gap);
    } else if constexpr (kKind == Divergence::kReverse) {
      of_p += kl_terms(p, q, -gap);
    } else {
      const V log_m = mixture_log(gap, beta), m = beta * q + (1 - beta) * p;
      of_q += kl_terms(q, m, select(gap >= 0, log_m + gap, log_m));
      of_p += kl_terms(p, m, select(gap >= 0, log_m, log_m - gap));
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= real; i += kLanes) {
    prefetch(x + i);
    prefetch(y + i);
    take(load(x + i), load(y + i));
  }
  if (i < real) take(load(x + i, real - i, kLowest), load(y + i, real - i, kLowest));
  out[0] = sum(of_q);
  out[1] = sum(of_p);
}

template <typename T, typename A>
void distillation_sums(const T* logits, DistillationRows<T, A> rows, A* out, Shard shard, int64_t begin, int64_t end) {
  const auto one = rows.beta == 0   ? distillation_sums_row<Divergence::kForward, T, A>
                   : rows.beta == 1 ? distillation_sums_row<Divergence::kReverse, T, A>
                                    : distillation_sums_row<Divergence::kMixture, T, A>;
  for (int64_t row = begin; row < end; ++row) {
    one(logits + row * shard.row_stride, rows.teacher + row * rows.teacher_stride, RowNormaliser<A>(rows, row),
        rows.beta, shard.real, out + 2 * row);
  }
}

template <Divergence kKind, typename T, typename A>
void distillation_grad_row(T* x, const T* y, RowNormaliser<A> row, A beta, A kl_p, A share, int64_t real) {
  using V = lanes_of<T>;
  constexpr int kLanes = num_lanes<V>;
  if constexpr (kKind == Divergence::kMixture) share *= 1 - beta;
  const auto gradient = [&](V logits, V teacher_logits) FASTMP_LAMBDA {
    const V log_p = row.student(logits), log_q = row.teacher(teacher_logits), p = exp(log_p);
    if constexpr (kKind == Divergence::kForward) return V(share * (p - exp(log_q)));
    V gap = log_p - log_q;
    if constexpr (kKind == Divergence::kMixture) {
      const V log_m = mixture_log(gap, beta);
      gap = select(gap >= 0, -log_m, gap - log_m);
    }
    return V(share * select(p == 0, V{}, p * (gap - kl_p)));
  };
  int64_t i = 0;
  for (; i + kLanes <= real; i += kLanes) {
    prefetch(x + i);
    prefetch(y + i);
    store(x + i, gradient(load(x + i), load(y + i)));
  }
  if (i < real) store(x + i, gradient(load(x + i, real - i, 0), load(y + i, real - i, 0)), real - i);
}

template <typename T, typename A>
void distillation_grad(T* logits, DistillationRows<T, A> rows, const A* kl_p, const A* grad_loss, Shard shard,
                       int64_t begin, int64_t end) {
  const auto one = rows.beta == 0   ? distillation_grad_row<Divergence::kForward, T, A>
                   : rows.beta == 1 ? distillation_grad_row<Divergence::kReverse, T, A>
                                    : distillation_grad_row<Divergence::kMixture, T, A>;
  for (int64_t row = begin; row < end; ++row) {
    T* x = logits + row * shard.row_stride;
    const RowNormaliser<A> normaliser(rows, row);
    one(x, rows.teacher + row * rows.teacher_stride, normaliser, rows.beta, kl_p[row],
        grad_loss[row] * normaliser.scale, shard.real);
    std::fill(x + shard.real, x + shard.columns, T(0));  // padding columns
  }
}

#define FASTMP_INSTANTIATE(T, A)                                                                  \
  template void distillation_sums(const T*, DistillationRows<T, A>, A*, Shard, int64_t, int64_t); \
  template void distillation_grad(T*, DistillationRows<T, A>, const A*, const A*, Shard, int64_t, int64_t);
FASTMP_INSTANTIATE(float, float)
FASTMP_INSTANTIATE(double, double)
FASTMP_INSTANTIATE(BFloat16, float)
FASTMP_INSTANTIATE(Half, float)
#undef FASTMP_INSTANTIATE

}  // namespace FASTMP_ISA

#ifdef FASTMP_ISA_BASE

namespace {

// Checks both matrices of logits and the numbers of each token, which are made contiguous. Returns the shard.
Shard checked(const char* op, const Tensor& logits, const Tensor& teacher_logits, Tensor& normalisers,
              std::optional<Tensor>& scale, double beta, int64_t vocab_start, int64_t vocab_size) {
  FASTMP_CHECK(beta >= 0 && beta <= 1, op, ": expected beta from 0 to 1, got ", beta);
  const Shard shard = local_shard(op, logits, vocab_start, vocab_size);
  local_shard(op, teacher_logits, vocab_start, vocab_size);
  check_same(op, "teacher_logits", teacher_logits, "logits", logits);
  const int64_t tokens = logits.size(0);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  FASTMP_CHECK(normalisers.dim() == 2 && normalisers.size(0) == tokens && normalisers.size(1) == 4 &&
                   normalisers.scalar_type() == dtype,
               op, ": normalisers must be ", dtype_name(dtype), " (", tokens, ", 4), got ", described(normalisers));
  if (!normalisers.is_contiguous()) normalisers = torch::stable::contiguous(normalisers);
  if (scale) scale = per_token(op, "scale", *scale, tokens, dtype);
  return shard;
}

template <typename T, typename A>
DistillationRows<T, A> rows_of(const Tensor& teacher_logits, const Tensor& normalisers,
                               const std::optional<Tensor>& scale, double beta) {
  return {teacher_logits.const_data_ptr<T>(), teacher_logits.stride(0), normalisers.const_data_ptr<A>(),
          scale ? scale->const_data_ptr<A>() : nullptr, static_cast<A>(beta)};
}

Tensor distillation_sums_(Tensor logits, Tensor teacher_logits, Tensor normalisers, std::optional<Tensor> scale,
                          double beta, int64_t vocab_start, int64_t vocab_size) {
  constexpr const char* op = "distillation_sums";
  const Shard shard = checked(op, logits, teacher_logits, normalisers, scale, beta, vocab_start, vocab_size);
  Tensor out = empty({logits.size(0), 2}, compute_dtype(logits.scalar_type()), logits);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(distillation_sums<T, A>);
    const auto rows = rows_of<T, A>(teacher_logits, normalisers, scale, beta);
    const T* x = logits.const_data_ptr<T>();
    A* to = out.mutable_data_ptr<A>();
    parallel_for(0, logits.size(0), grain_of(shard.real),
                 [&](int64_t begin, int64_t end) { kernel(x, rows, to, shard, begin, end); });
  });
  return out;
}

void distillation_grad_(Tensor& logits, Tensor teacher_logits, Tensor normalisers, Tensor kl_p, Tensor grad_loss,
                        std::optional<Tensor> scale, double beta, int64_t vocab_start, int64_t vocab_size) {
  constexpr const char* op = "distillation_grad_";
  const Shard shard = checked(op, logits, teacher_logits, normalisers, scale, beta, vocab_start, vocab_size);
  const ScalarType dtype = compute_dtype(logits.scalar_type());
  kl_p = per_token(op, "kl_p", kl_p, logits.size(0), dtype);
  grad_loss = per_token(op, "grad_loss", grad_loss, logits.size(0), dtype);
  dispatch_float(logits.scalar_type(), op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulator<T>;
    const auto kernel = FASTMP_BEST(distillation_grad<T, A>);
    const auto rows = rows_of<T, A>(teacher_logits, normalisers, scale, beta);
    T* x = logits.mutable_data_ptr<T>();
    const A *kl = kl_p.const_data_ptr<A>(), *grad = grad_loss.const_data_ptr<A>();
    parallel_for(0, logits.size(0), grain_of(shard.columns),
                 [&](int64_t begin, int64_t end) { kernel(x, rows, kl, grad, shard, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "distillation_sums", distillation_sums_);
  FASTMP_IMPL(m, "distillation_grad_", distillation_grad_);
}

#endif  // FASTMP_ISA_BASE

}  // namespace fastmp
