// Division of non-negative integers by a divisor known only at run time: one multiplication and one
// shift, on the CPU and on the GPU.
//
// Exact for every value below 2^63 (2^31): with l = ceil(log2 divisor) and magic =
// floor(2^(63 + l) / divisor) + 1, floor(value * magic / 2^(63 + l)) is the quotient, because the
// rounding error magic * divisor - 2^(63 + l) is at most 2^l (Granlund and Montgomery 1994,
// thm 4.2).
#pragma once

#include <cstdint>

namespace flowtt {

constexpr int32_t ceil_log2(uint64_t value) {
  int32_t log = 0;
  while (log < 63 && (uint64_t{1} << log) < value) {
    ++log;
  }
  return log;
}

struct FastDivisor {
  uint64_t divisor;
  uint64_t magic;
  int32_t shift;  // l - 1; -1 for divisor 1
};

constexpr FastDivisor fast_divisor(int64_t divisor) {
  const int32_t log = ceil_log2(static_cast<uint64_t>(divisor));
  const unsigned __int128 numerator = static_cast<unsigned __int128>(1) << (63 + log);
  return {static_cast<uint64_t>(divisor), static_cast<uint64_t>(numerator / divisor) + 1, log - 1};
}

__attribute__((always_inline)) constexpr uint64_t divide(uint64_t value, const FastDivisor& by) {
  const uint64_t high =
      static_cast<uint64_t>((static_cast<unsigned __int128>(value) * by.magic) >> 64);
  return by.shift < 0 ? value : high >> by.shift;
}

// The same for values and divisors below 2^31.
struct FastDivisor32 {
  uint32_t magic;
  int32_t shift;
};

constexpr FastDivisor32 fast_divisor32(int32_t divisor) {
  const int32_t log = ceil_log2(static_cast<uint64_t>(divisor));
  const uint64_t numerator = uint64_t{1} << (31 + log);
  return {static_cast<uint32_t>(numerator / static_cast<uint64_t>(divisor)) + 1, log - 1};
}

__attribute__((always_inline)) constexpr uint32_t divide(uint32_t value, const FastDivisor32& by) {
  const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(value) * by.magic) >> 32);
  return by.shift < 0 ? value : high >> by.shift;
}

}  // namespace flowtt
