// Shared by the CUDA kernels: element types, 16-byte vectors, exponentials, launches.
//
// Arithmetic is in fp32 (f64 for f64 elements); values are rounded once, when stored. Offsets are 64-bit.
#pragma once

#include "stable.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

namespace fastmp {

constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

// The type a kernel computes in for elements stored as T.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }

template <class T>
__device__ inline T narrow(Compute<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// kWidth elements, 16 bytes by default; in memory aligned to its size.
template <class T, int kWidth = kLanes<T>>
struct alignas(kWidth * sizeof(T)) Vector {
  T lane[kWidth];
};

// Copies 16 bytes in one access, not lane by lane.
template <class T, int kWidth>
__device__ inline void copy_vector(Vector<T, kWidth>* to, const Vector<T, kWidth>* from) {
  if constexpr (kWidth * sizeof(T) == kVectorBytes) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else {
    *to = *from;
  }
}

template <class T, int kWidth = kLanes<T>>
__device__ inline Vector<T, kWidth> load_vector(const T* p) {
  Vector<T, kWidth> out;
  copy_vector(&out, reinterpret_cast<const Vector<T, kWidth>*>(p));
  return out;
}

template <class T, int kWidth>
__device__ inline void store_vector(T* p, const Compute<T> (&value)[kWidth]) {
  Vector<T, kWidth> out;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kWidth > 1) {
    auto* pair = reinterpret_cast<__nv_bfloat162*>(out.lane);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) pair[i] = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
  } else if constexpr (std::is_same_v<T, __half> && kWidth > 1) {
    auto* pair = reinterpret_cast<__half2*>(out.lane);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) pair[i] = __floats2half2_rn(value[2 * i], value[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) out.lane[i] = narrow<T>(value[i]);
  }
  copy_vector(reinterpret_cast<Vector<T, kWidth>*>(p), &out);
}

// Returns the number of elements from p to the next 16-byte boundary.
template <class T>
__device__ inline int64_t to_boundary(const T* p) {
  return (kVectorBytes - reinterpret_cast<uintptr_t>(p) % kVectorBytes) % kVectorBytes / sizeof(T);
}

// PTX and shared memory; tests/cuda_on_cpu has plain C++ versions.
#ifdef __NVCC__
// 2^x on the special function unit: relative error 2^-22, results below 2^-126 flushed to 0.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x on the special function unit: relative error 2^-23, 0 where it would be below 2^-126.
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The square root on the special function unit: relative error 2^-22, numbers below 2^-126 are 0.
__device__ inline float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Stores 16 bytes to global memory; the compiler sometimes splits an assignment into four stores.
__device__ inline void store_words(void* to, const unsigned (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3]));
}

// Adds to two numbers in global memory, which is not waited for.
__device__ inline void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// Returns the dynamic shared memory, whose size the launch sets.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ uint4 dynamic_bytes[];
  return reinterpret_cast<T*>(dynamic_bytes);
}
#endif

// e^x; in fp32 with the errors of fast_exp2 and of x * log2(e).
__device__ inline float fast_exp(float x) { return fast_exp2(x * 1.4426950408889634f); }
__device__ inline double fast_exp(double x) { return exp(x); }
__device__ inline double fast_reciprocal(double x) { return 1 / x; }
__device__ inline double fast_sqrt(double x) { return sqrt(x); }

// Returns a shift that keeps e^(x - shift) finite for x <= top: top, or 0 for a row of -inf only.
template <class C>
__device__ inline C finite_shift(C top) {
  return top == -INFINITY ? C(0) : top;
}

// Calls body(TypeTag<T>{}) with the device type of a floating-point dtype.
template <class Body>
auto dispatch_device(ScalarType dtype, const char* op, const Body& body) {
  return dispatch_float<__nv_bfloat16, __half>(dtype, op, body);
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  FASTMP_CUDA_CHECK(cudaGetDevice(&device));
  FASTMP_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Launch configuration; `bytes` of dynamic shared memory per block.
struct Grid {
  int64_t blocks, threads, bytes = 0;
};

template <class... Parameters, class... Arguments>
void launch(const Grid& grid, cudaStream_t stream, void (*kernel)(Parameters...), Arguments... arguments) {
  FASTMP_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.bytes)));
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(grid.blocks);
  config.blockDim.x = static_cast<unsigned>(grid.threads);
  config.dynamicSmemBytes = static_cast<size_t>(grid.bytes);
  config.stream = stream;
  FASTMP_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fastmp
