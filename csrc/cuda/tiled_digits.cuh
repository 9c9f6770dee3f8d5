// From an id to its digits (i1, i2, ...), and to the bin that its lookup is sorted into.

#pragma once

#include "tiled_params.h"

namespace flowtt::cuda {

// Tables of more rows take a slower way from an id to its digits.
inline constexpr int64_t kMaxNarrowRows = int64_t{1} << 31;

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
class IdSplitter {
 public:
  __device__ __forceinline__ explicit IdSplitter(const TiledFeature& feature)
      : third_(divisor(feature, 2)),
        second_(divisor(feature, 1)),
        bin_shift_(feature.bin_shift),
        bin_split_(feature.bin_split),
        minor_scale_(feature.minor_scale) {}

  __device__ __forceinline__ LookupDigits split(uint32_t id) const {
    const Quotient third = divide(id, third_);
    const Quotient second = divide(third.quotient, second_);
    return finish(second.quotient, second.remainder, third.remainder);
  }

  __device__ __forceinline__ LookupDigits finish(uint32_t i1, uint32_t i2, uint32_t i3) const {
    return {i1 | i3 << 16, i2, (i2 >> bin_shift_) * bin_split_ + __umulhi(i1, minor_scale_)};
  }

 private:
  static __device__ __forceinline__ Divisor divisor(const TiledFeature& feature, int core) {
    return {static_cast<uint32_t>(feature.p[core]), feature.reciprocals[core],
            feature.reciprocal_shifts[core]};
  }

  Divisor third_;
  Divisor second_;
  uint32_t bin_shift_;
  uint32_t bin_split_;
  uint32_t minor_scale_;
};

// The same for ids of any size.
inline __device__ __noinline__ LookupDigits split_wide(const TiledFeature& feature, uint64_t id) {
  const uint32_t p2 = static_cast<uint32_t>(feature.p[1]);
  const uint32_t p3 = static_cast<uint32_t>(feature.p[2]);
  const uint64_t prefix = id / p3;
  const uint64_t i1 = prefix / p2;
  return IdSplitter(feature).finish(static_cast<uint32_t>(i1),
                                    static_cast<uint32_t>(prefix - i1 * p2),
                                    static_cast<uint32_t>(id - prefix * p3));
}

}  // namespace flowtt::cuda
