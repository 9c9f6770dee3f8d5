// From an id to its digits (i1, i2, ...), and where its prefix lies among all.

#pragma once

#include "tiled_params.h"

namespace flowtt::cuda {

// Tables of more rows take a longer way from an id to its digits.
inline constexpr int64_t kMaxNarrowRows = int64_t{1} << 31;

struct LookupDigits {
  uint32_t outer;  // as in GroupedLookup
  uint32_t i2;
};

// Where a prefix (i1, i2) lies in the order of i2 * p1 + i1, which is below 2^32.
struct PrefixOrder {
  uint32_t p1;
  uint32_t scale;

  __device__ __forceinline__ explicit PrefixOrder(const TiledFeature& feature)
      : p1(static_cast<uint32_t>(feature.p[0])), scale(feature.prefix_scale) {}

  // Of kBuckets << shift equal ranges of prefixes. Those of one shift divide those of a smaller.
  __device__ __forceinline__ uint32_t range_of(uint32_t outer, uint32_t i2, int shift) const {
    const uint32_t prefix = i2 * p1 + (outer & 0xffffu);
    return static_cast<uint32_t>(uint64_t{prefix} * scale >> (32 - shift));
  }
  __device__ __forceinline__ uint32_t bucket_of(uint32_t outer, uint32_t i2) const {
    return range_of(outer, i2, 0);
  }
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

// Splits ids of one feature. Reads the feature's description once.
class IdSplitter {
 public:
  __device__ __forceinline__ explicit IdSplitter(const TiledFeature& feature)
      : third_(divisor(feature, 2)), second_(divisor(feature, 1)) {}

  // kWide: of a table of more than kMaxNarrowRows.
  template <bool kWide>
  __device__ __forceinline__ LookupDigits split_id(int64_t id) const {
    if constexpr (kWide) {
      return split_wide(static_cast<uint64_t>(id));
    } else {
      return split(static_cast<uint32_t>(id));
    }
  }

  // Of ids below 2^31.
  __device__ __forceinline__ LookupDigits split(uint32_t id) const {
    const Quotient third = divide(id, third_);
    const Quotient second = divide(third.quotient, second_);
    return {second.quotient | third.remainder << 16, second.remainder};
  }

  // Of any id: below 2^48, as factors are at most 2^16. By long division, 15 bits at a time, so
  // that with the remainder in front they stay below 2^31.
  __device__ __forceinline__ LookupDigits split_wide(uint64_t id) const {
    const Quotient high = divide(static_cast<uint32_t>(id >> 30), third_);
    const Quotient middle = divide(append(high.remainder, static_cast<uint32_t>(id >> 15)), third_);
    const Quotient low = divide(append(middle.remainder, static_cast<uint32_t>(id)), third_);
    const uint32_t prefix = high.quotient << 30 | middle.quotient << 15 | low.quotient;
    const Quotient upper = divide(prefix >> 15, second_);
    const Quotient lower = divide(append(upper.remainder, prefix), second_);
    return {upper.quotient << 15 | lower.quotient | low.remainder << 16, lower.remainder};
  }

 private:
  // The last 15 bits of `word` behind `front`.
  static __device__ __forceinline__ uint32_t append(uint32_t front, uint32_t word) {
    return front << 15 | (word & 0x7fff);
  }

  static __device__ __forceinline__ Divisor divisor(const TiledFeature& feature, int core) {
    return {static_cast<uint32_t>(feature.p[core]), feature.reciprocals[core],
            feature.reciprocal_shifts[core]};
  }

  Divisor third_;
  Divisor second_;
};

}  // namespace flowtt::cuda
