// Stands in for CUDA's header of half precision: conversions, rounded to the nearest even.

#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // As the bits of a float it is too small by the difference of the exponents' biases.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

inline __half __float2half_rn(float value) {
  const uint32_t sign = __float_as_uint(value) >> 16 & 0x8000;
  const uint32_t magnitude = __float_as_uint(value) & 0x7fffffff;
  uint32_t bits = 0;
  if (magnitude > 0x7f800000) {
    bits = 0x7fff;
  } else if (magnitude >= 0x477ff000) {  // 65520 and more
    bits = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below the normal halves; the addition rounds
    bits = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
  } else {
    bits = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | bits)};
}

inline float2 __half22float2(__half2 value) {
  return {__half2float(value.x), __half2float(value.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
