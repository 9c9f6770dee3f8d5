// Division of non-negative int64 values by a divisor known only at run time.
#pragma once

#include <cstdint>

namespace flowtt {

// Exact for every value below 2^63: with l = ceil(log2 divisor) and magic =
// floor(2^(63 + l) / divisor) + 1, floor(value * magic / 2^(63 + l)) is the quotient, because the
// rounding error magic * divisor - 2^(63 + l) is at most 2^l (Granlund and Montgomery 1994,
// thm 4.2).
struct FastDivisor {
  uint64_t divisor;
  uint64_t magic;
  int32_t shift;  // l - 1; -1 for divisor 1
};

static inline FastDivisor fast_divisor(int64_t divisor) {
  int32_t log = 0;
  while (log < 63 && (uint64_t{1} << log) < static_cast<uint64_t>(divisor)) {
    ++log;
  }
  const unsigned __int128 numerator = static_cast<unsigned __int128>(1) << (63 + log);
  return {static_cast<uint64_t>(divisor), static_cast<uint64_t>(numerator / divisor) + 1, log - 1};
}

__attribute__((always_inline)) static inline uint64_t divide(uint64_t value,
                                                             const FastDivisor& by) {
  const uint64_t high =
      static_cast<uint64_t>((static_cast<unsigned __int128>(value) * by.magic) >> 64);
  return by.shift < 0 ? value : high >> by.shift;
}

}  // namespace flowtt
