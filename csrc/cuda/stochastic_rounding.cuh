// Rounding to 16 bits up or down at random, so that steps smaller than the distance of two
// neighbours are not lost: on average nothing is.

#pragma once

#include "float_types.cuh"

namespace flowtt::cuda {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every
// bit of the argument.
__device__ __forceinline__ uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return bits ^ bits >> 31;
}

// Nothing but the step and the element decides, so a run that is repeated rounds as before, and a
// CUDA graph that is replayed does not repeat itself.
__device__ __forceinline__ uint64_t rounding_seed(int64_t iteration, int32_t core) {
  return mix_bits(static_cast<uint64_t>(iteration) << 24 ^ static_cast<uint32_t>(core));
}

__device__ __forceinline__ uint32_t random_bits(uint64_t seed, int64_t element) {
  return static_cast<uint32_t>(
      mix_bits(seed + static_cast<uint64_t>(element) * 0x9e3779b97f4a7c15u) >> 32);
}

// value, rounded to a neighbour of core_t: to the farther one as often as it is near. Values that
// core_t has stay as they are.
template <typename core_t>
__device__ __forceinline__ core_t round_stochastically(float value, uint32_t random) {
  constexpr bool kIsHalf = std::is_same_v<core_t, __half>;
  constexpr uint32_t kExponent = 0x7f800000u;
  constexpr uint32_t kDropped = kIsHalf ? 13 : 16;  // bits of the mantissa
  const uint32_t bits = __float_as_uint(value);
  if ((bits & kExponent) == kExponent) return from_accumulator<core_t>(value);
  if constexpr (kIsHalf) {
    if (fabsf(value) >= 65504.0f) return from_accumulator<core_t>(value);  // the largest
    // Below 2^-14 neighbours are 2^-24 apart.
    if (fabsf(value) < 0x1p-14f) {
      const float units = value * 0x1p24f;
      const float lower = floorf(units);
      const float chance = static_cast<float>(random >> 8) * 0x1p-24f;
      return from_accumulator<core_t>((lower + (chance < units - lower ? 1.0f : 0.0f)) * 0x1p-24f);
    }
  }
  constexpr uint32_t kMask = (1u << kDropped) - 1;
  const float rounded = __uint_as_float((bits + (random >> (32 - kDropped))) & ~kMask);
  return from_accumulator<core_t>(rounded);
}

}  // namespace flowtt::cuda
