// Backward of rms_norm and layer_norm in CUDA C++ for long rows, with a row distributed over the blocks of a cluster.
//
// Each block owns a slice of the columns and walks down the rows, kRows at a time:
//   1. Load the slice into shared memory; sum g n and g for weight and bias, g w n and g w for the row means.
//   2. Send the row sums to all blocks of the cluster (distributed shared memory) and synchronise.
//   3. Compute dx from shared memory, so every element is read from device memory once.
// Threads sum the gradients of weight and bias for their own columns, and a second kernel adds the clusters' sums in
// order, so results are reproducible. Reference: fastmp/ops/norm.py.
#include "common.cuh"
#include "op.h"
#include "rows.h"

#include <cooperative_groups.h>

#include <tuple>

namespace fastmp {
namespace {

constexpr int kCluster = 8;       // the largest size that every device with clusters supports
constexpr int kClusters = 32;     // two blocks per multiprocessor; independent of the GPU, so results are the same on all
constexpr int kMaxThreads = 256;
constexpr int kSumThreads = 128;

// Rows in flight: 16 bytes per column of grad and total together, for any type.
template <class T>
constexpr int kRows = 8 / sizeof(T);

// Sums `value` over the threads of the block in a fixed order; the result is valid in warp 0.
template <class C, int kCount>
__device__ void sum_block(C (&value)[kCount]) {
  __shared__ C warps[kMaxThreads / kWarp][kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value[i] += __shfl_xor_sync(0xffffffffu, value[i], distance);
    }
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp][i] = value[i];
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    value[i] = warps[0][i];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) value[i] += warps[warp][i];
  }
}

template <class T>
struct Arguments {
  using C = Compute<T>;
  const T *grad, *grad_total, *total;  // (num_rows, num_cols), rows *_pitch elements apart; grad_total may be null
  int64_t grad_pitch, grad_total_pitch, total_pitch;
  const C *weight, *rstd, *mean;  // (num_cols,), (num_rows,), (num_rows,); mean is null in rms_norm
  T* dx;                          // (num_rows, num_cols), contiguous
  C* partials;  // (clusters, 1 or 2, num_cols)
  int64_t num_rows, num_cols, share;  // share: columns per block, a multiple of kWidth
  bool with_bias;
};

// A block's columns and its shared memory: kRows rows of grad and total, weight, and the sums for weight and bias.
template <class T, int kWidth>
struct Share {
  using C = Compute<T>;
  using V = Vector<T, kWidth>;
  int64_t size, begin, count;  // `count` of the `size` columns from `begin` on exist, a multiple of kWidth
  V *grad, *total;
  C *weight, *dweight, *dbias;

  __device__ Share(const Arguments<T>& a, int64_t rank) : size(a.share), begin(rank * a.share) {
    const int64_t left = a.num_cols - begin;
    count = left < 0 ? 0 : left < size ? left : size;
    grad = dynamic_shared<V>();
    total = grad + kRows<T> * size / kWidth;
    weight = reinterpret_cast<C*>(total + kRows<T> * size / kWidth);
    dweight = weight + size;
    dbias = dweight + size;
  }
  static int64_t bytes(int64_t size) { return size * static_cast<int64_t>(2 * kRows<T> * sizeof(T) + 3 * sizeof(C)); }
  __device__ int64_t at(int row, int64_t column) const { return (row * size + column) / kWidth; }
};

// Stores dx of kRows rows, from shared memory and the row means of g w n (along) and g w (level).
template <class T, int kWidth, class C = Compute<T>>
__device__ void store_rows(const Arguments<T>& a, const Share<T, kWidth>& mine, int64_t row, const C (&rstd)[kRows<T>],
                           const C (&mean)[kRows<T>], const C (&along)[kRows<T>], const C (&level)[kRows<T>]) {
  for (int64_t column = threadIdx.x * kWidth; column < mine.count; column += blockDim.x * kWidth) {
#pragma unroll
    for (int r = 0; r < kRows<T>; ++r) {
      if (row + r >= a.num_rows) break;
      Vector<T, kWidth> grad, total, past{};
      copy_vector(&grad, mine.grad + mine.at(r, column));
      copy_vector(&total, mine.total + mine.at(r, column));
      const int64_t place = mine.begin + column;
      if (a.grad_total != nullptr) {
        past = load_vector<T, kWidth>(a.grad_total + (row + r) * a.grad_total_pitch + place);
      }
      C d[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const C n = (widen(total.lane[i]) - mean[r]) * rstd[r];
        const C h = widen(grad.lane[i]) * mine.weight[column + i];
        d[i] = (h - n * along[r] - level[r]) * rstd[r] + widen(past.lane[i]);
      }
      store_vector(a.dx + (row + r) * a.num_cols + place, d);
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, 2) norm_backward_kernel(const Arguments<T> arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using C = Compute<T>;
  using V = Vector<T, kWidth>;
  const auto& a = arguments;
  const auto cluster = cooperative_groups::this_cluster();
  const Share<T, kWidth> mine(a, cluster.block_rank());
  __shared__ C sums[2][kCluster][2 * kRows<T>];  // of rows that follow each other, in turn

  // Each thread works on its own columns from here on, except for the sums over rows.
  const int64_t first = threadIdx.x * kWidth, step = blockDim.x * kWidth;
  for (int64_t column = first; column < mine.count; column += step) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      mine.weight[column + i] = a.weight[mine.begin + column + i];
      mine.dweight[column + i] = mine.dbias[column + i] = 0;
    }
  }
  cluster.sync();  // all blocks have started, so their shared memory can be written

  const int64_t num_clusters = gridDim.x / kCluster;
  int turn = 0;
  for (int64_t row = blockIdx.x / kCluster * kRows<T>; row < a.num_rows; row += num_clusters * kRows<T>, turn ^= 1) {
    C rstd[kRows<T>], mean[kRows<T>], sum[2 * kRows<T>];  // sum: of g w n, then of g w, for each row
#pragma unroll
    for (int r = 0; r < kRows<T>; ++r) {
      const bool there = row + r < a.num_rows;
      rstd[r] = there ? a.rstd[row + r] : C(0);
      mean[r] = there && a.mean != nullptr ? a.mean[row + r] : C(0);
      sum[r] = sum[kRows<T> + r] = 0;
    }
    // 1. Load kRows rows; sum over rows for weight and bias, over columns for the row means.
    for (int64_t column = first; column < mine.count; column += step) {
      V grad[kRows<T>]{}, total[kRows<T>]{};
#pragma unroll
      for (int r = 0; r < kRows<T>; ++r) {
        if (row + r >= a.num_rows) continue;
        grad[r] = load_vector<T, kWidth>(a.grad + (row + r) * a.grad_pitch + mine.begin + column);
        total[r] = load_vector<T, kWidth>(a.total + (row + r) * a.total_pitch + mine.begin + column);
      }
      C dw[kWidth]{}, db[kWidth]{};
#pragma unroll
      for (int r = 0; r < kRows<T>; ++r) {
        copy_vector(mine.grad + mine.at(r, column), grad + r);
        copy_vector(mine.total + mine.at(r, column), total + r);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const C g = widen(grad[r].lane[i]), n = (widen(total[r].lane[i]) - mean[r]) * rstd[r];
          dw[i] += g * n;
          db[i] += g;
          const C h = g * mine.weight[column + i];
          sum[r] += h * n;
          sum[kRows<T> + r] += h;
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        mine.dweight[column + i] += dw[i];
        mine.dbias[column + i] += db[i];
      }
    }

    // 2. Send this block's row sums to every block of the cluster, then add all of them.
    sum_block(sum);
    if (threadIdx.x < kCluster) {
      C* theirs = cluster.map_shared_rank(sums[turn][cluster.block_rank()], threadIdx.x);
#pragma unroll
      for (int i = 0; i < 2 * kRows<T>; ++i) theirs[i] = sum[i];
    }
    cluster.sync();  // sums[turn] is complete; it is overwritten two iterations later, after another barrier
    C along[kRows<T>], level[kRows<T>];
#pragma unroll
    for (int r = 0; r < kRows<T>; ++r) {
      along[r] = level[r] = 0;
      for (int rank = 0; rank < kCluster; ++rank) {
        along[r] += sums[turn][rank][r];
        level[r] += sums[turn][rank][kRows<T> + r];
      }
      along[r] /= static_cast<C>(a.num_cols);
      level[r] = a.mean == nullptr ? C(0) : level[r] / static_cast<C>(a.num_cols);
    }
    // 3. dx = rstd (g w - n along - level) + grad_total.
    store_rows<T, kWidth>(a, mine, row, rstd, mean, along, level);
  }

  // 4. Store the cluster's sums for weight and bias.
  C* partials = a.partials + blockIdx.x / kCluster * a.num_cols * (a.with_bias ? 2 : 1) + mine.begin;
  for (int64_t column = first; column < mine.count; column += step) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      partials[column + i] = mine.dweight[column + i];
      if (a.with_bias) partials[a.num_cols + column + i] = mine.dbias[column + i];
    }
  }
#else
  __trap();  // PTX for GPUs without clusters, compiled on one with clusters: fail instead of computing nothing
#endif
}

// sums (num_cols,) = column sums of `partials` (num_partials, num_cols), in order.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const Compute<T>* __restrict__ partials, T* __restrict__ sums, int64_t num_partials,
                        int64_t num_cols) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= num_cols) return;
  Compute<T> sum = 0;
  for (int64_t i = 0; i < num_partials; ++i) sum += partials[i * num_cols + column];
  sums[column] = narrow<T>(sum);
}

// Returns true if all rows can be read in 16-byte vectors.
bool is_aligned(const Rows& rows) {
  const int64_t lanes = kVectorBytes / static_cast<int64_t>(rows.tensor.element_size());
  const bool base = reinterpret_cast<uintptr_t>(rows.tensor.const_data_ptr()) % kVectorBytes == 0;
  return base && rows.num_cols % lanes == 0 && (rows.num_rows == 1 || rows.pitch % lanes == 0);
}

template <class T>
void launch_backward(const char* op, const Rows& grad, const std::optional<Rows>& grad_total, const Rows& total,
                     const Tensor& weight, const Tensor& stats, const Tensor& dx, const Tensor& dparams) {
  using C = Compute<T>;
  const int64_t num_rows = total.num_rows, num_cols = total.num_cols;
  const bool aligned = is_aligned(grad) && is_aligned(total) && (!grad_total || is_aligned(*grad_total));
  const int64_t width = aligned ? kLanes<T> : 1;
  const int64_t share = ceil_div(ceil_div(num_cols, kCluster), kLanes<T>) * kLanes<T>;
  const int64_t num_clusters = std::min<int64_t>(kClusters, ceil_div(num_rows, kRows<T>));
  Grid grid{kCluster * num_clusters, kWarp, Share<T, 1>::bytes(share), kCluster};
  while (grid.threads < kMaxThreads && grid.threads * width < share) grid.threads *= 2;
  const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;  // less the static shared memory
  FASTMP_CHECK(grid.bytes <= most, op, ": rows of ", num_cols, " elements take ", grid.bytes,
               " bytes of shared memory a block, but there are ", most);
  const Tensor partials = fastmp::empty({num_clusters, dparams.numel()}, compute_dtype(dx.scalar_type()), dx);
  const C* rstd = data<C>(stats);
  const Arguments<T> arguments{
      data<T>(grad.tensor), grad_total ? data<T>(grad_total->tensor) : nullptr, data<T>(total.tensor),
      grad.pitch, grad_total ? grad_total->pitch : 0, total.pitch,
      data<C>(weight), rstd, stats.size(0) == 2 ? rstd + num_rows : nullptr,
      mutable_data<T>(dx), mutable_data<C>(partials), num_rows, num_cols, share, dparams.size(0) == 2};
  launch(grid, current_stream(dx), aligned ? norm_backward_kernel<T, kLanes<T>> : norm_backward_kernel<T, 1>, arguments);
  const auto sum = [&](auto tag) {
    using P = typename decltype(tag)::type;
    launch({ceil_div(dparams.numel(), kSumThreads), kSumThreads}, current_stream(dx), sum_partials_kernel<P>,
           data<C>(partials), mutable_data<P>(dparams), num_clusters, dparams.numel());
  };
  dparams.scalar_type() == dx.scalar_type() ? sum(TypeTag<T>{}) : sum(TypeTag<C>{});
}

std::tuple<Tensor, Tensor> backward(const char* op, bool centred, const Tensor& grad,
                                    const std::optional<Tensor>& grad_total, const Tensor& total,
                                    const Tensor& weight_any, const Tensor& stats_any, bool with_bias) {
  FASTMP_CHECK(total.dim() > 0, op, ": total must have at least one dimension");
  check_same(op, "grad", grad, "total", total);
  if (grad_total) check_same(op, "grad_total", *grad_total, "total", total);
  const int64_t num_cols = total.size(total.dim() - 1), num_rows = num_cols ? total.numel() / num_cols : 0;
  const ScalarType dtype = total.scalar_type(), compute = compute_dtype(dtype);
  FASTMP_CHECK(weight_any.dim() == 1 && weight_any.numel() == num_cols &&
                   (weight_any.scalar_type() == dtype || weight_any.scalar_type() == compute),
               op, ": total is ", described(total), ", which does not fit a weight of ", described(weight_any));
  FASTMP_CHECK(stats_any.scalar_type() == compute && stats_any.dim() == total.dim() && stats_any.size(0) == 1 + centred &&
                   (num_cols == 0 || stats_any.numel() == (1 + centred) * num_rows),
               op, ": total is ", described(total), ", which does not fit stats of ", described(stats_any));
  const DeviceGuard guard(total);
  FASTMP_CHECK(device_attribute(cudaDevAttrClusterLaunch) != 0, op,
               ": this kernel is for devices with clusters of blocks, from sm_90 on");
  Tensor dx = fastmp::empty(total.sizes(), dtype, total);
  Tensor dparams = fastmp::empty({1 + with_bias, num_cols}, weight_any.scalar_type(), total);
  if (total.numel() == 0) return {dx, torch::stable::zero_(dparams)};
  const Tensor weight = torch::stable::contiguous(
      weight_any.scalar_type() == compute ? weight_any : torch::stable::to(weight_any, compute));
  const Tensor stats = torch::stable::contiguous(stats_any);
  const std::optional<Rows> past = grad_total ? std::optional<Rows>(*grad_total) : std::nullopt;
  dispatch_device(dtype, op, [&](auto tag) {
    launch_backward<typename decltype(tag)::type>(op, Rows(grad), past, Rows(total), weight, stats, dx, dparams);
  });
  return {dx, dparams};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, std::optional<Tensor> grad_total, const Tensor& total,
                                             const Tensor& weight, const Tensor& stats) {
  return backward("rms_norm_backward", false, grad, grad_total, total, weight, stats, false);
}

std::tuple<Tensor, Tensor> layer_norm_backward(const Tensor& grad, std::optional<Tensor> grad_total, const Tensor& total,
                                               const Tensor& weight, const Tensor& stats, bool with_bias) {
  return backward("layer_norm_backward", true, grad, grad_total, total, weight, stats, with_bias);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_FRAGMENT(fastmp_cuda, m) {
  m.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor stats) "
      "-> (Tensor dx, Tensor dparams)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor stats, "
      "bool with_bias) -> (Tensor dx, Tensor dparams)");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_cuda, CUDA, m) {
  FASTMP_IMPL(m, "rms_norm_backward", fastmp::rms_norm_backward);
  FASTMP_IMPL(m, "layer_norm_backward", fastmp::layer_norm_backward);
}
