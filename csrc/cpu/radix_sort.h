// Radix sort in two steps: records are scattered to buckets by the top bits of their keys, on all
// threads; each bucket, small by then, is sorted by the remaining bits on one thread. Every thread
// ends up with a contiguous range of keys, and only two barriers are needed before that.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace flowtt {

// Bits [first_bit, first_bit + num_bits) of a key.
struct KeyBits {
  int first_bit;
  int num_bits;
};

// Key words of records; Word(record) is an uint64_t of which KeyBits are sorted.
template <typename Record, typename Word>
class RadixSort {
 public:
  explicit RadixSort(const Word& word) : word_(word) {}

  // Sorts records [0, count) in place, stably; `spare` has room for as many.
  void sort(Record* records, Record* spare, int64_t count, KeyBits bits) const {
    constexpr int64_t kFewRecords = 48;
    if (bits.num_bits == 0 || count < 2) {
      return;
    }
    if (count <= kFewRecords) {
      insert(records, count, bits);
      return;
    }
    // More bits a pass than the logarithm of the count would mostly clear and scan empty bins.
    int digit_bits = 5;
    while (digit_bits < 9 && (int64_t{1} << digit_bits) < count) {
      ++digit_bits;
    }
    const int passes = (bits.num_bits + digit_bits - 1) / digit_bits;
    digit_bits = (bits.num_bits + passes - 1) / passes;
    Record* from = records;
    Record* to = spare;
    for (int pass = 0; pass < passes; ++pass) {
      scatter(from, to, count, bits.first_bit + pass * digit_bits, digit_bits);
      std::swap(from, to);
    }
    if (from != records) {
      std::memcpy(records, from, static_cast<size_t>(count) * sizeof(Record));
    }
  }

 private:
  void insert(Record* records, int64_t count, KeyBits bits) const {
    const uint64_t mask = (bits.num_bits == 64 ? 0 : uint64_t{1} << bits.num_bits) - 1;
    const auto key = [&](const Record& record) { return (word_(record) >> bits.first_bit) & mask; };
    for (int64_t i = 1; i < count; ++i) {
      const Record moved = records[i];
      const uint64_t moved_key = key(moved);
      int64_t at = i;
      for (; at > 0 && key(records[at - 1]) > moved_key; --at) {
        records[at] = records[at - 1];
      }
      records[at] = moved;
    }
  }

  void scatter(const Record* from, Record* to, int64_t count, int shift, int digit_bits) const {
    uint32_t next[1 << 9];
    const int64_t bins = int64_t{1} << digit_bits;
    const uint64_t mask = static_cast<uint64_t>(bins) - 1;
    std::memset(next, 0, static_cast<size_t>(bins) * sizeof(uint32_t));
    for (int64_t i = 0; i < count; ++i) {
      ++next[(word_(from[i]) >> shift) & mask];
    }
    uint32_t total = 0;
    for (int64_t bin = 0; bin < bins; ++bin) {
      total += std::exchange(next[bin], total);
    }
    for (int64_t i = 0; i < count; ++i) {
      to[next[(word_(from[i]) >> shift) & mask]++] = from[i];
    }
  }

  Word word_;
};

}  // namespace flowtt
