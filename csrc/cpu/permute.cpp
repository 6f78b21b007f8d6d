// permutation, permute and unpermute on the CPU: a stable counting sort, copies of rows, and weighted sums of rows.
//
// The sort counts the experts of blocks of assignments, sums the counts up, and gives out rows block by block: the
// blocks follow from the shape alone, and the rows do not depend on them. Tokens are spread over the threads; no
// two tokens share a row. Half types are computed in fp32 and rounded once. The semantics are those of the
// references in fastmp/ops/permute.py.
#include "op.h"
#include "assignments.h"
#include "fp8.h"
#include "rows.h"
#include "simd.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace fastmp {

// Tokens [begin, end) with `num_slots` rows each. The rows of x or grad, one a token, lie `token_pitch` elements apart,
// those of y `row_pitch`; outputs have no gaps. `probs` may be null. `streamed`: rows of the output are written past
// the caches, which are too small to keep them and need not read what is overwritten. `residual`, without gaps or null,
// is added to what unpermute makes.
struct PairRun {
  const void* tokens;
  const void* residual;
  const void* rows;
  const int32_t* row_of;
  const void* probs;
  void* out;
  void* dprobs;
  int64_t begin, end, num_slots, num_rows, num_cols, token_pitch, row_pitch;
  ScalarType dtype;
  bool streamed;
};

FASTMP_DECLARE(void permute_run(const PairRun&); void unpermute_run(const PairRun&);
               void unpermute_backward_run(const PairRun&);)

namespace FASTMP_ISA {

void permute_run(const PairRun& run) {
  dispatch_float(run.dtype, "permute", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t assignment = run.begin * run.num_slots; assignment < run.end * run.num_slots; ++assignment) {
      const int64_t row = run.row_of[assignment];
      if (row < 0 || row >= run.num_rows) continue;
      const T* from = static_cast<const T*>(run.tokens) + assignment / run.num_slots * run.token_pitch;
      copy_row(static_cast<T*>(run.out) + row * run.num_cols, from, run.num_cols, run.streamed);
    }
    fence();
  });
}

template <typename T>
FASTMP_INLINE void add_row(T* out, const T* row, int64_t num_cols) {
  using V = lanes_of<T>;
  for_vectors<num_lanes<V>>(num_cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
    store(out + col, load(out + col, count, 0) + load(row + col, count, 0), count);
  });
}

void unpermute_run(const PairRun& run) {
  dispatch_float(run.dtype, "unpermute", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = scalar_of<T>;
    RowSum<T> sum(run.num_slots, run.num_cols);
    for (int64_t token = run.begin; token < run.end; ++token) {
      for (int64_t assignment = token * run.num_slots; assignment < (token + 1) * run.num_slots; ++assignment) {
        const int64_t row = run.row_of[assignment];
        if (row < 0 || row >= run.num_rows) continue;
        const S weight = run.probs ? static_cast<const S*>(run.probs)[assignment] : S{1};
        sum.add(static_cast<const T*>(run.rows) + row * run.row_pitch, weight);
      }
      T* out = static_cast<T*>(run.out) + token * run.num_cols;
      sum.finish(out);
      if (run.residual) add_row(out, static_cast<const T*>(run.residual) + token * run.num_cols, run.num_cols);
    }
  });
}

void unpermute_backward_run(const PairRun& run) {
  dispatch_float(run.dtype, "unpermute_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = scalar_of<T>;
    using V = lanes_of<T>;
    alignas(kVectorBytes) T tile[kTile];
    for (int64_t token = run.begin; token < run.end; ++token) {
      const T* grad = static_cast<const T*>(run.tokens) + token * run.token_pitch;
      for (int64_t assignment = token * run.num_slots; assignment < (token + 1) * run.num_slots; ++assignment) {
        const int64_t row = run.row_of[assignment];
        S& dprob = static_cast<S*>(run.dprobs)[assignment];
        dprob = 0;
        if (row < 0 || row >= run.num_rows) continue;
        const T* y = static_cast<const T*>(run.rows) + row * run.row_pitch;
        T* dy = static_cast<T*>(run.out) + row * run.num_cols;
        const S weight = static_cast<const S*>(run.probs)[assignment];
        V dots = broadcast<V>(0);
        for (int64_t first = 0; first < run.num_cols; first += kTile) {
          const int64_t count = std::min(kTile, run.num_cols - first);
          T* to = run.streamed ? tile : dy + first;
          weigh<true>(grad + first, y + first, weight, to, count, dots);
          if (run.streamed) copy_row(dy + first, tile, count, true);
        }
        dprob = sum(dots);
      }
    }
    fence();
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int64_t kBlockAssignments = 65536;  // of the sort: fewer are not worth a second thread

std::tuple<Tensor, Tensor> permutation(const Tensor& given, int64_t num_experts) {
  FASTMP_CHECK(given.scalar_type() == ScalarType::Int, "permutation: indices must be int32, got ",
               dtype_name(given.scalar_type()));
  FASTMP_CHECK(num_experts > 0 && num_experts <= std::numeric_limits<int32_t>::max(),
               "permutation: num_experts must be from 1 to 2147483647, got ", num_experts);
  FASTMP_CHECK(given.numel() <= std::numeric_limits<int32_t>::max(), "permutation: rows are numbered in int32, got ",
               given.numel(), " indices");
  const Tensor indices = torch::stable::contiguous(given);
  const Tensor row_of = fastmp::empty(indices.sizes(), ScalarType::Int, indices);
  const Tensor offsets = fastmp::empty({num_experts}, ScalarType::Int, indices);
  const auto* experts = static_cast<const int32_t*>(indices.const_data_ptr());
  auto* rows = static_cast<int32_t*>(row_of.mutable_data_ptr());
  auto* ends = static_cast<int32_t*>(offsets.mutable_data_ptr());
  const int64_t num_assignments = indices.numel();
  const int64_t num_blocks = (num_assignments + kBlockAssignments - 1) / kBlockAssignments;
  std::vector<int32_t> counts(num_blocks * num_experts);
  const auto over_blocks = [&](const auto& body) {  // body(expert, assignment, count of its block and expert)
    parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        int32_t* own = counts.data() + block * num_experts;
        const int64_t block_end = std::min(num_assignments, (block + 1) * kBlockAssignments);
        for (int64_t i = block * kBlockAssignments; i < block_end; ++i) {
          body(i, experts[i] < 0 || experts[i] >= num_experts ? nullptr : own + experts[i]);
        }
      }
    });
  };
  // 1. Count the assignments of each block and expert.
  over_blocks([&](int64_t, int32_t* count) {
    if (count) ++*count;
  });
  // 2. Exclusive prefix sum, by expert, then by block: the first row of each block and expert.
  int32_t row = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      row += std::exchange(counts[block * num_experts + expert], row);
    }
    ends[expert] = row;
  }
  // 3. Give out the rows; -1 without an expert.
  over_blocks([&](int64_t assignment, int32_t* next) { rows[assignment] = next ? (*next)++ : -1; });
  return {row_of, offsets};
}

void check_assignments(const char* op, const Tensor& tokens, const Tensor& row_of, const Tensor* probs,
                       ScalarType dtype) {
  FASTMP_CHECK(row_of.dim() == 2 && row_of.scalar_type() == ScalarType::Int, op, ": row_of must be int32 (T, k), got ",
               dtype_name(row_of.scalar_type()), " of ", row_of.dim(), " dimensions");
  FASTMP_CHECK(tokens.dim() == 2, op, ": expected a matrix, got ", tokens.dim(), " dimensions");
  dispatch_float(dtype, op, [](auto) {});
  if (!probs) return;
  const ScalarType wanted = compute_dtype(dtype);
  FASTMP_CHECK(probs->scalar_type() == wanted && probs->dim() == 2 && probs->size(0) == row_of.size(0) &&
                   probs->size(1) == row_of.size(1),
               op, ": probs must be ", dtype_name(wanted), " of the shape of row_of, got ",
               dtype_name(probs->scalar_type()), " of ", probs->numel(), " elements for ", row_of.numel());
}

// Clears the rows of `out` that no assignment maps to, and calls also(row) for each.
template <class Also>
void zero_unused(const Tensor& out, const int32_t* row_of, int64_t num_assignments, const Also& also) {
  const int64_t num_rows = out.size(0), bytes = out.size(1) * static_cast<int64_t>(out.element_size());
  std::vector<char> used(num_rows);
  for (int64_t assignment = 0; assignment < num_assignments; ++assignment) {
    if (row_of[assignment] >= 0 && row_of[assignment] < num_rows) used[row_of[assignment]] = 1;
  }
  char* base = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(0, num_rows, token_grain(1, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (used[row]) continue;
      std::memset(base + row * bytes, 0, bytes);
      also(row);
    }
  });
}
void zero_unused(const Tensor& out, const int32_t* row_of, int64_t num_assignments) {
  zero_unused(out, row_of, num_assignments, [](int64_t) {});
}

// The run of all tokens with their rows in `rows`, on `row_of` without gaps.
PairRun run_of(const Tensor& rows, int64_t pitch, const Tensor& row_of) {
  PairRun run{};
  run.rows = rows.const_data_ptr();
  run.row_of = static_cast<const int32_t*>(row_of.const_data_ptr());
  run.num_slots = row_of.size(1);
  run.num_rows = rows.size(0);
  run.num_cols = rows.size(1);
  run.row_pitch = pitch;
  run.dtype = rows.scalar_type();
  run.streamed = rows.numel() * static_cast<int64_t>(rows.element_size()) >= kStreamedBytes;
  return run;
}

template <class Kernel>
void over_tokens(const Kernel& kernel, const PairRun& whole, int64_t num_tokens, int64_t itemsize) {
  parallel_for(0, num_tokens, token_grain(whole.num_slots, whole.num_cols * itemsize), [&](int64_t begin, int64_t end) {
    PairRun run = whole;
    run.begin = begin;
    run.end = end;
    kernel(run);
  });
}

void check_permuted(const char* op, const Tensor& x, const Tensor& row_of, int64_t num_rows, ScalarType dtype) {
  check_assignments(op, x, row_of, nullptr, dtype);
  FASTMP_CHECK(num_rows <= std::numeric_limits<int32_t>::max(), op, ": num_rows must be from 0 to 2147483647, got ",
               num_rows);
  FASTMP_CHECK(row_of.size(0) == x.size(0) && num_rows >= 0, op, ": row_of of ", row_of.size(0),
               " tokens does not fit x of ", x.size(0), ", or num_rows is negative: ", num_rows);
}

Tensor permute(const Tensor& x, const Tensor& given, int64_t num_rows) {
  check_permuted("permute", x, given, num_rows, x.scalar_type());
  const Tensor out = fastmp::empty({num_rows, x.size(1)}, x.scalar_type(), x);
  if (out.numel() == 0) return out;
  const Tensor row_of = torch::stable::contiguous(given);
  zero_unused(out, static_cast<const int32_t*>(row_of.const_data_ptr()), row_of.numel());
  if (row_of.numel() == 0) return out;
  const Rows tokens(x);
  PairRun run = run_of(out, x.size(1), row_of);
  run.tokens = tokens.tensor.const_data_ptr();
  run.token_pitch = tokens.pitch;
  run.out = out.mutable_data_ptr();
  over_tokens([](const PairRun& part) { FASTMP_BEST(permute_run)(part); }, run, x.size(0), x.element_size());
  return out;
}

// Copies a row of FP8 numbers and its scales to row `to` of `out`.
void copy_quantized(const QuantizedRows& from, const QuantizedRows& out, int64_t to) {
  const QuantizedRows row = out.part(to, 1, nullptr);
  std::memcpy(row.q, from.q, out.num_cols);
  const auto copy = [&](auto tag) {
    using Scale = typename decltype(tag)::type;
    const auto* s = static_cast<const Scale*>(from.s);
    for (int64_t i = 0; i < out.num_cols / out.block; ++i)
      static_cast<Scale*>(row.s)[i * out.s_col] = s[i * from.s_col];
  };
  out.block == 128 ? copy(TypeTag<float>{}) : copy(TypeTag<uint8_t>{});
}

// permute of rows that are FP8 numbers with `scales`, or become so: a token is quantised into its first row.
std::tuple<Tensor, Tensor> permute_quantized(const Tensor& x, std::optional<Tensor> scales, const Tensor& given,
                                             int64_t num_rows, int64_t block, ScalarType dtype) {
  constexpr const char* kOp = "permute_quantized";
  check_permuted(kOp, x, given, num_rows, scales ? ScalarType::Float : x.scalar_type());
  dispatch_fp8(dtype, kOp, [](auto) {});
  FASTMP_CHECK(!scales || (x.scalar_type() == dtype && block_of(kOp, *scales) == block && scales->dim() == 2 &&
                           scales->size(0) == x.size(0) && scales->size(1) * block == x.size(1)),
               kOp, ": x is ", described(x), ", which does not fit its scales, block ", block, " or ",
               dtype_name(dtype));
  Tensor s = empty_row_scales(kOp, num_rows, x.size(1), block, x);
  Tensor q = fastmp::empty({num_rows, x.size(1)}, dtype, x);
  if (q.numel() == 0) return {q, s};
  const Tensor row_of = torch::stable::contiguous(given);
  const auto* rows = static_cast<const int32_t*>(row_of.const_data_ptr());
  const QuantizedRows out = rows_into(q, s, block, scales ? ScalarType::Float : x.scalar_type());
  // 1. Rows that no assignment maps to: zeros, whose scales are one.
  zero_unused(q, rows, row_of.numel(), [&](int64_t row) {
    const QuantizedRows unused = out.part(row, 1, nullptr);
    for (int64_t i = 0; i < out.num_cols / block; ++i) {
      block == 128 ? void(static_cast<float*>(unused.s)[i * out.s_col] = 1.0f)
                   : void(static_cast<uint8_t*>(unused.s)[i * out.s_col] = 127);
    }
  });
  if (row_of.numel() == 0) return {q, s};
  // 2. The rows of each token.
  const Rows tokens(x);
  QuantizedRows from = out;
  if (scales) {
    from.q = static_cast<uint8_t*>(const_cast<void*>(tokens.tensor.const_data_ptr())), from.q_pitch = tokens.pitch;
    from.s = const_cast<void*>(scales->const_data_ptr()), from.s_row = scales->stride(0),
    from.s_col = scales->stride(1);
  }
  const int64_t num_slots = row_of.size(1), itemsize = static_cast<int64_t>(x.element_size());
  parallel_for(0, x.size(0), token_grain(num_slots, out.num_cols), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      std::optional<QuantizedRows> first;
      if (scales) first = from.part(token, 1, nullptr);
      for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int64_t row = rows[token * num_slots + slot];
        if (row < 0 || row >= num_rows) continue;
        if (first) {
          copy_quantized(*first, out, row);
        } else {
          first = out.part(row, 1, at(tokens.tensor.const_data_ptr(), token * tokens.pitch, itemsize));
          FASTMP_BEST(quantize_rows)(*first);
        }
      }
    }
  });
  return {q, s};
}

// Sums into `out`, which has no gaps, onto `residual` (or null).
void sum_into(const Tensor& y, const Tensor& given, std::optional<Tensor> probs, const Tensor* residual, Tensor& out) {
  if (out.numel() == 0) return;
  if (y.numel() == 0 || given.numel() == 0) {
    residual ? torch::stable::copy_(out, *residual) : torch::stable::zero_(out);
    return;
  }
  const Tensor row_of = torch::stable::contiguous(given);
  if (probs) probs = torch::stable::contiguous(*probs);
  const Rows rows(y);
  PairRun run = run_of(rows.tensor, rows.pitch, row_of);
  if (probs) run.probs = probs->const_data_ptr();
  const Tensor added = residual ? torch::stable::contiguous(*residual) : out;
  if (residual) run.residual = added.const_data_ptr();
  run.out = out.mutable_data_ptr();
  over_tokens([](const PairRun& part) { FASTMP_BEST(unpermute_run)(part); }, run, out.size(0), y.element_size());
}

Tensor unpermute(const Tensor& y, const Tensor& row_of, std::optional<Tensor> probs) {
  check_assignments("unpermute", y, row_of, probs ? &*probs : nullptr, y.scalar_type());
  Tensor out = fastmp::empty({row_of.size(0), y.size(1)}, y.scalar_type(), y);
  sum_into(y, row_of, probs, nullptr, out);
  return out;
}

// Whether a kernel can write to `out` while it reads the others.
bool is_place(const Tensor& out, const Tensor& y, const Tensor& row_of, const Tensor* probs, const Tensor* other) {
  return out.is_contiguous() && !overlaps(out, y) && !overlaps(out, row_of) && !(probs && overlaps(out, *probs)) &&
         !(other && overlaps(out, *other));
}

void unpermute_into(const Tensor& y, const Tensor& row_of, std::optional<Tensor> probs, Tensor& out) {
  check_assignments("unpermute_into", y, row_of, probs ? &*probs : nullptr, y.scalar_type());
  FASTMP_CHECK(out.scalar_type() == y.scalar_type() && out.dim() == 2 && out.size(0) == row_of.size(0) &&
                   out.size(1) == y.size(1),
               "unpermute_into: out ", described(out), " fits neither y ", described(y), " nor row_of ",
               described(row_of));
  if (is_place(out, y, row_of, probs ? &*probs : nullptr, nullptr)) return sum_into(y, row_of, probs, nullptr, out);
  torch::stable::copy_(out, unpermute(y, row_of, probs));
}

void check_residual(const char* op, const Tensor& y, const Tensor& row_of, const std::optional<Tensor>& probs,
                    const Tensor& residual) {
  check_assignments(op, y, row_of, probs ? &*probs : nullptr, y.scalar_type());
  FASTMP_CHECK(residual.scalar_type() == y.scalar_type() && residual.dim() == 2 && residual.size(0) == row_of.size(0) &&
                   residual.size(1) == y.size(1),
               op, ": residual ", described(residual), " fits neither y ", described(y), " nor row_of ",
               described(row_of));
}

Tensor unpermute_add(const Tensor& y, const Tensor& row_of, std::optional<Tensor> probs, const Tensor& residual) {
  check_residual("unpermute_add", y, row_of, probs, residual);
  Tensor out = fastmp::empty(residual.sizes(), y.scalar_type(), y);
  sum_into(y, row_of, probs, &residual, out);
  return out;
}

void unpermute_add_into(const Tensor& y, const Tensor& row_of, std::optional<Tensor> probs, const Tensor& residual,
                        Tensor& out) {
  check_residual("unpermute_add_into", y, row_of, probs, residual);
  check_same("unpermute_add_into", "out", out, "residual", residual);
  if (is_place(out, y, row_of, probs ? &*probs : nullptr, &residual)) return sum_into(y, row_of, probs, &residual, out);
  torch::stable::copy_(out, unpermute_add(y, row_of, probs, residual));
}

// The gradient of y; that of probs goes to `dprobs`, which has no gaps.
Tensor gradients_of(const char* op, const Tensor& grad, const Tensor& y, const Tensor& given, const Tensor& given_probs,
                    Tensor& dprobs) {
  check_assignments(op, grad, given, &given_probs, y.scalar_type());
  FASTMP_CHECK(y.dim() == 2 && grad.scalar_type() == y.scalar_type() && grad.size(1) == y.size(1) &&
                   grad.size(0) == given.size(0),
               op, ": grad of ", grad.size(0), " rows and ", grad.numel(), " elements fits neither y of ", y.numel(),
               " elements nor row_of of ", given.size(0), " tokens, or is of another dtype");
  Tensor dy = fastmp::empty(y.sizes(), y.scalar_type(), y);
  if (y.numel() == 0 || given.numel() == 0) {
    torch::stable::zero_(dy);
    torch::stable::zero_(dprobs);
    return dy;
  }
  const Tensor row_of = torch::stable::contiguous(given), probs = torch::stable::contiguous(given_probs);
  const Rows rows(y), tokens(grad);
  zero_unused(dy, static_cast<const int32_t*>(row_of.const_data_ptr()), row_of.numel());
  PairRun run = run_of(rows.tensor, rows.pitch, row_of);
  run.tokens = tokens.tensor.const_data_ptr();
  run.token_pitch = tokens.pitch;
  run.probs = probs.const_data_ptr();
  run.out = dy.mutable_data_ptr();
  run.dprobs = dprobs.mutable_data_ptr();
  over_tokens([](const PairRun& part) { FASTMP_BEST(unpermute_backward_run)(part); }, run, grad.size(0),
              y.element_size());
  return dy;
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& grad, const Tensor& y, const Tensor& row_of,
                                              const Tensor& probs) {
  Tensor dprobs = fastmp::empty(probs.sizes(), probs.scalar_type(), y);
  const Tensor dy = gradients_of("unpermute_backward", grad, y, row_of, probs, dprobs);
  return {dy, dprobs};
}

Tensor unpermute_backward_into(const Tensor& grad, const Tensor& y, const Tensor& row_of, const Tensor& probs,
                               Tensor& out) {
  constexpr const char* kOp = "unpermute_backward_into";
  check_same(kOp, "out", out, "probs", probs);
  if (is_place(out, y, row_of, &probs, &grad)) return gradients_of(kOp, grad, y, row_of, probs, out);
  const auto [dy, dprobs] = unpermute_backward(grad, y, row_of, probs);
  torch::stable::copy_(out, dprobs);
  return dy;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "permutation", fastmp::permutation);
  FASTMP_IMPL(m, "permute", fastmp::permute);
  FASTMP_IMPL(m, "permute_quantized", fastmp::permute_quantized);
  FASTMP_IMPL(m, "unpermute", fastmp::unpermute);
  FASTMP_IMPL(m, "unpermute_into", fastmp::unpermute_into);
  FASTMP_IMPL(m, "unpermute_add", fastmp::unpermute_add);
  FASTMP_IMPL(m, "unpermute_add_into", fastmp::unpermute_add_into);
  FASTMP_IMPL(m, "unpermute_backward", fastmp::unpermute_backward);
  FASTMP_IMPL(m, "unpermute_backward_into", fastmp::unpermute_backward_into);
}

#endif  // FASTMP_ISA_BASE
