// Grouped GEMM of bf16 or fp16 matrices whose pointers and sizes are on the device, by CUTLASS, for sm_90a.
//
// One persistent launch for all problems: a warp group loads tiles with TMA, multicast to the two blocks of a cluster,
// two others multiply 128 x 256 tiles and write them with TMA.
#pragma once

#include "problems.cuh"

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace fastmp {

using GroupedTile = cute::Shape<cute::_128, cute::_256, cute::_64>;
using GroupedCluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
template <class T>  // CUTLASS's name of T
using GroupedElement = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, cutlass::bfloat16_t,
                                          std::conditional_t<std::is_same_v<T, __half>, cutlass::half_t, T>>;
template <bool kColumns>
using GroupedLayout = std::conditional_t<kColumns, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>*;

// kColumns: an operand's columns lie next to each other in memory, else its rows do.
template <class T, bool kColumnsA, bool kColumnsB, int kEpilogueBytes>
using GroupedMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, GroupedElement<T>, GroupedLayout<kColumnsA>, kLanes<T>,
    GroupedElement<T>, GroupedLayout<kColumnsB>, kLanes<T>, float, GroupedTile, GroupedCluster,
    cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

// A stride of CUTLASS is the one number that is not constant.
template <class Stride>
Stride* grouped_strides(int64_t* numbers) {
  static_assert(sizeof(Stride) == sizeof(int64_t));
  return reinterpret_cast<Stride*>(numbers);
}

// Runs the GEMMs of all problems, each through the epilogue.
template <class Mainloop, class Epilogue>
void run_grouped(const char* op, const Problems& problems, const typename Mainloop::Arguments& mainloop,
                 const typename Epilogue::Arguments& epilogue, const Tensor& like, cudaStream_t stream) {
  using Shape = cute::Shape<int, int, int>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Shape>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  static_assert(sizeof(Shape) == sizeof(Problems::Shape));
  cutlass::KernelHardwareInfo device;
  FASTMP_CUDA_CHECK(cudaGetDevice(&device.device_id));
  device.sm_count = device_attribute(cudaDevAttrMultiProcessorCount);

  typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGrouped};
  arguments.problem_shape = {problems.count, reinterpret_cast<Shape*>(problems.shapes), nullptr};
  arguments.mainloop = mainloop;
  arguments.epilogue = epilogue;
  arguments.hw_info = device;

  Gemm gemm;
  const auto bytes = static_cast<int64_t>(Gemm::get_workspace_size(arguments));
  const Tensor workspace = fastmp::empty({bytes}, ScalarType::Byte, like);
  cutlass::Status status = gemm.can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.run(arguments, workspace.mutable_data_ptr(), stream);
  FASTMP_CHECK(status == cutlass::Status::kSuccess, op, ": CUTLASS: ", cutlassGetStatusString(status));
}

// d = a b, or d += a b, of every problem.
template <class T, bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
void multiply(const char* op, const Problems& problems, const Tensor& like, cudaStream_t stream) {
  using Stored = GroupedElement<Out>;
  using Added = std::conditional_t<kAccumulate, Stored, void>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, GroupedTile, GroupedCluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Added, GroupedLayout<false>, kLanes<Out>, Stored,
      GroupedLayout<false>, kLanes<Out>, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
      cutlass::epilogue::fusion::LinearCombination<Stored, float, Added, float>>::CollectiveOp;
  using Mainloop = GroupedMainloop<T, kColumnsA, kColumnsB, sizeof(typename Epilogue::SharedStorage)>;
  const typename Mainloop::Arguments mainloop{
      reinterpret_cast<const typename Mainloop::ElementA**>(problems.a),
      grouped_strides<typename Mainloop::InternalStrideA>(problems.stride_a),
      reinterpret_cast<const typename Mainloop::ElementB**>(problems.b),
      grouped_strides<typename Mainloop::InternalStrideB>(problems.stride_b)};
  typename Epilogue::Arguments epilogue{};
  epilogue.thread.alpha = 1;
  epilogue.thread.beta = kAccumulate;
  if constexpr (kAccumulate) {
    epilogue.ptr_C = reinterpret_cast<const Added**>(const_cast<const void**>(problems.d));
  }
  epilogue.dC = grouped_strides<typename Epilogue::InternalStrideC>(problems.stride_d);
  epilogue.ptr_D = reinterpret_cast<Stored**>(problems.d);
  epilogue.dD = grouped_strides<typename Epilogue::InternalStrideD>(problems.stride_d);
  run_grouped<Mainloop, Epilogue>(op, problems, mainloop, epilogue, like, stream);
}

}  // namespace fastmp
