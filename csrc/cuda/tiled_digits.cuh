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

// value / divisor: the rounded reciprocal is at most one short.
__device__ __forceinline__ Quotient divide(uint32_t value, uint32_t divisor, uint32_t reciprocal) {
  uint32_t quotient = __umulhi(value, reciprocal);
  uint32_t remainder = value - quotient * divisor;
  if (remainder >= divisor) {
    ++quotient;
    remainder -= divisor;
  }
  return {quotient, remainder};
}

// A feature's factors, read once by every thread that splits many ids.
class IdSplitter {
 public:
  __device__ __forceinline__ explicit IdSplitter(const TiledFeature& feature)
      : feature_(feature),
        num_embeddings_(static_cast<uint64_t>(feature.num_embeddings)),
        num_cores_(feature.num_cores),
        // The second factor is divided by last, the last one first.
        last_p_(static_cast<uint32_t>(feature.p[feature.num_cores - 1])),
        last_reciprocal_(feature.reciprocals[feature.num_cores - 1]),
        second_p_(static_cast<uint32_t>(feature.p[1])),
        second_reciprocal_(feature.reciprocals[1]),
        bin_shift_(feature.bin_shift),
        bin_split_(feature.bin_split) {
    // bin_split / p of the minor digit, as a fraction of 2^32.
    const int minor = feature.num_cores == 2 ? 1 : 0;
    minor_scale_ =
        min(bin_split_ * static_cast<uint64_t>(feature.reciprocals[minor]), uint64_t{0xffffffffu});
  }

  __device__ __forceinline__ bool contains(int64_t id) const {
    return static_cast<uint64_t>(id) < num_embeddings_;
  }

  // id: in range.
  __device__ __forceinline__ LookupDigits split(int64_t id) const {
    uint32_t last;
    uint32_t prefix;
    if (num_embeddings_ <= uint64_t{1} << 32) {
      const Quotient first = divide(static_cast<uint32_t>(id), last_p_, last_reciprocal_);
      last = first.remainder;
      prefix = first.quotient;
    } else {
      // The prefix of a row may need more than 32 bits only with four cores.
      uint64_t wide = static_cast<uint64_t>(id) / last_p_;
      last = static_cast<uint32_t>(static_cast<uint64_t>(id) - wide * last_p_);
      if (num_cores_ == 4) {
        const uint64_t p3 = static_cast<uint64_t>(feature_.p[2]);
        const uint32_t i3 = static_cast<uint32_t>(wide % p3);
        return finish(divide_wide(wide / p3), last, i3);
      }
      return num_cores_ == 2 ? finish({static_cast<uint32_t>(wide), 0}, last, 0)
                             : finish(divide_wide(wide), last, 0);
    }
    uint32_t i3 = 0;
    if (num_cores_ == 4) {
      const Quotient third =
          divide(prefix, static_cast<uint32_t>(feature_.p[2]), feature_.reciprocals[2]);
      i3 = third.remainder;
      prefix = third.quotient;
    }
    return finish(
        num_cores_ == 2 ? Quotient{prefix, 0} : divide(prefix, second_p_, second_reciprocal_), last,
        i3);
  }

 private:
  __device__ __forceinline__ Quotient divide_wide(uint64_t prefix) const {
    const uint64_t first = prefix / second_p_;
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(prefix - first * second_p_)};
  }

  // first_two: i1 and, but for two cores, i2.
  __device__ __forceinline__ LookupDigits finish(Quotient first_two, uint32_t last,
                                                 uint32_t i3) const {
    const uint32_t major = num_cores_ == 2 ? first_two.quotient : first_two.remainder;
    const uint32_t minor = num_cores_ == 2 ? last : first_two.quotient;
    return {first_two.quotient | last << 16, first_two.remainder | i3 << 16,
            (major >> bin_shift_) * bin_split_ + __umulhi(minor, minor_scale_)};
  }

  const TiledFeature& feature_;
  uint64_t num_embeddings_;
  int32_t num_cores_;
  uint32_t last_p_;
  uint32_t last_reciprocal_;
  uint32_t second_p_;
  uint32_t second_reciprocal_;
  uint32_t bin_shift_;
  uint32_t bin_split_;
  uint32_t minor_scale_;
};

}  // namespace flowtt::cuda
