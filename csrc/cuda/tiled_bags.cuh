// The bag of each lookup of a block's chunk of consecutive lookups, by one of three ways, the first
// that does: bags of one length are computed and confirmed; otherwise the starts of the chunk's
// bags are marked in shared memory; a chunk that meets far more bags (empty ones) than lookups
// searches for each.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_chunks.cuh"

namespace flowtt::cuda {

__device__ __forceinline__ int64_t bag_length(const BagBatch& batch, int64_t bag) {
  return load_index(batch.offsets, batch.offsets_are_int64, bag + 1) -
         load_index(batch.offsets, batch.offsets_are_int64, bag);
}

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

inline __device__ __noinline__ int64_t find_bag(const void* offsets, bool offsets_are_int64,
                                                int64_t low, int64_t high, int64_t position) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (load_index(offsets, offsets_are_int64, middle) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Bags of one length, unless the offsets say otherwise.
struct EqualBags {
  uint32_t length;  // 0: they are not
  uint32_t reciprocal;
  uint32_t skipped;  // the samples' lookups before the chunk

  __device__ __forceinline__ explicit EqualBags(const SortedChunk& chunk)
      : length(chunk.bag_length), reciprocal(chunk.bag_reciprocal), skipped(chunk.skipped) {}

  // The bag of the chunk's lookup `item`, numbered within the samples.
  __device__ __forceinline__ uint32_t bag_of(int32_t item) const {
    const uint32_t lookup = skipped + item;
    const uint32_t quotient = __umulhi(lookup, reciprocal);
    // The rounded reciprocal is at most one short.
    return quotient + (lookup - quotient * length >= length);
  }

  // offsets: of the samples' first bag. Whether that is item's bag, and as long.
  template <typename offset_t>
  __device__ __forceinline__ bool confirms(const offset_t* offsets, int32_t item) const {
    const uint32_t bag = bag_of(item);
    const offset_t begin = offsets[bag];
    const offset_t end = offsets[bag + 1];
    return end - begin == length && begin - offsets[0] == bag * length;
  }
};

// In shared memory.
struct BagMarks {
  static constexpr int kWords = kMaxChunk / 32;
  static constexpr uint32_t kLoneMark = 0x8000;  // the bag has exactly one lookup
  // At the first lookup of each bag: its number from the chunk's first on | kLoneMark.
  uint16_t bag[kMaxChunk];
  uint32_t starts[kWords];     // one bit a lookup: it is its bag's first
  int32_t last_start[kWords];  // before the word
  int64_t bounds[2];           // first and last bag of the chunk, numbered feature after feature
  int64_t first;               // lookup of the chunk
  uint32_t first_bag_sample;   // sample of the first bag

  // Whether there are too many bags to mark them all.
  __device__ __forceinline__ bool searches() const { return bounds[1] - bounds[0] >= kLoneMark; }

  __device__ __forceinline__ int32_t last_in_word(int word) const {
    const uint32_t bits = starts[word];
    return bits != 0 ? word * 32 + 31 - __clz(bits) : -1;
  }
};

// Marks the bags of a chunk [first, first + count) of a feature's lookups; first_bag: of the
// feature's samples of the range. Called by all threads; has barriers.
inline __device__ __noinline__ void mark_bags(BagMarks& marks, const BagBatch& batch,
                                              int64_t first_bag, const TiledRange& range,
                                              int64_t first, int32_t count) {
  if (threadIdx.x < 64) {
    const int end = threadIdx.x / 32;
    const int64_t bag =
        find_bag_by_warp(batch, first_bag, first_bag + range.end_sample - range.first_sample - 1,
                         end == 0 ? first : first + count - 1);
    if (threadIdx.x % 32 == 0) marks.bounds[end] = bag;
    if (threadIdx.x == 0) {
      marks.first = first;
      marks.first_bag_sample = static_cast<uint32_t>(bag - first_bag + range.first_sample);
    }
  }
  for (int32_t word = threadIdx.x; word < BagMarks::kWords; word += kPrepareThreads) {
    marks.starts[word] = 0;
  }
  if (threadIdx.x == 0) marks.bag[0] = 0;  // offsets out of order may leave no start
  __syncthreads();
  if (marks.searches()) return;
#pragma unroll 2
  for (int64_t bag = marks.bounds[0] + threadIdx.x; bag <= marks.bounds[1];
       bag += kPrepareThreads) {
    const int64_t begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
    if (begin >= end || begin >= first + count) continue;
    const int32_t start = static_cast<int32_t>(max(begin, first) - first);
    marks.bag[start] = static_cast<uint16_t>((bag - marks.bounds[0]) |
                                             (end - begin == 1 ? BagMarks::kLoneMark : 0));
    atomicOr(&marks.starts[start / 32], 1u << start % 32);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int kWordsPerLane = BagMarks::kWords / 32;
    static_assert(BagMarks::kWords % 32 == 0);
    const int lane = static_cast<int>(threadIdx.x);
    int32_t last = -1;
    for (int i = 0; i < kWordsPerLane; ++i) {
      last = max(last, marks.last_in_word(lane * kWordsPerLane + i));
    }
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, last, offset);
      if (lane >= offset) last = max(last, other);
    }
    last = __shfl_up_sync(kAllLanes, last, 1);
    if (lane == 0) last = -1;
    for (int i = 0; i < kWordsPerLane; ++i) {
      marks.last_start[lane * kWordsPerLane + i] = last;
      last = max(last, marks.last_in_word(lane * kWordsPerLane + i));
    }
  }
  __syncthreads();
}

// The sample of the chunk's lookup `item`, after mark_bags: as in GroupedLookup.
__device__ __forceinline__ uint32_t marked_sample(const BagMarks& marks, const BagBatch& batch,
                                                  int32_t item) {
  if (marks.searches()) {
    const int64_t bag = find_bag(batch.offsets, batch.offsets_are_int64, marks.bounds[0],
                                 marks.bounds[1], marks.first + item);
    return (marks.first_bag_sample + static_cast<uint32_t>(bag - marks.bounds[0])) |
           (bag_length(batch, bag) == 1 ? kLoneLookup : 0);
  }
  const uint32_t up_to = marks.starts[item / 32] & (0xffffffffu >> (31 - item % 32));
  const int32_t start = up_to != 0 ? (item & ~31) + 31 - __clz(up_to) : marks.last_start[item / 32];
  const uint32_t mark = marks.bag[max(start, 0)];
  return (marks.first_bag_sample + mark % BagMarks::kLoneMark) |
         (mark >= BagMarks::kLoneMark ? kLoneLookup : 0);
}

// Whether the bags of the thread's lookups are of one length. offsets: of the samples' first bag.
template <typename offset_t>
__device__ __forceinline__ bool confirm_bags(const EqualBags& bags, const offset_t* offsets,
                                             int32_t count) {
  bool confirmed = true;
#pragma unroll 4
  for (int32_t item = threadIdx.x; item < count; item += kPrepareThreads) {
    confirmed &= bags.confirms(offsets, item);
  }
  return confirmed;
}

// Finds out whether the bags of all lookups of the chunk are of one length, and marks the chunk's
// bags if not. Called by all threads; may have barriers.
__device__ __forceinline__ bool find_bags(BagMarks& marks, const SortedChunk& chunk,
                                          const TiledGroup& group, const BagBatch& batch,
                                          const TiledRange& range) {
  if (batch.pooling_mode == PoolingMode::kNone) return true;
  const int64_t first_bag =
      group.features[chunk.feature].feature * batch.batch_size + range.first_sample;
  const EqualBags bags(chunk);
  bool confirmed = bags.length != 0;
  if (confirmed) {
    confirmed = batch.offsets_are_int64
                    ? confirm_bags(bags, static_cast<const int64_t*>(batch.offsets) + first_bag,
                                   chunk.count)
                    : confirm_bags(bags, static_cast<const int32_t*>(batch.offsets) + first_bag,
                                   chunk.count);
  }
  if (__syncthreads_and(confirmed)) return true;
  mark_bags(marks, batch, first_bag, range, range.first_lookup + chunk.first, chunk.count);
  return false;
}

// The sample of the chunk's lookup `item`, as in GroupedLookup.
__device__ __forceinline__ uint32_t find_sample(const BagMarks& marks,
                                                const SortedChunk& chunk, bool equal_bags,
                                                const BagBatch& batch, const TiledRange& range,
                                                int32_t item) {
  if (batch.pooling_mode == PoolingMode::kNone) {
    return static_cast<uint32_t>(range.first_lookup + chunk.first + item) | kLoneLookup;
  }
  if (!equal_bags) return marked_sample(marks, batch, item);
  const EqualBags bags(chunk);
  return (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
         (bags.length == 1 ? kLoneLookup : 0);
}

// As in TiledWorkspace. position: of the lookup, in the call; length: of its bag, or 0 to read it.
inline __device__ __noinline__ float find_factor(const BagBatch& batch, const TiledFeature& feature,
                                                 int64_t position, uint32_t sample,
                                                 uint32_t length) {
  float factor = load_sample_weight<float>(batch, position);
  if (batch.pooling_mode == PoolingMode::kMean) {
    const int64_t bag = feature.feature * batch.batch_size + (sample & ~kLoneLookup);
    factor /= static_cast<float>(length != 0 ? length : bag_length(batch, bag));
  }
  return factor;
}

}  // namespace flowtt::cuda
