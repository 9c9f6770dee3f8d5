// The bag of each lookup of a block's chunk of consecutive lookups, by one of three ways, the first
// that does: bags of one length are computed; otherwise the starts of the chunk's bags are marked
// in shared memory; a chunk that meets far more bags (empty ones) than lookups searches for each.

#pragma once

#include "tiled_digits.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

constexpr int kPrepareThreads = 512;
constexpr int kPrepareWarps = kPrepareThreads / 32;

// Lookups that one block sorts, so many a thread.
constexpr int kSortItems = 16;
constexpr int kSortedPerBlock = kSortItems * kPrepareThreads;

// The last bag of [low, high] that starts at or before `position`, by all lanes of a warp.
__device__ __forceinline__ int64_t find_bag_by_warp(const BagBatch& batch, int64_t low,
                                                    int64_t high, int64_t position) {
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t probe = low + (lane + 1) * step;
    const bool starts_before =
        probe <= high && load_index(batch.offsets, batch.offsets_are_int64, probe) <= position;
    const int before = __popc(__ballot_sync(kAllLanes, starts_before));
    low += before * step;
    high = min(high, low + step - 1);
  }
  return low;
}

__device__ __forceinline__ int64_t find_bag(const BagBatch& batch, int64_t low, int64_t high,
                                            int64_t position) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (load_index(batch.offsets, batch.offsets_are_int64, middle) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// In shared memory.
struct BagMarks {
  uint32_t sample[kSortedPerBlock];          // at the first lookup of each bag: as in GroupedLookup
  uint32_t starts[kSortedPerBlock / 32];     // one bit a lookup: it is its bag's first
  int32_t last_start[kSortedPerBlock / 32];  // before the word
  int64_t bounds[2];                         // first and last bag
};

class ChunkBags {
 public:
  // The chunk is [first, first + count) of `indices`; count > 0.
  __device__ __forceinline__ ChunkBags(BagMarks& marks, const Segments& segments, int32_t f,
                                       const TiledFeature& feature, const BagBatch& batch,
                                       const TiledRange& range, int64_t first, int32_t count)
      : marks_(marks),
        batch_(batch),
        first_bag_(feature.feature * batch.batch_size),
        low_(first_bag_ + range.first_sample),
        high_(first_bag_ + range.end_sample - 1),
        first_(first),
        count_(count) {
    const int64_t lookups = segments.samples_end[f] - segments.samples_begin[f];
    const int64_t bags = high_ + 1 - low_;
    before_ = first - segments.samples_begin[f];
    length_ = 0;
    if (lookups > 0 && lookups < int64_t{1} << 31 && bags <= lookups) {
      const uint32_t length = static_cast<uint32_t>(lookups) / static_cast<uint32_t>(bags);
      if (length * bags == lookups) length_ = length;
    }
    reciprocal_ = length_ > 1 ? 0xffffffffu / length_ : 0xffffffffu;
    samples_begin_ = segments.samples_begin[f];
  }

  // Whether the thread's part of the offsets has bags of one length.
  __device__ __forceinline__ bool is_uniform() const {
    if (length_ == 0) return false;
    bool uniform = true;
    const int64_t from = low_ + divided(static_cast<uint32_t>(before_));
    const int64_t to = low_ + divided(static_cast<uint32_t>(before_ + count_ - 1)) + 1;
    constexpr int kLoads = 4;
    for (int64_t base = from + threadIdx.x; base <= to; base += kLoads * kPrepareThreads) {
      int64_t start[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t bag = min(base + i * kPrepareThreads, to);
        start[i] =
            load_index(batch_.offsets, batch_.offsets_are_int64, bag) - (bag - low_) * length_;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) uniform = uniform & (start[i] == samples_begin_);
    }
    return uniform;
  }

  // Called by all threads when bags are not of one length; has barriers.
  __device__ void mark() {
    length_ = 0;
    if (threadIdx.x < 64) {
      const int end = threadIdx.x / 32;
      const int64_t bag =
          find_bag_by_warp(batch_, low_, high_, end == 0 ? first_ : first_ + count_ - 1);
      if (threadIdx.x % 32 == 0) marks_.bounds[end] = bag;
    }
    for (int32_t word = threadIdx.x; word < kSortedPerBlock / 32; word += kPrepareThreads) {
      marks_.starts[word] = 0;
    }
    __syncthreads();
    if (searches()) return;
    for (int64_t bag = marks_.bounds[0] + threadIdx.x; bag <= marks_.bounds[1];
         bag += kPrepareThreads) {
      const int64_t begin = load_index(batch_.offsets, batch_.offsets_are_int64, bag);
      const int64_t end = load_index(batch_.offsets, batch_.offsets_are_int64, bag + 1);
      if (begin >= end || begin >= first_ + count_) continue;
      const int32_t start = static_cast<int32_t>(max(begin, first_) - first_);
      marks_.sample[start] =
          static_cast<uint32_t>(bag - first_bag_) | (end - begin == 1 ? kLoneLookup : 0);
      atomicOr(&marks_.starts[start / 32], 1u << start % 32);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr int kWords = kSortedPerBlock / 32 / 32;
      const int lane = static_cast<int>(threadIdx.x);
      int32_t last = -1;
      for (int i = 0; i < kWords; ++i) last = max(last, last_in_word(lane * kWords + i));
      for (int offset = 1; offset < 32; offset *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, last, offset);
        if (lane >= offset) last = max(last, other);
      }
      last = __shfl_up_sync(kAllLanes, last, 1);
      if (lane == 0) last = -1;
      for (int i = 0; i < kWords; ++i) {
        marks_.last_start[lane * kWords + i] = last;
        last = max(last, last_in_word(lane * kWords + i));
      }
    }
    __syncthreads();
  }

  // The sample of the chunk's lookup `item`, with kLoneLookup if it is its only one.
  __device__ __forceinline__ uint32_t sample_of(int32_t item) const {
    if (length_ != 0) {
      const uint32_t bag = divided(static_cast<uint32_t>(before_) + static_cast<uint32_t>(item));
      return static_cast<uint32_t>(low_ - first_bag_) + bag | (length_ == 1 ? kLoneLookup : 0);
    }
    if (searches()) {
      const int64_t bag = find_bag(batch_, marks_.bounds[0], marks_.bounds[1], first_ + item);
      return static_cast<uint32_t>(bag - first_bag_) | (length_of(bag) == 1 ? kLoneLookup : 0);
    }
    const uint32_t up_to = marks_.starts[item / 32] & (0xffffffffu >> (31 - item % 32));
    const int32_t start =
        up_to != 0 ? (item & ~31) + 31 - __clz(up_to) : marks_.last_start[item / 32];
    return marks_.sample[max(start, 0)];
  }

  // Lookups of the sample's bag.
  __device__ __forceinline__ float length(uint32_t sample) const {
    if ((sample & kLoneLookup) != 0) return 1.0f;
    return static_cast<float>(length_ != 0 ? length_ : length_of(first_bag_ + sample));
  }

 private:
  // Number of the bag of length_ that holds a lookup.
  __device__ __forceinline__ uint32_t divided(uint32_t lookup) const {
    return length_ == 1 ? lookup : divide(lookup, length_, reciprocal_).quotient;
  }

  __device__ __forceinline__ int64_t length_of(int64_t bag) const {
    return load_index(batch_.offsets, batch_.offsets_are_int64, bag + 1) -
           load_index(batch_.offsets, batch_.offsets_are_int64, bag);
  }

  __device__ __forceinline__ bool searches() const {
    return marks_.bounds[1] - marks_.bounds[0] > 8 * kSortedPerBlock;
  }

  __device__ __forceinline__ int32_t last_in_word(int word) const {
    const uint32_t bits = marks_.starts[word];
    return bits != 0 ? word * 32 + 31 - __clz(bits) : -1;
  }

  BagMarks& marks_;
  const BagBatch& batch_;
  int64_t first_bag_;
  int64_t low_;
  int64_t high_;
  int64_t first_;
  int64_t samples_begin_;
  int64_t before_;  // lookups of the feature's samples before the chunk
  int32_t count_;
  uint32_t length_;  // of every bag, or 0
  uint32_t reciprocal_;
};

}  // namespace flowtt::cuda
