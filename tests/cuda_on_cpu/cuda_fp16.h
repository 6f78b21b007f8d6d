// float16 as torch rounds it.
#pragma once

#include <torch/headeronly/util/Half.h>

using __half = c10::Half;
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
