// How the slices of three cores lie when they are packed: every slice is scaled by a power of two,
// so that fp16 holds it whatever its magnitude, and written in the order in which the lanes of a
// warp want it as operands of m16n8k16.
//
// With R a rank padded to a multiple of 16, lane (g, t) = (lane / 4, lane % 4) and e < R / 4:
//   core 1  [i1][step k < R1 / 16][a < 2][t][8]      element e: row a + 2 (e / 2 % 2) of the slice,
//                                                    right rank (R1 / 4) t + 4 k + 2 (e / 4) + e %
//                                                    2
//   core 2  [i2][b < 4][u < R2 / 8][lane][R1 / 4]    element e: row (R1 / 4) t + e of the slice,
//                                                    right rank (R2 / 4) (g / 2) + 2 u + g % 2
//   core 3  [i3][column < Q3][t][R2 / 4]             element e: row (R2 / 4) t + e
// These permutations of the summed indices make a lane's operands consecutive and make the result
// of stage 1 an operand of stage 2 without leaving its registers.

#pragma once

#include "float_types.cuh"
#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// Scaled slices have their largest magnitude in [2^3, 2^4): products of two over a rank of 32 stay
// below 2^13, and what rounding leaves of an element is not yet subnormal.
constexpr int kScaledExponent = 3;

// The binary exponent of the scale of a slice with this largest magnitude; 0 for slices of zeros
// and for slices that are not finite.
__device__ __forceinline__ int32_t scale_exponent(float largest) {
  const int32_t exponent = static_cast<int32_t>(__float_as_uint(largest) >> 23) - 127;
  if (largest == 0.0f || exponent == 128) return 0;
  return min(kScaledExponent - exponent, 127);
}

// A NaN wins, so that it is not scaled as if it were absent.
__device__ __forceinline__ float larger_magnitude(float largest, float value) {
  const float magnitude = fabsf(value);
  return magnitude <= largest ? largest : magnitude;
}

// The slice of core `kCore` of one row, and how it lies in the packed copy.
template <int kCore, int kRank1, int kRank2, int kQ3>
struct SliceLayout {
  static constexpr int kRank = kCore == 2 ? kRank2 : kRank1;  // the summed index
  static constexpr int kElements = kRank / 4;                 // consecutive elements of a lane
  static constexpr int kVectors = kCore == 0   ? kMaxTiledQ * 4
                                  : kCore == 1 ? kMaxTiledQ * (kRank2 / 8) * 32
                                               : kQ3 * 4;

  // Element e of vector v, or 0 in the padding.
  // kFull slices have no padding, so that strides are constants.
  template <bool kFull, typename core_t>
  static __device__ __forceinline__ float element(const TiledFeature& feature, const core_t* slice,
                                                  int v, int e) {
    const int r1 = kFull ? kRank1 : feature.r[0];
    const int r2 = kFull ? kRank2 : feature.r[1];
    const int q1 = kFull ? kMaxTiledQ : feature.q[0];
    const int q2 = kFull ? kMaxTiledQ : feature.q[1];
    const int q3 = kFull ? kQ3 : feature.q[2];
    if constexpr (kCore == 0) {
      const int place = kElements * v + e;
      const int a = place / 32 % 2 + place / 2 % 2 * 2;
      const int k = kElements * (place / 8 % 4) + place / 64 * 4 + place / 4 % 2 * 2 + place % 2;
      return a < q1 && k < r1 ? to_accumulator<float>(slice[a * r1 + k]) : 0.0f;
    } else if constexpr (kCore == 1) {
      const int lane = v % 32;
      const int u = v / 32 % (kRank2 / 8);
      const int b = v / 32 / (kRank2 / 8);
      const int k = kElements * (lane % 4) + e;
      const int right = kRank2 / 4 * (lane / 8) + 2 * u + lane / 4 % 2;
      return b < q2 && k < r1 && right < r2
                 ? to_accumulator<float>(slice[(k * q2 + b) * r2 + right])
                 : 0.0f;
    } else {
      const int column = v / 4;
      const int k = kElements * (v % 4) + e;
      return column < q3 && k < r2 ? to_accumulator<float>(slice[k * q3 + column]) : 0.0f;
    }
  }
};

template <int kElements>
__device__ __forceinline__ void store_vector(__half* target,
                                             const uint32_t (&words)[kElements / 2]) {
  if constexpr (kElements == 8) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  }
}

// `low` may be null.
template <int kElements>
__device__ __forceinline__ void store_packed(const float (&values)[kElements], float scale,
                                             __half* high, __half* low) {
  uint32_t rounded[kElements / 2];
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    rounded[i] = round_pair(values[2 * i] * scale, values[2 * i + 1] * scale);
  }
  store_vector<kElements>(high, rounded);
  if (low == nullptr) return;
  uint32_t residual[kElements / 2];
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    residual[i] = residual_pair(values[2 * i] * scale, values[2 * i + 1] * scale, rounded[i]);
  }
  store_vector<kElements>(low, residual);
}

// Whether the slices of all cores fill their tiles.
template <int kRank1, int kRank2, int kQ3>
__device__ __forceinline__ bool is_full(const TiledFeature& feature) {
  return feature.r[0] == kRank1 && feature.r[1] == kRank2 && feature.q[0] == kMaxTiledQ &&
         feature.q[1] == kMaxTiledQ && feature.q[2] == kQ3;
}

// Loads the elements of one vector of a slice; zeros if the vector does not exist.
template <int kCore, int kRank1, int kRank2, int kQ3, bool kFull, typename core_t, int kElements>
__device__ __forceinline__ void load_slice_vector(float (&values)[kElements],
                                                  const TiledFeature& feature, int32_t index,
                                                  int vector) {
  using Layout = SliceLayout<kCore, kRank1, kRank2, kQ3>;
  const int64_t slice_numel = kCore == 0   ? feature.q[0] * feature.r[0]
                              : kCore == 1 ? feature.r[0] * feature.q[1] * feature.r[1]
                                           : feature.r[1] * feature.q[2];
  const core_t* slice = static_cast<const core_t*>(feature.cores[kCore]) + index * slice_numel;
  const bool exists = vector < Layout::kVectors && index < feature.p[kCore];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    values[e] = exists ? Layout::template element<kFull>(feature, slice, vector, e) : 0.0f;
  }
}

template <int kElements>
__device__ __forceinline__ uint32_t largest_bits(const float (&values)[kElements]) {
  float largest = 0.0f;
#pragma unroll
  for (int e = 0; e < kElements; ++e) largest = larger_magnitude(largest, values[e]);
  return __reduce_max_sync(kAllLanes, __float_as_uint(largest));
}

// bits: of the largest magnitude of the slice.
template <int kCore, int kRank1, int kRank2, int kQ3, int kElements>
__device__ __forceinline__ void store_slice_vector(const float (&values)[kElements],
                                                   const TiledFeature& feature,
                                                   const TiledWorkspace& workspace, int32_t index,
                                                   int vector, uint32_t bits) {
  using Layout = SliceLayout<kCore, kRank1, kRank2, kQ3>;
  if (vector >= Layout::kVectors || index >= feature.p[kCore]) return;
  const int32_t exponent = scale_exponent(__uint_as_float(bits));
  if (vector == 0) workspace.exponents[feature.exponents[kCore] + index] = exponent;
  const float scale = __int_as_float((exponent + 127) << 23);
  const int64_t offset =
      feature.packed[kCore] +
      (static_cast<int64_t>(index) * Layout::kVectors + vector) * Layout::kElements;
  store_packed<kElements>(
      values, scale, workspace.packed_high + offset,
      workspace.packed_low != nullptr ? workspace.packed_low + offset : nullptr);
}

}  // namespace flowtt::cuda
