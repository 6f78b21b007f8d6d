// SiLU and GeLU on vectors. Each is h p(h) with derivative p + h q, where p is sigmoid(h) (SiLU), sigmoid(2u) with
// u = sqrt(2/pi) (h + 0.044715 h^3) (tanh form of GeLU), or the normal distribution function (exact GeLU).
#pragma once

#include "form.h"
#include "simd.h"

namespace fastmp::FASTMP_ISA {

template <Form form, class V>
FASTMP_INLINE V activation(V h) {
  using S = std::remove_reference_t<decltype(h[0])>;
  if constexpr (form == Form::kSilu) {
    return h * sigmoid(h);
  } else if constexpr (form == Form::kGeluTanh) {
    return h * sigmoid(h * (S(1.5957691216057308) + S(0.071354816272600265) * h * h));
  } else {
    return h * normal(h).cdf;
  }
}

template <class V>
struct Parts {
  V p, q;
};

// sigmoid(w) and its derivative.
template <class V>
FASTMP_INLINE Parts<V> sigmoid_parts(V w) {
  using S = std::remove_reference_t<decltype(w[0])>;
  const V e = exp(-abs(w));
  const V r = reciprocal(S(1) + e);  // sigmoid(|w|); e r^2 = sigmoid (1 - sigmoid) without cancellation
  return {select(w > S(0), r, e * r), e * r * r};
}

template <Form form, class V>
FASTMP_INLINE Parts<V> activation_parts(V h) {
  using S = std::remove_reference_t<decltype(h[0])>;
  if constexpr (form == Form::kSilu) {
    return sigmoid_parts(h);
  } else if constexpr (form == Form::kGeluTanh) {
    const auto s = sigmoid_parts(h * (S(1.5957691216057308) + S(0.071354816272600265) * h * h));
    return {s.p, s.q * (S(1.5957691216057308) + S(0.21406444881780076) * h * h)};
  } else {
    const auto n = normal(h);
    return {n.cdf, n.pdf};
  }
}

}  // namespace fastmp::FASTMP_ISA
