// Grouped GEMM of bf16 or fp16 matrices whose sizes are on the device, by CUTLASS, for sm_90a.
//
// One persistent launch for all problems: a warp group loads tiles with TMA, multicast to the two blocks of a cluster,
// two others multiply 128 x 256 tiles. Three parts are not CUTLASS's:
// - Each operand has one tensor map, in which an expert begins at a coordinate: nothing is rewritten when the expert
//   changes, as after every few tiles of small ones.
// - The epilogue stores sums from registers, and only those of the expert's own rows: without shared memory, which
//   leaves more for the tiles under way.
// - A tile of gated weights is 128 rows of gates and the 128 rows of ups that belong to them: of the two blocks that
//   share it, each fetches one kind, so that this costs nothing but another coordinate. A thread then has the gate and
//   the up of a column among its sums.
#pragma once

#include "epilogue.cuh"
#include "problems.cuh"

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <cstdint>

namespace fastmp {

using GroupedTile = cute::Shape<cute::_128, cute::_256, cute::_64>;
using GroupedCluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
template <class T>  // CUTLASS's name of T
using GroupedElement = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, cutlass::bfloat16_t, cutlass::half_t>;

// Strides of an operand: (lines, terms, further dimensions of its tensor map). A line makes a row or a column of the
// result. kColumns: neighbours in memory belong to one term.
template <bool kColumns, class Further>
using GroupedStride =
    std::conditional_t<kColumns, cute::Stride<cute::_1, int64_t, Further>, cute::Stride<int64_t, cute::_1, Further>>;
using RaggedStride = cute::Stride<int64_t, int64_t>;  // back, and to an expert's end: see problems.cuh

// kTerms: an expert's rows of a and b are terms. Otherwise only a has rows, and b is one matrix an expert.
template <class T, bool kTerms, bool kColumnsB>
using GroupedMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, GroupedElement<T>, GroupedStride<kTerms, RaggedStride>*,
    kLanes<T>, GroupedElement<T>, GroupedStride<kColumnsB, std::conditional_t<kTerms, RaggedStride, int64_t>>*,
    kLanes<T>, float, GroupedTile, GroupedCluster, cutlass::gemm::collective::StageCountAutoCarveout<0>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

// Base of a mainloop or an epilogue that needs no memory of its own and supports all problems.
struct WithoutWorkspace {
  template <class ProblemShape, class Arguments>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&, int) {
    return 0;
  }
  template <class ProblemShape, class Arguments>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape, class Arguments>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }
};

// `Mainloop` with one tensor map an operand. kPaired: tiles of b have gates in their left half and ups in their right.
template <class Mainloop, bool kTerms, bool kColumnsB, bool kPaired>
struct OneMapMainloop : Mainloop, WithoutWorkspace {
  using WithoutWorkspace::can_implement, WithoutWorkspace::get_workspace_size, WithoutWorkspace::initialize_workspace;
  using Tile = typename Mainloop::TileShape;
  using Maps = cute::tuple<const cute::TmaDescriptor*, const cute::TmaDescriptor*>;
  struct Arguments {
    Operand a, b;
    int count, n, k;  // experts, and the sizes that all of them share, as in make_problems_kernel
    const int* starts;
  };
  struct Params : Mainloop::Params {
    const int* starts;
  };

  template <bool kColumns, class Further>
  static auto layout_of(int lines, int terms, int64_t pitch, Further further) {
    using namespace cute;
    if constexpr (kColumns) return make_layout(make_layout(lines, _1{}), make_layout(terms, pitch), further);
    if constexpr (!kColumns) return make_layout(make_layout(lines, pitch), make_layout(terms, _1{}), further);
  }
  // The layout of rows that further dimensions move to their bound: terms, or rows of `size` terms.
  static auto ragged(const Operand& rows, int size) {
    const auto further = cute::make_layout(cute::make_shape(kMaxSteps, kMaxSteps),
                                           cute::make_stride(back_stride(rows.pitch), rows.pitch));
    return layout_of<kTerms>(kTerms ? size : kMaxRows, kTerms ? kMaxRows : size, rows.pitch, further);
  }
  template <class Map, class Element, class Copy, class Layout, class Shared, class Box, class Cluster>
  static Map map_of(Copy copy, const void* data, Layout layout, Shared shared, Box box, Cluster cluster) {
    const auto tensor = cute::make_tensor(static_cast<const Element*>(data), layout);
    return cute::make_tma_copy(copy, tensor, shared(cute::_, cute::_, cute::Int<0>{}), box, cluster);
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& given, void*) {
    using namespace cute;
    using Cluster = typename Mainloop::DispatchPolicy::ClusterShape;
    const auto layout_b = [&] {
      const auto experts = make_layout(given.count, given.b.jump);
      if constexpr (kTerms) return ragged(given.b, given.k);
      if constexpr (!kTerms) return layout_of<kColumnsB>(given.n, given.k, given.b.pitch, experts);
    }();
    Params params{};
    params.tma_load_a = map_of<typename Mainloop::TMA_A, typename Mainloop::InternalElementA>(
        typename Mainloop::GmemTiledCopyA{}, given.a.base, ragged(given.a, kTerms ? given.n : given.k),
        typename Mainloop::SmemLayoutA{}, make_shape(shape<0>(Tile{}), shape<2>(Tile{})), size<1>(Cluster{}));
    params.tma_load_b = map_of<typename Mainloop::TMA_B, typename Mainloop::InternalElementB>(
        typename Mainloop::GmemTiledCopyB{}, given.b.base, layout_b, typename Mainloop::SmemLayoutB{},
        make_shape(shape<1>(Tile{}), shape<2>(Tile{})), size<0>(Cluster{}));
    params.tma_transaction_bytes = Mainloop::TmaTransactionBytes;
    params.starts = given.starts;
    return params;
  }

  // The tiles (lines, terms, tiles of lines, tiles of terms, 1) of a matrix of this shape that begins at `first`.
  template <class Map, class Shape, class Coord, class Step>
  CUTE_HOST_DEVICE static auto tiles_from(const Map& map, const Shape& shape, const Coord& first, Step step) {
    using namespace cute;
    const auto tiled = local_tile(domain_offset(first, map.get_tma_tensor(shape)), Tile{}, make_coord(_, _, _), step);
    return make_tensor(tiled.data(), append(take<0, 4>(tiled.layout()), make_layout(1, _0{})));
  }
  // The tiles of both operands of an expert whose rows begin with row `start`.
  template <class ProblemShape>
  CUTE_HOST_DEVICE static auto tiles_of(const ProblemShape& problem, const Params& params, int expert, int start) {
    using namespace cute;
    const auto m = get<0>(problem), n = get<1>(problem), k = get<2>(problem);
    const FirstRow first(start, kTerms ? k : m);
    const auto ones = make_shape(1, 1), moved = make_coord(first.back, first.end);
    const auto first_a = [&] {
      if constexpr (kTerms) return make_coord(0, first.row, moved);
      if constexpr (!kTerms) return make_coord(first.row, 0, moved);
    }();
    const auto a = tiles_from(params.tma_load_a, make_shape(m, k, ones), first_a, Step<_1, X, _1>{});
    if constexpr (kTerms) {
      return make_tuple(a, tiles_from(params.tma_load_b, make_shape(n, k, ones), first_a, Step<X, _1, _1>{}));
    } else {
      const auto b = tiles_from(params.tma_load_b, make_shape(n, k, 1), make_coord(0, 0, expert), Step<X, _1, _1>{});
      if constexpr (kPaired) return make_tuple(a, make_tensor(b.data(), paired(b.layout(), n / 2)));
      if constexpr (!kPaired) return make_tuple(a, b);
    }
  }
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(const ProblemShape& problem, const Params& params) const {
    return tiles_of(problem, params, 0, 0);
  }
  template <class Tiles, class ProblemShape>
  CUTLASS_DEVICE Tiles tensors_perform_update(const Tiles&, const Params& params, const ProblemShape& problem,
                                              int expert) const {
    return tiles_of(problem, params, expert, params.starts[expert]);
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

  // The layout (columns, terms, column tiles, term tiles, 1) of coordinates in the weights. Those of gates beyond
  // `width` lead to numbers that are not stored, those of ups to zeros.
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
  using Tiles =
      decltype(OneMapMainloop<Mainloop, false, false, true>::paired(std::declval<Tiled>().layout(), Int<kWidth>{}));
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

// Epilogue that passes the sums of a tile, or zeros where there are no terms, to `Store`.
template <class Store, bool kTerms>
struct TileEpilogue : WithoutWorkspace {
  using DispatchPolicy = cutlass::epilogue::PtrArrayNoSmemWarpSpecialized;
  using ThreadEpilogueOp = TileEpilogue;
  using ElementC = float;
  using ElementD = float;
  using ElementAccumulator = float;
  using StrideC = cutlass::gemm::TagToStrideC_t<cutlass::layout::RowMajor*>;
  using StrideD = StrideC;
  using InternalStrideC = cute::remove_pointer_t<StrideC>;
  using InternalStrideD = InternalStrideC;
  struct SharedStorage {};
  struct Arguments {
    Store store;
    const int* starts;
  };
  using Params = Arguments;

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }

  CUTLASS_HOST_DEVICE explicit TileEpilogue(const Params& params) : params(params) {}

  template <class ProblemShape, class Tile, class Coord, class Sums, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(const ProblemShape& problem, Tile, const Coord& coord, const Sums& accumulators,
                                 TiledMma, const Residue&, int thread, char*) const {
    static_assert(cute::size(Sums{}) == SumsTile::kElements && lies_as_sums_tile<TiledMma>());
    float sums[SumsTile::kElements];
    const bool terms = !kTerms || cute::get<2>(problem) > 0;
#pragma unroll
    for (int i = 0; i < SumsTile::kElements; ++i) sums[i] = terms ? accumulators(i) : 0;
    const int64_t expert = cute::get<3>(coord), tile_m = cute::get<0>(coord), tile_n = cute::get<1>(coord);
    const int64_t num_rows = cute::get<0>(problem);
    params.store(sums, thread, expert, kTerms ? expert * num_rows : params.starts[expert], num_rows,
                 tile_m * SumsTile::kRows, tile_n * Store::kWidth);
  }

  Params params;
};

// Runs the GEMMs of all problems, and `store` on the sums of every tile. n, k: as in make_problems_kernel. kColumnsB: a
// row of b belongs to one term.
template <class T, bool kTerms, bool kColumnsB, class Store>
void multiply(const char* op, const Problems& problems, const Operand& a, const Operand& b, const Store& store,
              int64_t n, int64_t k, const Tensor& like, cudaStream_t stream) {
  using Plain = GroupedMainloop<T, kTerms, kColumnsB>;
  using Mainloop = OneMapMainloop<Plain, kTerms, kColumnsB, Store::kGated>;
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<TileEpilogue<Store, kTerms>>;
  using Shape = cute::Shape<int, int, int>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static_assert(sizeof(Shape) == sizeof(Problems::Shape));
  if constexpr (Store::kGated) static_assert(fetches_from<Plain, 0, 128, 128> && fetches_from<Plain, 1, 128, 1128>);
  cutlass::KernelHardwareInfo device;
  FASTMP_CUDA_CHECK(cudaGetDevice(&device.device_id));
  device.sm_count = device_attribute(cudaDevAttrMultiProcessorCount);

  typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGrouped};
  arguments.problem_shape = {problems.count, reinterpret_cast<Shape*>(problems.shapes), nullptr};
  arguments.mainloop = {a, b, problems.count, static_cast<int>(n), static_cast<int>(k), problems.starts};
  arguments.epilogue = {store, problems.starts};
  arguments.hw_info = device;

  Gemm gemm;
  const auto bytes = static_cast<int64_t>(Gemm::get_workspace_size(arguments));
  const Tensor workspace = fastmp::empty({bytes}, ScalarType::Byte, like);
  cutlass::Status status = gemm.can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.run(arguments, workspace.mutable_data_ptr(), stream);
  FASTMP_CHECK(status == cutlass::Status::kSuccess, op, ": CUTLASS: ", cutlassGetStatusString(status));
}

}  // namespace fastmp
