// Tables of four cores run as tables of three: the last two are contracted for all pairs (i3, i4),
// G3[i3] (r2 x q3 r3) @ G4[i4] (r3 x q4), which are packed as the slices of a third core. This is
// done once a call, before the preparation; what it writes, 2 or 4 bytes for each of
// p3 p4 r2 q3 q4 elements, does not depend on the batch and is bounded (wide_tilings.cu).

#pragma once

#include "float_types.cuh"
#include "tiled_packing.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

constexpr int kPairWarps = 8;

// Sizes of core 3 and 4 of a feature whose shape is that of the contracted table.
struct PairShape {
  int32_t p4;
  int32_t q3;
  int32_t q4;
  int32_t r2;
  int32_t r3;
  int32_t rows;    // of a slice of core 3 as a matrix with r3 columns
  int32_t stride;  // between its columns in shared memory, odd

  __host__ __device__ explicit PairShape(const TiledFeature& feature) {
    p4 = feature.p[3];
    q4 = feature.q[3];
    q3 = feature.q[2] / q4;
    r2 = feature.r[1];
    r3 = feature.r[2];
    rows = r2 * q3;
    stride = rows | 1;
  }
  // The columns of core 3, with a warp's length behind them, and core 4's slices of all warps.
  __host__ __device__ int32_t slice_floats() const { return r3 * stride + 32; }
  __host__ __device__ int32_t shared_floats(int padded_q4) const {
    return slice_floats() + kPairWarps * r3 * padded_q4;
  }
};

// Where element (k, column) of a slice lies in the layout `third` (wide_shape.h).
__device__ __forceinline__ int32_t third_position(const WideShape& shape, int32_t k,
                                                  int32_t column) {
  const int32_t within = k % 32;
  const int32_t element = within / 16 * 4 + within / 8 % 2 * 2 + k % 2;
  const int32_t vector =
      ((column / 8 * shape.steps + k / 32) * shape.columns + column % 8) * 4 + within % 8 / 2;
  return vector * kVectorHalves + element;
}

// kSums: sums that a lane holds, of r2 q3 q4 / 32, for q4 padded to kQ4. Block (i3, part) forms the
// pairs of i3 with every parts-th i4, a warp each at a time.
template <int kQ4, int kSums>
__global__ void __launch_bounds__(kPairWarps * 32)
    suffix_pairs_kernel(const __grid_constant__ TiledFeature feature,
                        const __grid_constant__ TiledWorkspace workspace, ElementType core_type) {
  extern __shared__ float columns[];  // [r3][stride], then core 4's slices
  const PairShape pair(feature);
  const WideShape shape(feature);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t i3 = static_cast<int32_t>(blockIdx.x);
  const int64_t slice = static_cast<int64_t>(i3) * pair.rows * pair.r3;
  const int32_t elements = pair.rows * pair.r3;
  constexpr int kBatch = 8;  // loaded before the first is stored
  for (int32_t base = threadIdx.x; base < elements; base += kBatch * kPairWarps * 32) {
    float loaded[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      loaded[i] = load_element<float>(feature.cores[2], core_type,
                                      slice + min(base + i * kPairWarps * 32, elements - 1));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t element = base + i * kPairWarps * 32;
      if (element >= elements) break;
      columns[element % pair.r3 * pair.stride + element / pair.r3] = loaded[i];
    }
  }
  __syncthreads();
  float* const fourth = columns + pair.slice_floats() + warp * pair.r3 * kQ4;
  const int32_t halves = static_cast<int32_t>(feature.slice_halves[2]);
  const int32_t step = static_cast<int32_t>(gridDim.y) * kPairWarps;
  for (int32_t i4 = blockIdx.y * kPairWarps + warp; i4 < pair.p4; i4 += step) {
    __syncwarp();
    for (int32_t i = lane; i < pair.r3 * kQ4; i += 32) {
      const int32_t j4 = i % kQ4;
      fourth[i] = j4 < pair.q4
                      ? load_element<float>(feature.cores[3], core_type,
                                            (int64_t{i4} * pair.r3 + i / kQ4) * pair.q4 + j4)
                      : 0.0f;
    }
    __syncwarp();
    constexpr int kRows = kSums / kQ4;
    float sums[kRows][kQ4] = {};
    for (int32_t k3 = 0; k3 < pair.r3; ++k3) {
      float factor[kQ4];
#pragma unroll
      for (int j4 = 0; j4 < kQ4; ++j4) factor[j4] = fourth[k3 * kQ4 + j4];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (32 * i >= pair.rows) break;
        const float value = columns[k3 * pair.stride + 32 * i + lane];
#pragma unroll
        for (int j4 = 0; j4 < kQ4; ++j4) sums[i][j4] = fmaf(value, factor[j4], sums[i][j4]);
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j4 = 0; j4 < kQ4; ++j4) {
        // A NaN must win.
        const float magnitude = 32 * i + lane < pair.rows ? fabsf(sums[i][j4]) : 0.0f;
        largest = magnitude <= largest ? largest : magnitude;
      }
    }
    const int32_t exponent =
        scale_exponent(__uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(largest))));
    const float scale = __int_as_float((exponent + 127) << 23);
    const int32_t index = i3 * pair.p4 + i4;
    if (lane == 0) workspace.exponents[feature.exponents[2] + index] = exponent;
    const int64_t offset = feature.packed[2] + static_cast<int64_t>(index) * halves;
    __half* const high = workspace.packed_high + offset;
    __half* const low = workspace.packed_low != nullptr ? workspace.packed_low + offset : nullptr;
    if (halves != pair.rows * pair.q4) {  // there is padding
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      for (int32_t v = lane; v < halves / kVectorHalves; v += 32) {
        reinterpret_cast<uint4*>(high)[v] = zeros;
        if (low != nullptr) reinterpret_cast<uint4*>(low)[v] = zeros;
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = 32 * i + lane;
      if (row >= pair.rows) break;
      const int32_t k2 = row / pair.q3;
      const int32_t j3 = row - k2 * pair.q3;
#pragma unroll
      for (int j4 = 0; j4 < kQ4; ++j4) {
        if (j4 >= pair.q4) break;
        const int32_t position = third_position(shape, k2, j3 * pair.q4 + j4);
        const float scaled = sums[i][j4] * scale;
        const __half rounded = __float2half_rn(scaled);
        high[position] = rounded;
        if (low != nullptr) low[position] = __float2half_rn(scaled - __half2float(rounded));
      }
    }
  }
}

}  // namespace flowtt::cuda
