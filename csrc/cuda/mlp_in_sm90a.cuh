// The first GEMM of every expert's MLP with fused activation, by CUTLASS, for sm_90a.
//
// The grouped kernel of gemm_sm90a.cuh with two parts of its own. A tile of the weights is 128 rows of gates and the
// 128 rows of ups that belong to them: of the two blocks that share it, each fetches one kind, so that this costs
// nothing but another coordinate. A thread then has the gate and the up of a column among its sums, and the epilogue
// needs no shared memory, which leaves more for the tiles under way.
#pragma once

#include "epilogue.cuh"
#include "gemm_sm90a.cuh"

namespace fastmp {

// `Mainloop`, whose tiles have gates in their left half and ups in their right half.
template <class Mainloop>
struct PairedMainloop : Mainloop {
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(const ProblemShape& problem, const typename Mainloop::Params& params) const {
    const auto [a, b] = Mainloop::load_init(problem, params);
    return cute::make_tuple(a, cute::make_tensor(b.data(), paired(b.layout(), cute::get<1>(problem) / 2)));
  }

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
  using Tiles = decltype(PairedMainloop<Mainloop>::paired(std::declval<Tiled>().layout(), Int<kWidth>{}));
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

// y, and h where it is kept, of every expert's rows; problems are those of h.
template <bool kGated, class T>
void multiply_activated(const char* op, const Problems& problems, const MlpIn<T>& mlp, const Tensor& like,
                        cudaStream_t stream) {
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<MlpInEpilogue<T, kGated>>;
  using Plain = GroupedMainloop<T, false, true, sizeof(typename Epilogue::SharedStorage)>;
  using Mainloop = std::conditional_t<kGated, PairedMainloop<Plain>, Plain>;
  static_assert(fetches_from<Plain, 0, 128, 128> && fetches_from<Plain, 1, 128, 1128>);
  run_grouped<Mainloop, Epilogue>(op, problems, {mlp, problems.starts}, like, stream);
}

}  // namespace fastmp
