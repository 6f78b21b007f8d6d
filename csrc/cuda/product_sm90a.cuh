// Products of bf16 matrices whose pointers and sizes are on the device, by CUTLASS, for sm_90a.
//
// One persistent launch for all of them: a warp group fetches tiles with TMA, multicast to the two blocks of a cluster,
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

template <bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
struct GroupedProduct {
  template <bool kColumns>
  using Layout = std::conditional_t<kColumns, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>*;
  using In = cutlass::bfloat16_t;
  using Stored = std::conditional_t<std::is_same_v<Out, __nv_bfloat16>, In, Out>;
  using Added = std::conditional_t<kAccumulate, Stored, void>;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  static constexpr int kAlignment = kVectorBytes / sizeof(In), kOutAlignment = kVectorBytes / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Added, Layout<false>, kOutAlignment, Stored,
      Layout<false>, kOutAlignment, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
      cutlass::epilogue::fusion::LinearCombination<Stored, float, Added, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, Layout<kColumnsA>, kAlignment, In, Layout<kColumnsB>,
      kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<
      cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // A stride of CUTLASS is the one number that is not constant.
  template <class Stride>
  static Stride* strides(int64_t* numbers) {
    static_assert(sizeof(Stride) == sizeof(int64_t));
    return reinterpret_cast<Stride*>(numbers);
  }
};

// d = a b, or d += a b, of every problem. Columns: of the operand lie next to each other in memory, else rows do.
template <bool kColumnsA, bool kColumnsB, class Out, bool kAccumulate>
void multiply(const char* op, const Problems& problems, const Tensor& like, cudaStream_t stream) {
  using Product = GroupedProduct<kColumnsA, kColumnsB, Out, kAccumulate>;
  using Kernel = typename Product::Kernel;
  static_assert(sizeof(cute::Shape<int, int, int>) == sizeof(Problems::Shape));
  cutlass::KernelHardwareInfo device;
  FASTMP_CUDA_CHECK(cudaGetDevice(&device.device_id));
  device.sm_count = device_attribute(cudaDevAttrMultiProcessorCount);

  typename Product::Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGrouped};
  arguments.problem_shape = {problems.count, reinterpret_cast<cute::Shape<int, int, int>*>(problems.shapes), nullptr};
  arguments.mainloop.ptr_A = reinterpret_cast<const typename Product::In**>(problems.a);
  arguments.mainloop.ptr_B = reinterpret_cast<const typename Product::In**>(problems.b);
  arguments.mainloop.dA = Product::template strides<typename Kernel::InternalStrideA>(problems.stride_a);
  arguments.mainloop.dB = Product::template strides<typename Kernel::InternalStrideB>(problems.stride_b);
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = kAccumulate;
  if constexpr (kAccumulate) {
    arguments.epilogue.ptr_C = reinterpret_cast<const typename Product::Added**>(const_cast<const void**>(problems.d));
  }
  arguments.epilogue.dC = Product::template strides<typename Kernel::InternalStrideC>(problems.stride_d);
  arguments.epilogue.ptr_D = reinterpret_cast<typename Product::Stored**>(problems.d);
  arguments.epilogue.dD = Product::template strides<typename Kernel::InternalStrideD>(problems.stride_d);
  arguments.hw_info = device;

  typename Product::Gemm gemm;
  const auto bytes = static_cast<int64_t>(Product::Gemm::get_workspace_size(arguments));
  const Tensor workspace = fastmp::empty({bytes}, ScalarType::Byte, like);
  cutlass::Status status = gemm.can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.run(arguments, workspace.mutable_data_ptr(), stream);
  FASTMP_CHECK(status == cutlass::Status::kSuccess, op, ": CUTLASS: ", cutlassGetStatusString(status));
}

}  // namespace fastmp
