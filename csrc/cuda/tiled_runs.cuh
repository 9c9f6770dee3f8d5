// Which lookups a block sorts: its chunk of a run of one feature.

#pragma once

#include "tiled_digits.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

// In shared memory. A run's lookups are consecutive ones of a feature, a chunk's of a run.
struct SortedChunk {
  int32_t feature;  // of the group; -1: none, the cluster has nothing to do
  int32_t first;    // lookup of the range
  int32_t count;
  int32_t begin;        // in the run
  int32_t first_entry;  // of the run
  // If all bags of the feature's samples may have one length: this length, and how many of the
  // samples' lookups are before the chunk's. Otherwise 0.
  uint32_t bag_length;
  uint32_t bag_reciprocal;  // 2^32 / bag_length, rounded down, at most 2^32 - 1
  uint32_t skipped;
};

// Lookups of a run of this many that each of 2^blocks_shift blocks sorts, but for the last ones:
// whole words of BagMarks.
constexpr int32_t chunk_lookups(int32_t run_lookups, int32_t blocks_shift) {
  return ((run_lookups + (32 << blocks_shift) - 1) >> (5 + blocks_shift)) * 32;
}

// Finds chunk `rank` of 2^blocks_shift of run number `number`, by all lanes of a warp alike. A
// feature has as many runs as its lookups need, of equal length. Offsets out of order are reported
// by clear_bags; here they only must not lead out of bounds, so every position is clamped.
inline __device__ __noinline__ void find_chunk(SortedChunk& chunk, const TiledGroup& group,
                                               const BagBatch& batch, const TiledRange& range,
                                               int32_t number, int32_t rank, int32_t blocks_shift) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t bags = range.end_sample - range.first_sample;
  int64_t lookups = 0;  // of the feature's samples
  int32_t skipped = 0;
  int32_t first = 0;
  int32_t count = 0;
  if (lane < group.count) {
    int64_t begin = 0;
    int64_t end = batch.nnz;
    // The only feature has all lookups: nothing to wait for.
    if (batch.num_features > 1 || bags < batch.batch_size) {
      const int64_t bag = group.features[lane].feature * batch.batch_size + range.first_sample;
      begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
      end = load_index(batch.offsets, batch.offsets_are_int64, bag + bags);
    }
    const int64_t clamped_begin = clamped(begin, range.first_lookup, range.end_lookup);
    lookups = end - begin;
    skipped = static_cast<int32_t>(clamped_begin - begin);
    first = static_cast<int32_t>(clamped_begin - range.first_lookup);
    count = static_cast<int32_t>(clamped(end, clamped_begin, range.end_lookup) - clamped_begin);
  }
  int32_t runs = count > 0 ? 1 : 0;
  if (count > range.run_lookups) runs = (count - 1) / range.run_lookups + 1;
  int32_t entry = 0;
  int32_t first_run = 0;
  int32_t feature = number < runs ? 0 : -1;
  if (group.count > 1) {
    int32_t entries_up_to = count;
    int32_t runs_up_to = runs;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other_entries = __shfl_up_sync(kAllLanes, entries_up_to, offset);
      const int32_t other_runs = __shfl_up_sync(kAllLanes, runs_up_to, offset);
      if (lane >= offset) {
        entries_up_to += other_entries;
        runs_up_to += other_runs;
      }
    }
    // Offsets out of order can make features overlap.
    const bool overlap =
        __shfl_sync(kAllLanes, entries_up_to, 31) > range.end_lookup - range.first_lookup;
    const uint32_t later = __ballot_sync(kAllLanes, runs_up_to > number);
    feature = overlap ? -1 : __ffs(later) - 1;
    entry = entries_up_to - count;
    first_run = runs_up_to - runs;
  }
  if (lane == max(feature, 0)) {
    chunk.feature = feature;
    if (runs > 1) {
      const int32_t per_run = (count - 1) / runs + 1;
      const int32_t begin = (number - first_run) * per_run;
      first += begin;
      entry += begin;
      skipped += begin;
      count = max(min(per_run, count - begin), 0);
    }
    const int32_t per_block = chunk_lookups(count, blocks_shift);
    chunk.begin = rank * per_block;
    chunk.first = first + chunk.begin;
    chunk.count = max(min(per_block, count - chunk.begin), 0);
    chunk.first_entry = entry;
    chunk.skipped = static_cast<uint32_t>(skipped + chunk.begin);
    uint32_t length = lookups == bags ? 1 : 0;
    uint32_t reciprocal = 0xffffffffu;
    if (bags < lookups && lookups < int64_t{1} << 31) {
      length = static_cast<uint32_t>(lookups) / static_cast<uint32_t>(bags);
      reciprocal = 0xffffffffu / length;
      if (length * bags != lookups) length = 0;
    }
    chunk.bag_reciprocal = reciprocal;
    chunk.bag_length = length;
  }
}

}  // namespace flowtt::cuda
