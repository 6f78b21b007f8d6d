// bfloat16 as torch rounds it.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

using __nv_bfloat16 = c10::BFloat16;
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
