// A run of evenly spaced rows to rotate.
#pragma once

#include "simd.h"
#include "stable.h"

namespace fastmp {

// `num_rows` rows whose first 2 * half elements are rotated; the others, up to `num_cols`, are copied. Pitches are in
// elements. x and y may be the same. cos and sin are in the compute type.
struct RopeRun {
  const void* x;
  void* y;
  const void* cos;
  const void* sin;
  int64_t num_rows, num_cols, half, x_pitch, y_pitch, turn_pitch;
  ScalarType dtype;
  bool interleaved, inverse;
};

FASTMP_DECLARE(void rope_run(const RopeRun&);)

}  // namespace fastmp
