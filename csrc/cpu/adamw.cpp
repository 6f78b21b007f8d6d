// adamw_ on the CPU: one pass over flat buffers, in place.
//
// Elements are independent, so results depend neither on the number of threads nor on where a slice begins. Scalars are
// computed once, in double. Reference, and the layout of BF16 states: fastmp/ops/adamw.py.
#include "op.h"
#include "philox.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace fastmp {

// Elements [begin, end) of all buffers; `decay` is 1 - lr * weight_decay.
struct AdamwSpan {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* out;        // copy of the parameters in `out_type`, or null
  void* remainder;  // lower halves of the master weights, with their upper halves in `param`; or null
  int64_t begin, end;
  ScalarType type, grad_type, average_type, out_type;  // `type`: of the master weights
  double factor, weight1, beta2, decay, step_size, inv_root, eps;
  uint64_t seed;   // of the stochastic rounding of bfloat16 moments
  int64_t first;   // offset of element 0 in the whole buffer
  uint32_t count;  // step count, this step included
};

FASTMP_DECLARE(void adamw_span(const AdamwSpan&);)

namespace FASTMP_ISA {

constexpr int kAhead = 2048;  // prefetch distance in bytes: half a page suits four streams better than a page

typedef int32_t ints __attribute__((vector_size(kVectorBytes)));

struct Remainder {};  // tag: master weights are stored as parameters and remainders

// Returns the bits of float32 numbers, with one representation of NaN.
FASTMP_INLINE words clean_bits(floats v) { return select(v == v, bits_of(v), words{} + 0x7fc00000u); }

// Stores the upper halves of `bits`.
FASTMP_INLINE void store_upper(void* p, words bits, int64_t count) {
  const shorts upper = __builtin_convertvector(bits >> 16, shorts);
  if (count >= kFloats) {
    std::memcpy(p, &upper, sizeof upper);
  } else {
    copy_part(static_cast<BFloat16*>(p), reinterpret_cast<const BFloat16*>(&upper), count);
  }
}
// Loads signed 16-bit integers, whose storage type is bfloat16 here.
FASTMP_INLINE words load_signed(const BFloat16* p, int64_t count) {
  return (words)((ints)bits_of(load(p, count, 0)) >> 16);
}

// Calls step(i, count, noise) for the vectors of a span. noise has one random word per element: for offset j, word j %
// 4 of the Philox output for counter j / 4.
template <class Step>
FASTMP_INLINE void for_noisy_vectors(const AdamwSpan& span, const Step& step) {
  using Whole = std::integral_constant<int64_t, kFloats>;
  const auto made = [&](int64_t i) FASTMP_LAMBDA {
    return philox(span.seed, static_cast<uint64_t>(span.first + i) / 4, span.count);
  };
  int64_t i = span.begin;
  if (const int64_t skipped = (span.first + i) % 4; skipped != 0 && i < span.end) {
    uint32_t block[kBlock];
    const Words all = made(i);
    std::memcpy(block, &all, sizeof block);
    words noise;
    std::memcpy(&noise, block + skipped, sizeof noise);
    const int64_t count = std::min(4 - skipped, span.end - i);
    step(i, count, noise);
    i += count;
  }
  for (; i + kBlock <= span.end; i += kBlock) {
    const Words noise = made(i);
    step(i, Whole{}, noise.first);
    step(i + kFloats, Whole{}, noise.second);
  }
  for (; i < span.end; i += kFloats) step(i, std::min<int64_t>(kFloats, span.end - i), made(i).first);
}

// Updates a span. T: type of the master weights; G: of gradients; A: of the moments; O: of the parameters' copy, void
// without a copy, Remainder if master weights are split.
template <class T, class G, class A, class O>
FASTMP_INLINE void update(const AdamwSpan& span) {
  using V = lanes_of<T>;
  constexpr bool kSplit = std::is_same_v<O, Remainder>, kNoisy = !std::is_same_v<A, T>;
  using P = std::conditional_t<kSplit, BFloat16, T>;
  P* const param = static_cast<P*>(span.param);
  const G* const grad = static_cast<const G*>(span.grad);
  A* const exp_avg = static_cast<A*>(span.exp_avg);
  A* const exp_avg_sq = static_cast<A*>(span.exp_avg_sq);
  BFloat16* const remainder = static_cast<BFloat16*>(span.remainder);
  const T factor = span.factor, weight1 = span.weight1, beta2 = span.beta2, weight2 = 1 - span.beta2;
  const T decay = span.decay, step_size = span.step_size, inv_root = span.inv_root, eps = span.eps;
  const auto step = [&](int64_t i, auto count, words noise) FASTMP_LAMBDA {
    // 1. Load gradient, moments and master weights.
    prefetch<kAhead>(grad + i);
    prefetch<kAhead>(exp_avg + i);
    prefetch<kAhead>(exp_avg_sq + i);
    prefetch<kAhead>(param + i);
    V g = load(grad + i, count, 0), m = load(exp_avg + i, count, 0), v = load(exp_avg_sq + i, count, 0);
    V p = load(param + i, count, 0);
    if constexpr (kSplit) p = floats_of(bits_of(p) + load_signed(remainder + i, count));
    // 2. Moments, decoupled weight decay, update.
    g *= factor;
    m += weight1 * (g - m);
    v = weight2 * g * g + beta2 * v;  // in this order the larger term is rounded once
    p = p * decay - step_size * m / (sqrt(v) * inv_root + eps);
    // 3. Store the moments, bfloat16 ones with stochastic rounding, then parameters and their copy or remainder.
    if constexpr (kNoisy) {
      store_upper(exp_avg + i, clean_bits(m) + (noise & 0xffffu), count);
      store_upper(exp_avg_sq + i, clean_bits(v) + (noise >> 16), count);
    } else {
      store(exp_avg + i, m, count);
      store(exp_avg_sq + i, v, count);
    }
    if constexpr (kSplit) {
      const words bits = clean_bits(p);
      store_upper(param + i, bits + 0x8000u, count);
      store_upper(remainder + i, bits << 16, count);
    } else {
      store(param + i, p, count);
      if constexpr (!std::is_void_v<O>) store(static_cast<O*>(span.out) + i, p, count);
    }
  };
  if constexpr (kNoisy) {
    for_noisy_vectors(span, step);
  } else {
    for_vectors<num_lanes<V>>(span.end - span.begin,
                              [&](int64_t i, auto count) FASTMP_LAMBDA { step(span.begin + i, count, words{}); });
  }
}

template <class G, class A>
FASTMP_INLINE void update_with_copy(const AdamwSpan& span) {
  if (span.remainder) {
    update<float, G, A, Remainder>(span);
  } else if (!span.out) {
    update<float, G, A, void>(span);
  } else if (span.out_type == ScalarType::BFloat16) {
    update<float, G, A, BFloat16>(span);
  } else {
    update<float, G, A, Half>(span);
  }
}

template <class G>
FASTMP_INLINE void update_averages(const AdamwSpan& span) {
  span.average_type == ScalarType::Float ? update_with_copy<G, float>(span) : update_with_copy<G, BFloat16>(span);
}

void adamw_span(const AdamwSpan& span) {
  if (span.type == ScalarType::Double) {
    update<double, double, double, void>(span);
  } else if (span.grad_type == ScalarType::Float) {
    update_averages<float>(span);
  } else if (span.grad_type == ScalarType::BFloat16) {
    update_averages<BFloat16>(span);
  } else {
    update_averages<Half>(span);
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
    case ScalarType::Byte: return *static_cast<const uint8_t*>(data);
    case ScalarType::Int: return *static_cast<const int32_t*>(data);
    case ScalarType::Long: return static_cast<double>(*static_cast<const int64_t*>(data));
    default:
      return dispatch_float(tensor.scalar_type(), kOp, [&](auto tag) {
        return static_cast<double>(*static_cast<const typename decltype(tag)::type*>(data));
      });
  }
}

double number(const std::optional<Tensor>& tensor, const char* name, double otherwise) {
  return tensor ? number(*tensor, name) : otherwise;
}

// Returns 1 - beta^count.
double bias_correction(double beta, double count) { return beta > 0 ? -std::expm1(count * std::log(beta)) : 1; }

void check_buffer(const Tensor& tensor, const char* name, const Tensor& param, bool type_fits) {
  FASTMP_CHECK(tensor.numel() == param.numel() && tensor.is_contiguous(), kOp, ": ", name,
               " must be contiguous and have the ", param.numel(), " elements of param");
  FASTMP_CHECK(type_fits, kOp, ": param is ", dtype_name(param.scalar_type()), " but ", name, " is ",
               dtype_name(tensor.scalar_type()));
}

// Parameter groups: learning rate factor and weight decay of each.
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

  // Returns the run of elements from `begin` on, before `end`, that share a group.
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
           double beta2, double eps, double weight_decay, std::optional<Tensor> groups, std::optional<Tensor> group_lr,
           std::optional<Tensor> group_decay, int64_t first, std::optional<Tensor>& remainder, int64_t seed) {
  const ScalarType type = remainder ? ScalarType::Float : param.scalar_type();
  const ScalarType average_type = exp_avg.scalar_type();
  const auto is_narrow = [&](const Tensor& t) {
    const ScalarType other = t.scalar_type();
    return type == ScalarType::Float && (other == ScalarType::BFloat16 || other == ScalarType::Half);
  };
  const bool noisy = type == ScalarType::Float && average_type == ScalarType::BFloat16;
  check_buffer(param, "param", param, true);
  FASTMP_CHECK(
      remainder ? param.scalar_type() == ScalarType::BFloat16 : type == ScalarType::Float || type == ScalarType::Double,
      kOp, ": param must be float32 or float64, or bfloat16 with a remainder, got ", dtype_name(param.scalar_type()));
  check_buffer(grad, "grad", param, grad.scalar_type() == type || is_narrow(grad));
  check_buffer(exp_avg, "exp_avg", param, average_type == type || noisy);
  check_buffer(exp_avg_sq, "exp_avg_sq", param, true);
  FASTMP_CHECK(exp_avg_sq.scalar_type() == average_type, kOp, ": exp_avg is ", dtype_name(average_type),
               " but exp_avg_sq is ", dtype_name(exp_avg_sq.scalar_type()));
  if (out) check_buffer(*out, "low_precision_out", param, !remainder && is_narrow(*out));
  if (remainder) check_buffer(*remainder, "remainder", param, remainder->scalar_type() == ScalarType::Short);
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
  all.remainder = remainder ? remainder->mutable_data_ptr() : nullptr;
  all.type = type;
  all.average_type = average_type;
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
  all.seed = static_cast<uint64_t>(seed);
  all.first = first;
  all.count = static_cast<uint32_t>(*count);
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
