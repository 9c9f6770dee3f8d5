// Conversion between storage types and the accumulation type, rounding to nearest even.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
FLOWTT_INLINE To bits_as(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof(result));
  return result;
}

FLOWTT_INLINE float to_float(float value) { return value; }

FLOWTT_INLINE float to_float(BFloat16 value) {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}

FLOWTT_INLINE float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN
    return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude >= 0x400u) {
    return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));
  }
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return bits_as<float>(sign | bits_as<uint32_t>(subnormal));
}

FLOWTT_INLINE void from_float(float value, float& target) { target = value; }

FLOWTT_INLINE void from_float(float value, BFloat16& target) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  target.bits = static_cast<uint16_t>((is_nan ? 0x7fc00000u : rounded) >> 16);
}

FLOWTT_INLINE void from_float(float value, Half& target) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  } else {
    // Adding 0.5, whose last bit weighs 2^-24 like that of a subnormal half, does the rounding.
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
  }
  target.bits = static_cast<uint16_t>((bits >> 16 & 0x8000u) | half);
}

template <typename T>
FLOWTT_INLINE void load_elements(const T* source, float* target, int64_t count) {
  int64_t i = 0;
  if constexpr (__is_same(T, Half)) {
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
      _mm512_storeu_ps(target + i, _mm512_cvtph_ps(half));
    }
#endif
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
    }
#endif
  }
  for (; i < count; ++i) {
    target[i] = to_float(source[i]);
  }
}

FLOWTT_INLINE void load_elements(const double* source, double* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    target[i] = source[i];
  }
}

template <typename T>
FLOWTT_INLINE void store_elements(const float* source, T* target, int64_t count) {
  int64_t i = 0;
  if constexpr (__is_same(T, Half)) {
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i),
                          _mm512_cvtps_ph(_mm512_loadu_ps(source + i),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
  }
  for (; i < count; ++i) {
    from_float(source[i], target[i]);
  }
}

FLOWTT_INLINE void store_elements(const double* source, double* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    target[i] = source[i];
  }
}

}  // namespace
}  // namespace flowtt
