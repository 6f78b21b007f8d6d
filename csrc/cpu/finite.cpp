// first_not_finite on the CPU: a number is not finite if all bits of its exponent are set.
#include <atomic>

#include "op.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr const char* kOp = "first_not_finite";
constexpr int64_t kBlock = 4096;  // elements searched between two reads of the other threads' result

// Returns the index of the first non-finite element of x[begin, end), or end.
template <class Bits, Bits kExponent>
int64_t search(const void* data, int64_t begin, int64_t end) {
  const Bits* const x = static_cast<const Bits*>(data);
  bool found = false;
  for (int64_t i = begin; i < end; ++i) found |= (x[i] & kExponent) == kExponent;  // no branch, so it vectorises
  if (!found) return end;
  while ((x[begin] & kExponent) != kExponent) ++begin;
  return begin;
}

Tensor first_not_finite(const Tensor& x, const Tensor& wanted) {
  FASTMP_CHECK(x.dim() == 1 && x.is_contiguous(), kOp, ": x must be a contiguous vector, got ", described(x));
  FASTMP_CHECK(wanted.numel() == 1 && wanted.scalar_type() == ScalarType::Bool, kOp, ": wanted must be one bool, got ",
               described(wanted));
  const ScalarType type = x.scalar_type();
  const auto find = type == ScalarType::Double     ? search<uint64_t, 0x7ff0000000000000>
                    : type == ScalarType::Float    ? search<uint32_t, 0x7f800000>
                    : type == ScalarType::BFloat16 ? search<uint16_t, 0x7f80>
                                                   : search<uint16_t, 0x7c00>;
  FASTMP_CHECK(type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
                   type == ScalarType::Half,
               kOp, ": x must be float64, float32, bfloat16 or float16, got ", dtype_name(type));
  const int64_t size = x.numel();
  std::atomic<int64_t> first{size};
  if (*static_cast<const bool*>(wanted.const_data_ptr())) {
    // Each thread searches its range block by block, and stops beyond the smallest index found by any thread.
    const void* const data = x.const_data_ptr();
    parallel_for(0, size, 16 * kBlock, [&](int64_t begin, int64_t end) {
      for (; begin < std::min(end, first.load(std::memory_order_relaxed)); begin += kBlock) {
        const int64_t until = std::min(begin + kBlock, end), at = find(data, begin, until);
        if (at == until) continue;
        int64_t known = first.load(std::memory_order_relaxed);
        while (at < known && !first.compare_exchange_weak(known, at)) {
        }
        return;
      }
    });
  }
  Tensor result = empty({}, ScalarType::Long, x);
  *static_cast<int64_t*>(result.mutable_data_ptr()) = first.load();
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) { FASTMP_IMPL(m, "first_not_finite", first_not_finite); }

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
