// Every number that a tile of a grouped GEMM holds, by the coordinates and the tensor maps of gemm_sm90a.cuh, without a
// GPU: the driver's encoder of tensor maps is replaced, and the TMA unit's arithmetic done here.
#include "gemm_sm90a.cuh"

#include <cstdio>
#include <cstring>

struct Encoded {  // in place of the driver's 128 bytes
  uint64_t base, sizes[5], strides[5];
};

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t*,
                                           const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Encoded encoded{reinterpret_cast<uint64_t>(base), {1, 1, 1, 1, 1}, {2}};
  for (unsigned i = 0; i < rank; ++i) {
    encoded.sizes[i] = sizes[i];
    if (i > 0) encoded.strides[i] = strides[i - 1];
    if (sizes[i] > uint64_t{1} << 32 || encoded.strides[i] >= uint64_t{1} << 40 || (i > 0 && encoded.strides[i] % 16)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  static_assert(sizeof(Encoded) <= sizeof(CUtensorMap));
  std::memcpy(map, &encoded, sizeof encoded);
  return CUDA_SUCCESS;
}

namespace fastmp {
namespace {

constexpr uint64_t kZero = 0;  // for the address of a number beyond the bounds
int64_t checked = 0, wrong = 0;

// Compares the addresses of a tile with those of `expected(line, term)`.
template <class Map, class Tile, class Expected>
void check(const Map& map, const Tile& tile, int first_line, int first_term, const Expected& expected) {
  Encoded encoded;
  std::memcpy(&encoded, map.get_tma_descriptor(), sizeof encoded);
  for (int i = 0; i < cute::size<0>(tile); ++i) {
    for (int j = 0; j < cute::size<1>(tile); ++j) {
      const auto coordinates = tile(i, j);
      uint64_t address = encoded.base;
      bool inside = true;
      int dim = 0;
      cute::for_each(coordinates, [&](auto coordinate) {
        inside = inside && coordinate >= 0 && static_cast<uint64_t>(coordinate) < encoded.sizes[dim];
        address += static_cast<uint64_t>(coordinate) * encoded.strides[dim++];
      });
      ++checked;
      wrong += (inside ? address : kZero) != expected(first_line + i, first_term + j);
    }
  }
}

// Rows that start at `start`, for each expert, in one matrix with a pitch.
template <bool kTerms, bool kColumnsB, bool kPaired>
void check_maps(int64_t pitch_a, int64_t pitch_b) {
  using Plain = GroupedMainloop<__nv_bfloat16, kTerms, kColumnsB>;
  using Mainloop = OneMapMainloop<Plain, kTerms, kColumnsB, kPaired>;
  constexpr int kCount = 4, kN = 528, kK = 136;
  const int starts[kCount] = {0, 70, 70, 331}, rows[kCount] = {70, 0, 261, 1};
  const int64_t jump = (kColumnsB ? kK : kN) * pitch_b;
  const Operand a{reinterpret_cast<const void*>(uint64_t{0x302000000}), pitch_a, 0};
  const Operand b{reinterpret_cast<const void*>(uint64_t{0x7f0000000400}), pitch_b, kTerms ? 0 : jump};
  const auto params = Mainloop::to_underlying_arguments(0, {a, b, kCount, kN, kK, starts}, nullptr);
  // Row `row` of the expert's, and a column.
  const auto at = [&](const Operand& operand, int expert, int64_t row, int64_t column, int64_t width) {
    if (row >= rows[expert] || column >= width) return kZero;
    return reinterpret_cast<uint64_t>(operand.base) + 2 * ((starts[expert] + row) * operand.pitch + column);
  };
  for (int expert = 0; expert < kCount; ++expert) {
    const auto problem = kTerms ? cute::make_tuple(kN, kK, rows[expert], 1) : cute::make_tuple(rows[expert], kN, kK, 1);
    const auto [tiles_a, tiles_b] = Mainloop::tiles_of(problem, params, expert, starts[expert]);
    for (int k = 0; k < cute::size<3>(tiles_a); ++k) {
      for (int m = 0; m < cute::size<2>(tiles_a) + 1; ++m) {  // a cluster has two tiles, of which one may be beyond m
        check(params.tma_load_a, tiles_a(cute::_, cute::_, m, k, 0), 128 * m, 64 * k, [&](int line, int term) {
          return kTerms ? at(a, expert, term, line, kN) : at(a, expert, line, term, kK);
        });
      }
      for (int n = 0; n < cute::size<2>(tiles_b); ++n) {
        check(params.tma_load_b, tiles_b(cute::_, cute::_, n, k, 0), 0, 64 * k, [&](int line, int term) {
          if (kTerms) return at(b, expert, term, 256 * n + line, kK);
          const int column = kPaired ? 128 * n + line % 128 + line / 128 * (kN / 2) : 256 * n + line;
          if (column >= kN || term >= kK) return kZero;
          return reinterpret_cast<uint64_t>(b.base) +
                 2 * (expert * jump + (kColumnsB ? term * pitch_b + column : column * pitch_b + term));
        });
      }
    }
  }
}

}  // namespace
}  // namespace fastmp

int main() {
  using fastmp::check_maps;
  const int64_t far = (int64_t{1} << 34) + 528;  // farther than a stride that takes rows back
  for (const int64_t pitch : {int64_t{528}, int64_t{4096}, far}) {
    check_maps<true, true, false>(pitch, pitch + 8);
    check_maps<false, false, false>(pitch, 136);
    check_maps<false, true, false>(pitch, 528);
    check_maps<false, false, true>(pitch, 136);
  }
  std::printf("%lld of %lld wrong\n", static_cast<long long>(fastmp::wrong), static_cast<long long>(fastmp::checked));
}
