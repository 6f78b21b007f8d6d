// adamw_ on the CPU: one pass over flat buffers, in place.
//
// Every element is a function of its own numbers alone, so results depend neither on the number of threads nor on
// where a slice begins. Numbers that are equal for all elements are computed once, in double.
// The semantics are those of the reference in fastmp/ops/adamw.py.
#include "op.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace fastmp {

// `decay` is 1 - lr * weight_decay.
struct AdamwSpan {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* out;  // null, or a copy in `out_type`
  int64_t begin, end;
  ScalarType type, grad_type, out_type;
  double factor, weight1, beta2, decay, step_size, inv_root, eps;
};

FASTMP_DECLARE(void adamw_span(const AdamwSpan&);)

namespace FASTMP_ISA {

constexpr int kAhead = 2048;  // bytes: half a page serves four streams better than a page

template <class T, class G, class O>
FASTMP_INLINE void update(const AdamwSpan& span) {
  using V = lanes_of<T>;
  constexpr int64_t kStep = num_lanes<V>;
  T* const param = static_cast<T*>(span.param);
  const G* const grad = static_cast<const G*>(span.grad);
  T* const exp_avg = static_cast<T*>(span.exp_avg);
  T* const exp_avg_sq = static_cast<T*>(span.exp_avg_sq);
  O* const out = static_cast<O*>(span.out);
  const T factor = span.factor, weight1 = span.weight1, beta2 = span.beta2, weight2 = 1 - span.beta2;
  const T decay = span.decay, step_size = span.step_size, inv_root = span.inv_root, eps = span.eps;
  const auto advance = [&](V g, V& m, V& v, V& p) __attribute__((always_inline)) {
    g *= factor;
    m += weight1 * (g - m);
    v = weight2 * g * g + beta2 * v;  // in this order the larger term enters the sum rounded once
    p = p * decay - step_size * m / (sqrt(v) * inv_root + eps);
  };
  int64_t i = span.begin;
  for (; i + kStep <= span.end; i += kStep) {
    prefetch<kAhead>(grad + i);
    prefetch<kAhead>(exp_avg + i);
    prefetch<kAhead>(exp_avg_sq + i);
    prefetch<kAhead>(param + i);
    V m = load(exp_avg + i), v = load(exp_avg_sq + i), p = load(param + i);
    advance(load(grad + i), m, v, p);
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
    store(param + i, p);
    if constexpr (!std::is_void_v<O>) store(out + i, p);
  }
  if (const int64_t rest = span.end - i; rest > 0) {
    V m = load(exp_avg + i, rest, 0), v = load(exp_avg_sq + i, rest, 0), p = load(param + i, rest, 0);
    advance(load(grad + i, rest, 0), m, v, p);
    store(exp_avg + i, m, rest);
    store(exp_avg_sq + i, v, rest);
    store(param + i, p, rest);
    if constexpr (!std::is_void_v<O>) store(out + i, p, rest);
  }
}

template <class G>
FASTMP_INLINE void update_with_out(const AdamwSpan& span) {
  if (!span.out) {
    update<float, G, void>(span);
  } else if (span.out_type == ScalarType::BFloat16) {
    update<float, G, BFloat16>(span);
  } else {
    update<float, G, Half>(span);
  }
}

void adamw_span(const AdamwSpan& span) {
  if (span.type == ScalarType::Double) {
    update<double, double, void>(span);
  } else if (span.grad_type == ScalarType::Float) {
    update_with_out<float>(span);
  } else if (span.grad_type == ScalarType::BFloat16) {
    update_with_out<BFloat16>(span);
  } else {
    update_with_out<Half>(span);
  }
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr const char* kOp = "adamw_";
constexpr int64_t kGrain = 16384;

double number(const Tensor& tensor, const char* name) {
  FASTMP_CHECK(tensor.numel() == 1, kOp, ": ", name, " must hold one number, got ", tensor.numel());
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Bool:
    case ScalarType::Byte:
      return *static_cast<const uint8_t*>(data);
    case ScalarType::Int:
      return *static_cast<const int32_t*>(data);
    case ScalarType::Long:
      return static_cast<double>(*static_cast<const int64_t*>(data));
    default:
      return dispatch_float(tensor.scalar_type(), kOp, [&](auto tag) {
        return static_cast<double>(*static_cast<const typename decltype(tag)::type*>(data));
      });
  }
}

double number(const std::optional<Tensor>& tensor, const char* name, double otherwise) {
  return tensor ? number(*tensor, name) : otherwise;
}

// 1 - beta^count
double bias_correction(double beta, double count) { return beta > 0 ? -std::expm1(count * std::log(beta)) : 1; }

void check_buffer(const Tensor& tensor, const char* name, const Tensor& param, bool type_fits) {
  FASTMP_CHECK(tensor.numel() == param.numel() && tensor.is_contiguous(), kOp, ": ", name,
               " must be contiguous and have the ", param.numel(), " elements of param");
  FASTMP_CHECK(type_fits, kOp, ": param is ", dtype_name(param.scalar_type()), " but ", name, " is ",
               dtype_name(tensor.scalar_type()));
}

// The groups of parameters: their factors of the learning rate and their weight decays.
class Groups {
 public:
  struct Run {
    int64_t end;
    double lr, decay;
  };

  Groups(const std::optional<Tensor>& groups, const std::optional<Tensor>& lr, const std::optional<Tensor>& decay,
         int64_t first, int64_t num_elements)
      : first_(first % kUnit) {
    FASTMP_CHECK(groups.has_value() == lr.has_value() && groups.has_value() == decay.has_value(), kOp,
                 ": groups, group_lr and group_decay must be given together, or none of them");
    FASTMP_CHECK(first >= 0, kOp, ": first must not be negative, got ", first);
    if (!groups) return;
    lr_ = numbers(*lr, "group_lr");
    decay_ = numbers(*decay, "group_decay");
    FASTMP_CHECK(lr_.size() == decay_.size(), kOp, ": there are ", lr_.size(), " group_lr but ", decay_.size(),
                 " group_decay");
    const int64_t units = (first_ + num_elements + kUnit - 1) / kUnit;
    FASTMP_CHECK(groups->scalar_type() == ScalarType::Byte && groups->is_contiguous() && groups->numel() >= units, kOp,
                 ": groups must be contiguous and have a uint8 for each of ", units, " units");
    groups_ = static_cast<const uint8_t*>(groups->const_data_ptr());
    if (units == 0) return;
    const int largest = *std::max_element(groups_, groups_ + units);
    FASTMP_CHECK(largest < static_cast<int64_t>(lr_.size()), kOp, ": groups has a ", largest, ", but there are ",
                 lr_.size(), " groups");
  }

  // The neighbours from `begin` on, before `end`, that are of one group.
  Run run(int64_t begin, int64_t end) const {
    int64_t unit = (first_ + begin) / kUnit;
    const uint8_t group = groups_[unit];
    const int64_t last = (first_ + end - 1) / kUnit;
    while (unit <= last && groups_[unit] == group) ++unit;
    return {std::min(end, unit * kUnit - first_), lr_[group], decay_[group]};
  }

 private:
  static constexpr int64_t kUnit = 64;

  static std::vector<double> numbers(const Tensor& tensor, const char* name) {
    FASTMP_CHECK(tensor.is_contiguous(), kOp, ": ", name, " must be contiguous");
    std::vector<double> values(tensor.numel());
    dispatch_float(tensor.scalar_type(), kOp, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* data = static_cast<const T*>(tensor.const_data_ptr());
      std::copy_n(data, values.size(), values.begin());
    });
    return values;
  }

  int64_t first_;
  const uint8_t* groups_ = nullptr;
  std::vector<double> lr_, decay_;
};

void adamw(Tensor& param, const Tensor& grad, Tensor& exp_avg, Tensor& exp_avg_sq, Tensor& step,
           std::optional<Tensor>& out, std::optional<Tensor> lr_tensor, std::optional<Tensor> inv_scale,
           std::optional<Tensor> clip_coefficient, std::optional<Tensor> found_inf, double lr, double beta1,
           double beta2, double eps, double weight_decay, std::optional<Tensor> groups,
           std::optional<Tensor> group_lr, std::optional<Tensor> group_decay, int64_t first) {
  const ScalarType type = param.scalar_type();
  const auto fits = [&](const Tensor& t) {
    const ScalarType other = t.scalar_type();
    return type == ScalarType::Float && (other == ScalarType::BFloat16 || other == ScalarType::Half);
  };
  check_buffer(param, "param", param, type == ScalarType::Float || type == ScalarType::Double);
  check_buffer(grad, "grad", param, grad.scalar_type() == type || fits(grad));
  check_buffer(exp_avg, "exp_avg", param, exp_avg.scalar_type() == type);
  check_buffer(exp_avg_sq, "exp_avg_sq", param, exp_avg_sq.scalar_type() == type);
  if (out) check_buffer(*out, "low_precision_out", param, fits(*out));
  FASTMP_CHECK(step.scalar_type() == ScalarType::Long && step.numel() == 1, kOp, ": step must be one int64");
  const Groups table(groups, group_lr, group_decay, first, param.numel());
  if (number(found_inf, "found_inf", 0) != 0) return;

  auto* const count = static_cast<int64_t*>(step.mutable_data_ptr());
  const auto t = static_cast<double>(++*count);
  const double rate = number(lr_tensor, "lr", lr);
  AdamwSpan all{};
  all.param = param.mutable_data_ptr();
  all.grad = grad.const_data_ptr();
  all.exp_avg = exp_avg.mutable_data_ptr();
  all.exp_avg_sq = exp_avg_sq.mutable_data_ptr();
  all.out = out ? out->mutable_data_ptr() : nullptr;
  all.type = type;
  all.grad_type = grad.scalar_type();
  all.out_type = out ? out->scalar_type() : type;
  all.factor = number(inv_scale, "inv_scale", 1) * number(clip_coefficient, "clip_coefficient", 1);
  all.weight1 = 1 - beta1;
  all.beta2 = beta2;
  const double correction = bias_correction(beta1, t);
  all.decay = 1 - rate * weight_decay;
  all.step_size = rate / correction;
  all.inv_root = 1 / std::sqrt(bias_correction(beta2, t));
  all.eps = eps;
  const auto kernel = FASTMP_BEST(adamw_span);
  parallel_for(0, param.numel(), kGrain, [&](int64_t begin, int64_t end) {
    AdamwSpan span = all;
    for (span.begin = begin; span.begin < end; span.begin = span.end) {
      span.end = end;
      if (groups) {
        const Groups::Run run = table.run(span.begin, end);
        span.end = run.end;
        span.decay = 1 - rate * run.lr * run.decay;
        span.step_size = rate * run.lr / correction;
      }
      kernel(span);
    }
  });
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) { FASTMP_IMPL(m, "adamw_", fastmp::adamw); }

#endif  // FASTMP_ISA_BASE
