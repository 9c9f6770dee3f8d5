// Stable least-significant-digit radix sort on several threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu/parallel.h"

namespace flowtt {

// Sorts by bits [first_bit, first_bit + num_bits) of key(record). Returns the buffer that holds the
// result, records or other.
template <typename Record, typename Key>
Record* radix_sort(const ParallelRunner& threads, int64_t workers, Record* records, Record* other,
                   int64_t count, int first_bit, int num_bits, const Key& key) {
  // 8 bits keep the write streams of a pass within the first-level cache and TLB.
  constexpr int kMaxDigitBits = 9;
  if (num_bits == 0 || count < 2) {
    return records;
  }
  const int passes = (num_bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (num_bits + passes - 1) / passes;
  const int64_t bins = int64_t{1} << digit_bits;
  const uint64_t mask = static_cast<uint64_t>(bins) - 1;
  std::vector<int64_t> histograms(workers * bins);
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = first_bit + pass * digit_bits;
    threads.run(workers, [&](int64_t worker) {
      int64_t* histogram = histograms.data() + worker * bins;
      std::memset(histogram, 0, bins * sizeof(int64_t));
      const int64_t end = count * (worker + 1) / workers;
      for (int64_t i = count * worker / workers; i < end; ++i) {
        ++histogram[(key(records[i]) >> shift) & mask];
      }
    });
    int64_t total = 0;
    for (int64_t bin = 0; bin < bins; ++bin) {
      for (int64_t worker = 0; worker < workers; ++worker) {
        total += std::exchange(histograms[worker * bins + bin], total);
      }
    }
    threads.run(workers, [&](int64_t worker) {
      int64_t* next = histograms.data() + worker * bins;
      const int64_t end = count * (worker + 1) / workers;
      for (int64_t i = count * worker / workers; i < end; ++i) {
        other[next[(key(records[i]) >> shift) & mask]++] = records[i];
      }
    });
    std::swap(records, other);
  }
  return records;
}

}  // namespace flowtt
