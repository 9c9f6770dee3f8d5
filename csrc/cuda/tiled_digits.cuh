// From an id to its digits (i1, i2, ...), and to the bin that its lookup is sorted into.

#pragma once

#include "tiled_params.h"

namespace flowtt::cuda {

struct LookupDigits {
  uint32_t outer;  // as in GroupedLookup
  uint32_t i2;
  uint32_t bin;
};

struct Quotient {
  uint32_t quotient;
  uint32_t remainder;
};

// value / divisor of a value below 2^31.
__device__ __forceinline__ Quotient divide(uint32_t value, const Divisor& divisor) {
  const uint32_t quotient = __umulhi(2 * value, divisor.reciprocal) >> divisor.shift;
  return {quotient, value - quotient * divisor.value};
}

// Splits ids of less than 2^31 of one feature. Reads the feature's description once.
template <int kCores>
class IdSplitter {
 public:
  __device__ __forceinline__ explicit IdSplitter(const TiledFeature& feature)
      : last_(divisor(feature, kCores - 1)),
        third_(divisor(feature, 2)),
        second_(divisor(feature, 1)),
        bin_shift_(feature.bin_shift),
        bin_split_(feature.bin_split),
        minor_scale_(feature.minor_scale) {}

  __device__ __forceinline__ LookupDigits split(uint32_t id) const {
    const Quotient first = divide(id, last_);
    uint32_t prefix = first.quotient;
    if constexpr (kCores == 2) return finish(prefix, 0, first.remainder, 0);
    uint32_t i3 = 0;
    if constexpr (kCores == 4) {
      const Quotient third = divide(prefix, third_);
      prefix = third.quotient;
      i3 = third.remainder;
    }
    const Quotient second = divide(prefix, second_);
    return finish(second.quotient, second.remainder, first.remainder, i3);
  }

  // Digits of an id that has its last digit, and with four cores the one before, taken away.
  __device__ __forceinline__ LookupDigits finish(uint32_t i1, uint32_t i2, uint32_t last,
                                                 uint32_t i3) const {
    const uint32_t major = kCores == 2 ? i1 : i2;
    const uint32_t minor = kCores == 2 ? last : i1;
    return {i1 | last << 16, i2 | i3 << 16,
            (major >> bin_shift_) * bin_split_ + __umulhi(minor, minor_scale_)};
  }

 private:
  static __device__ __forceinline__ Divisor divisor(const TiledFeature& feature, int core) {
    return {static_cast<uint32_t>(feature.p[core]), feature.reciprocals[core],
            feature.reciprocal_shifts[core]};
  }

  Divisor last_;
  Divisor third_;
  Divisor second_;
  uint32_t bin_shift_;
  uint32_t bin_split_;
  uint32_t minor_scale_;
};

// The same for ids of any size.
template <int kCores>
__device__ __noinline__ LookupDigits split_wide(const TiledFeature& feature, uint64_t id) {
  const auto take = [&](int core) {
    const uint32_t p = static_cast<uint32_t>(feature.p[core]);
    const uint64_t rest = id / p;
    const uint32_t digit = static_cast<uint32_t>(id - rest * p);
    id = rest;
    return digit;
  };
  const uint32_t last = take(kCores - 1);
  const uint32_t i3 = kCores == 4 ? take(2) : 0;
  const uint32_t i2 = kCores == 2 ? 0 : take(1);
  return IdSplitter<kCores>(feature).finish(static_cast<uint32_t>(id), i2, last, i3);
}

}  // namespace flowtt::cuda
