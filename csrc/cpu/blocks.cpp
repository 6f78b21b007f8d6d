// block_rows on the CPU: destinations of rows in order, block by block. Rows before the first block belong to it.
// Reference: fastmp/ops/blocks.py.
#include "op.h"
#include "assignments.h"

#ifdef FASTMP_ISA_BASE

#include <algorithm>
#include <limits>

namespace fastmp {
namespace {

Tensor block_rows(const Tensor& given_starts, const Tensor& given_places, int64_t num_rows) {
  constexpr const char* kOp = "block_rows";
  FASTMP_CHECK(given_starts.scalar_type() == ScalarType::Int && given_starts.dim() == 1, kOp,
               ": starts must be int32 (N,), got ", described(given_starts));
  check_same(kOp, "places", given_places, "starts", given_starts);
  FASTMP_CHECK(num_rows >= 0 && num_rows <= std::numeric_limits<int32_t>::max(), kOp,
               ": num_rows must be from 0 to 2147483647, got ", num_rows);
  const int64_t num_blocks = given_starts.numel();
  FASTMP_CHECK(num_blocks > 0 || num_rows == 0, kOp, ": there are ", num_rows, " rows, but no block");
  const Tensor starts = torch::stable::contiguous(given_starts), places = torch::stable::contiguous(given_places);
  const Tensor row_of = fastmp::empty({num_rows, 1}, ScalarType::Int, starts);
  const auto* begun = static_cast<const int32_t*>(starts.const_data_ptr());
  const auto* place = static_cast<const int32_t*>(places.const_data_ptr());
  auto* out = static_cast<int32_t*>(row_of.mutable_data_ptr());
  parallel_for(0, num_rows, kGrainBytes / 4, [&](int64_t row, int64_t last) {
    // 1. The block of this thread's first row, by binary search. 2. From there block by block.
    int64_t block = std::max<int64_t>(std::upper_bound(begun, begun + num_blocks, row) - begun - 1, 0);
    for (; row < last; ++block) {
      const int64_t next = block + 1 < num_blocks ? begun[block + 1] : last;
      const int64_t end = std::clamp(next, row, last);
      if (place[block] < 0) {
        std::fill(out + row, out + end, -1);
      } else {
        const int64_t first = place[block] + row - begun[block];  // std::iota would count past the last place
        for (int64_t each = row; each < end; ++each) out[each] = static_cast<int32_t>(first + each - row);
      }
      row = end;
    }
  });
  return row_of;
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) { FASTMP_IMPL(m, "block_rows", fastmp::block_rows); }

#endif  // FASTMP_ISA_BASE
