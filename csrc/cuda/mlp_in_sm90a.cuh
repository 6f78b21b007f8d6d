// The first GEMM of every expert's MLP with fused activation, by CUTLASS, for sm_90a.
//
// The grouped kernel of gemm_sm90a.cuh with three parts of its own. Both operands have one tensor map, in which an
// expert begins at a coordinate: nothing is rewritten when the expert changes, as after every few tiles of small
// ones. A tile of the weights is 128 rows of gates and the 128 rows of ups that belong to them: of the two blocks that
// share it, each fetches one kind, so that this costs nothing but another coordinate. A thread then has the gate and
// the up of a column among its sums, and the epilogue needs no shared memory, which leaves more for the tiles under
// way.
#pragma once

#include "epilogue.cuh"
#include "gemm_sm90a.cuh"

#include <algorithm>
#include <cstdint>

namespace fastmp {

// `Mainloop` with one tensor map an operand. A tile of rows may have some of the next expert, which are not stored.
// kPaired: tiles of weights have gates in their left half and ups in their right half.
template <class Mainloop, bool kPaired>
struct OneMapMainloop : Mainloop {
  using Maps = cute::tuple<const cute::TmaDescriptor*, const cute::TmaDescriptor*>;
  struct Arguments {
    const void *x, *w;  // (num_rows, k), rows x_stride elements apart; (count, n, k)
    int64_t num_rows, num_columns, k, x_stride, w_stride;  // num_columns: of all experts
    const int64_t* starts;  // the experts' first rows
  };
  struct Params : Mainloop::Params {
    const int64_t* starts;
  };

  template <class Map, class Copy, class Element, class Stride, class Layout, class Shape, class Cluster>
  static Map map_of(Copy copy, const void* data, Element, int64_t rows, int64_t k, Stride stride, Layout layout,
                    Shape tile, Cluster cluster) {
    const auto whole = cute::make_shape(static_cast<int>(rows), static_cast<int>(k), 1);
    const auto tensor = cute::make_tensor(static_cast<const Element*>(data), cute::make_layout(whole, stride));
    return cute::make_tma_copy(copy, tensor, layout(cute::_, cute::_, cute::Int<0>{}), tile, cluster);
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& given, void*) {
    using namespace cute;
    using Tile = typename Mainloop::TileShape;
    using Cluster = typename Mainloop::DispatchPolicy::ClusterShape;
    Params params{};
    params.tma_load_a = map_of<typename Mainloop::TMA_A>(
        typename Mainloop::GmemTiledCopyA{}, given.x, typename Mainloop::InternalElementA{}, given.num_rows, given.k,
        typename Mainloop::InternalStrideA{given.x_stride, {}, {}}, typename Mainloop::SmemLayoutA{},
        make_shape(shape<0>(Tile{}), shape<2>(Tile{})), size<1>(Cluster{}));
    params.tma_load_b = map_of<typename Mainloop::TMA_B>(
        typename Mainloop::GmemTiledCopyB{}, given.w, typename Mainloop::InternalElementB{}, given.num_columns,
        given.k, typename Mainloop::InternalStrideB{given.w_stride, {}, {}}, typename Mainloop::SmemLayoutB{},
        make_shape(shape<1>(Tile{}), shape<2>(Tile{})), size<0>(Cluster{}));
    params.tma_transaction_bytes = Mainloop::TmaTransactionBytes;
    params.starts = given.starts;
    return params;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&, int) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments& given) {
    return std::max(given.num_rows, given.num_columns) <= INT32_MAX - 256;  // coordinates of TMA, and a tile
  }

  // The tiles of an expert, whose rows and weights begin at these coordinates.
  template <class ProblemShape>
  CUTLASS_DEVICE auto tiles_from(const ProblemShape& problem, const Params& params, int row, int column) const {
    const auto [a, b] = Mainloop::load_init(problem, params);
    static_assert(cute::is_same_v<std::decay_t<decltype(cute::stride<0>(a.layout()))>, cute::E<1>> &&
                  cute::is_same_v<std::decay_t<decltype(cute::stride<0>(b.layout()))>, cute::E<1>>);
    const auto weights = [&] {
      if constexpr (kPaired) return paired(b.layout(), cute::get<1>(problem) / 2);
      if constexpr (!kPaired) return b.layout();
    }();
    return cute::make_tuple(cute::make_tensor(a.data() + row * cute::stride<0>(a.layout()), a.layout()),
                            cute::make_tensor(b.data() + column * cute::stride<0>(b.layout()), weights));
  }
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(const ProblemShape& problem, const Params& params) const {
    return tiles_from(problem, params, 0, 0);
  }
  template <class Tiles, class ProblemShape>
  CUTLASS_DEVICE Tiles tensors_perform_update(const Tiles&, const Params& params, const ProblemShape& problem,
                                              int expert) const {
    return tiles_from(problem, params, static_cast<int>(params.starts[expert]), expert * cute::get<1>(problem));
  }

  template <class Storage>
  CUTLASS_DEVICE Maps tensormaps_init(const Params& params, Storage&, int, int) const {
    return {params.tma_load_a.get_tma_descriptor(), params.tma_load_b.get_tma_descriptor()};
  }
  template <class Storage, class ProblemShape>
  CUTLASS_DEVICE void tensormaps_perform_update(Storage&, const Params&, const Maps&, const ProblemShape&, int) const {}
  template <class Storage>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(Storage&, const Maps&) const {}
  CUTLASS_DEVICE void tensormaps_fence_acquire(const Maps&) const {}

  // The layout (columns, terms, column tiles, term tiles, 1) of coordinates in the weights. Those of gates, or of ups,
  // beyond `width` lead to numbers that are not stored.
  template <class Layout, class Width>
  CUTE_HOST_DEVICE static constexpr auto paired(const Layout& tiled, Width width) {
    using Half = cute::Int<SumsTile::kColumns / 2>;
    const auto column = cute::stride<0>(tiled);
    return cute::make_layout(
        cute::replace<0>(cute::shape(tiled), cute::make_shape(Half{}, cute::_2{})),
        cute::replace<2>(cute::replace<0>(cute::stride(tiled), cute::make_stride(column, width * column)),
                         Half{} * column));
  }
};

// Where block `kBlock` of a cluster begins to fetch the second tile of columns and the third tile of terms.
template <class Mainloop, int kBlock, int kWidth>
constexpr auto fetched_from() {
  using namespace cute;
  using Weights = Layout<Shape<Int<2 * kWidth>, _1024, _1>, Stride<E<1>, E<0>, E<2>>>;
  using Tiled = decltype(local_tile(make_coord_tensor(Weights{}), typename Mainloop::TileShape{}, make_coord(_, _, _),
                                    Step<Underscore, _1, _1>{}));
  using Tiles = decltype(OneMapMainloop<Mainloop, true>::paired(std::declval<Tiled>().layout(), Int<kWidth>{}));
  using Paired = decltype(make_tensor(std::declval<Tiled>().data(), Tiles{}));
  using Tile = decltype(std::declval<Paired>()(_, _, _1{}, _2{}, _0{}));
  using Slice = decltype(typename Mainloop::TMA_B{}.get_slice(Int<kBlock>{}));
  return decltype(std::declval<Slice>().partition_S(std::declval<Tile>())(_0{}, _0{}, _0{})){};
}
template <class Mainloop, int kBlock, int kTerm, int kColumn>
constexpr bool fetches_from =
    fetched_from<Mainloop, kBlock, 1000>() == cute::make_tuple(cute::Int<kTerm>{}, cute::Int<kColumn>{}, cute::_0{});

// Whether the sums of CUTLASS lie where SumsTile has them: places are sums over the bits of thread and element, so that
// one bit at a time is enough.
template <class TiledMma>
constexpr bool lies_as_sums_tile() {
  constexpr auto layout = TiledMma{}.get_layoutC_TV();
  const auto same = [&](int thread, int element) {
    return layout(thread, element) ==
           SumsTile::row(thread, element) + SumsTile::column(thread, element) * SumsTile::kRows;
  };
  bool all = cute::size(layout) == SumsTile::kRows * SumsTile::kColumns && same(0, 0);
  for (int thread = 1; thread < SumsTile::kThreads; thread *= 2) all = all && same(thread, 0);
  for (int element = 1; element < SumsTile::kElements; element *= 2) all = all && same(0, element);
  return all;
}

template <class T, bool kGated>
struct MlpInEpilogue {
  using DispatchPolicy = cutlass::epilogue::PtrArrayNoSmemWarpSpecialized;
  using ThreadEpilogueOp = MlpInEpilogue;
  using ElementC = GroupedElement<T>;
  using ElementD = ElementC;
  using ElementAccumulator = float;
  using StrideC = cutlass::gemm::TagToStrideC_t<cutlass::layout::RowMajor*>;
  using StrideD = StrideC;
  using InternalStrideC = cute::remove_pointer_t<StrideC>;
  using InternalStrideD = InternalStrideC;
  struct SharedStorage {};
  struct Arguments {
    MlpIn<T> mlp;
    const int64_t* starts;
  };
  using Params = Arguments;

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&, int) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit MlpInEpilogue(const Params& params) : params(params) {}

  template <class ProblemShape, class Tile, class Coord, class Sums, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(const ProblemShape& problem, Tile, const Coord& coord, const Sums& accumulators,
                                 TiledMma, const Residue&, int thread, char*) const {
    static_assert(cute::size(Sums{}) == SumsTile::kElements && lies_as_sums_tile<TiledMma>());
    float sums[SumsTile::kElements];
#pragma unroll
    for (int i = 0; i < SumsTile::kElements; ++i) sums[i] = accumulators(i);
    const int64_t expert = cute::get<3>(coord), tile_m = cute::get<0>(coord), tile_n = cute::get<1>(coord);
    store_tile<kGated>(sums, thread, params.mlp, expert, params.starts[expert], cute::get<0>(problem),
                       tile_m * SumsTile::kRows, tile_n * kTileWidth<kGated>);
  }

  Params params;
};

// y, and h where it is kept, of every expert's rows of x (num_rows, k); problems are those of h.
template <bool kGated, class T>
void multiply_activated(const char* op, const Problems& problems, const MlpIn<T>& mlp, const Operand& x,
                        const Operand& w, int64_t num_rows, int64_t k, const Tensor& like, cudaStream_t stream) {
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<MlpInEpilogue<T, kGated>>;
  using Plain = GroupedMainloop<T, false, true, sizeof(typename Epilogue::SharedStorage)>;
  static_assert(fetches_from<Plain, 0, 128, 128> && fetches_from<Plain, 1, 128, 1128>);
  const int64_t num_columns = problems.count * mlp.num_columns;
  run_grouped<OneMapMainloop<Plain, kGated>, Epilogue>(
      op, problems, {x.base, w.base, num_rows, num_columns, k, x.stride, w.stride, problems.starts},
      {mlp, problems.starts}, like, stream);
}

}  // namespace fastmp
