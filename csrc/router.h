// Checks of the arguments of topk_router, and its outputs, for its kernels on CPUs and in CUDA C++.
#pragma once

#include "op.h"

#include <string>
#include <tuple>
#include <vector>

namespace fastmp {

enum class Score { kSoftmax, kLogits, kSigmoid, kSqrtSoftplus };

// True if each score is a function of its own logit alone.
constexpr bool elementwise(Score score) { return score == Score::kSigmoid || score == Score::kSqrtSoftplus; }

inline Score score_named(const char* op, const std::string& name) {
  if (name == "softmax") return Score::kSoftmax;
  if (name == "logits") return Score::kLogits;
  if (name == "sigmoid") return Score::kSigmoid;
  FASTMP_CHECK(name == "sqrtsoftplus", op, ": score must be softmax, logits, sigmoid or sqrtsoftplus, got ", name);
  return Score::kSqrtSoftplus;
}

inline void check_router_logits(const char* op, const Tensor& logits) {
  FASTMP_CHECK(logits.dim() == 2 || logits.dim() == 3, op, ": logits must be (T, E) or (S, B, E), got ", logits.dim(),
               " dimensions");
}

// Returns a contiguous tensor of so many numbers of the logits' wide dtype.
inline Tensor wide_numbers(const char* op, const char* name, const Tensor& tensor, const Tensor& logits,
                           int64_t numel) {
  const ScalarType wide = compute_dtype(logits.scalar_type());
  FASTMP_CHECK(tensor.scalar_type() == wide && tensor.numel() == numel, op, ": ", name, " must have ", numel,
               " numbers of ", dtype_name(wide), ", got ", tensor.numel(), " of ", dtype_name(tensor.scalar_type()));
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The outputs of topk_router, in its order; balance_counts is empty unless asked for.
struct Routed {
  Tensor indices, probs, counts, score_sums, z_sum, balance_counts;

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
    return {indices, probs, counts, score_sums, z_sum, balance_counts};
  }
};

// Checks sizes, and returns the outputs, not written.
inline Routed empty_routed(const char* op, const Tensor& logits, int64_t k, int64_t num_groups, int64_t group_topk,
                           bool balance) {
  check_router_logits(op, logits);
  const int64_t last = logits.dim() - 1, experts = logits.size(last);
  FASTMP_CHECK(k >= 1 && num_groups >= 1 && experts % num_groups == 0 && group_topk >= 1 && group_topk <= num_groups &&
                   k <= experts / num_groups * group_topk,
               op, ": k=", k, " does not fit ", experts, " experts with ", group_topk, " of ", num_groups, " groups");
  const ScalarType wide = compute_dtype(logits.scalar_type());
  std::vector<int64_t> per_token(logits.sizes().begin(), logits.sizes().end());
  const std::vector<int64_t> per_expert(per_token.begin() + 1, per_token.end());
  per_token[last] = k;
  return {fastmp::empty(per_token, ScalarType::Int, logits),
          fastmp::empty(per_token, wide, logits),
          fastmp::empty(per_expert, ScalarType::Int, logits),
          fastmp::empty(per_expert, wide, logits),
          fastmp::empty({}, wide, logits),
          fastmp::empty(balance ? per_expert : std::vector<int64_t>{0}, ScalarType::Int, logits)};
}

}  // namespace fastmp
