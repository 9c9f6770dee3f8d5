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
  // If all bags of the feature's samples may have one length: this length, its reciprocal as in
  // TiledRange, and how many of the samples' lookups are before the chunk's. Otherwise 0.
  uint32_t bag_length;
  uint32_t bag_reciprocal;
  uint32_t skipped;
};

// Lookups of a run of this many that each of 2^blocks_shift blocks sorts, but for the last ones:
// whole words of BagMarks.
constexpr int32_t chunk_lookups(int32_t run_lookups, int32_t blocks_shift) {
  return ((run_lookups + (32 << blocks_shift) - 1) >> (5 + blocks_shift)) * 32;
}

// The lookups of one feature in the range, and the runs they are cut into.
struct FeatureRuns {
  int64_t lookups;  // of the feature's samples, in the range or not
  int32_t skipped;  // of these, before the range
  int32_t first;
  int32_t count;
  int32_t entry;
  int32_t runs;
};

__device__ __forceinline__ int32_t count_runs(int32_t lookups, int32_t run_lookups) {
  if (lookups <= run_lookups) return lookups > 0 ? 1 : 0;
  return (lookups - 1) / run_lookups + 1;
}

// Writes down chunk `rank` of 2^blocks_shift of the feature's run number `run`, by one thread.
__device__ __forceinline__ void describe_chunk(SortedChunk& chunk, const TiledRange& range,
                                               int32_t feature, const FeatureRuns& runs,
                                               int32_t run, int32_t rank, int32_t blocks_shift) {
  int32_t run_begin = 0;
  int32_t run_count = runs.count;
  if (runs.runs > 1) {
    const int32_t per_run = (runs.count - 1) / runs.runs + 1;
    run_begin = run * per_run;
    run_count = max(min(per_run, runs.count - run_begin), 0);
  }
  const int32_t per_block = chunk_lookups(run_count, blocks_shift);
  const int32_t begin = rank * per_block;
  chunk.feature = feature;
  chunk.first = runs.first + run_begin + begin;
  chunk.count = max(min(per_block, run_count - begin), 0);
  chunk.begin = begin;
  chunk.first_entry = runs.entry + run_begin;
  chunk.skipped = static_cast<uint32_t>(runs.skipped + run_begin + begin);
  const int64_t bags = range.end_sample - range.first_sample;
  uint32_t length = range.bag_length;
  uint32_t reciprocal = range.bag_reciprocal;
  if (length == 0 || bags * length != runs.lookups) {
    length = 0;
    if (bags <= runs.lookups && runs.lookups < int64_t{1} << 31) {
      const uint32_t quotient = static_cast<uint32_t>(runs.lookups) / static_cast<uint32_t>(bags);
      if (quotient * bags == runs.lookups) length = quotient;
      reciprocal = bag_reciprocal(quotient);
    }
  }
  chunk.bag_length = length;
  chunk.bag_reciprocal = reciprocal;
}

// One of several features, by all lanes of a warp.
inline __device__ __noinline__ void find_chunk_of_group(SortedChunk& chunk, const TiledGroup& group,
                                                        const BagBatch& batch,
                                                        const TiledRange& range, int32_t number,
                                                        int32_t rank, int32_t blocks_shift) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  FeatureRuns runs{};
  if (lane < group.count) {
    const int64_t bag = group.features[lane].feature * batch.batch_size + range.first_sample;
    const int64_t begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t end = load_index(batch.offsets, batch.offsets_are_int64,
                                   bag + range.end_sample - range.first_sample);
    const int64_t first = clamped(begin, range.first_lookup, range.end_lookup);
    runs.lookups = end - begin;
    runs.skipped = static_cast<int32_t>(first - begin);
    runs.first = static_cast<int32_t>(first - range.first_lookup);
    runs.count = static_cast<int32_t>(clamped(end, first, range.end_lookup) - first);
    runs.runs = count_runs(runs.count, range.run_lookups);
  }
  int32_t entries_up_to = runs.count;
  int32_t runs_up_to = runs.runs;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other_entries = __shfl_up_sync(kAllLanes, entries_up_to, offset);
    const int32_t other_runs = __shfl_up_sync(kAllLanes, runs_up_to, offset);
    if (lane >= offset) {
      entries_up_to += other_entries;
      runs_up_to += other_runs;
    }
  }
  runs.entry = entries_up_to - runs.count;
  // Offsets out of order can make features overlap.
  const bool overlap =
      __shfl_sync(kAllLanes, entries_up_to, 31) > range.end_lookup - range.first_lookup;
  const int feature = __ffs(__ballot_sync(kAllLanes, runs_up_to > number)) - 1;
  if (overlap || feature < 0) {
    if (lane == 0) chunk.feature = -1;
  } else if (lane == feature) {
    describe_chunk(chunk, range, feature, runs, number - (runs_up_to - runs.runs), rank,
                   blocks_shift);
  }
}

// Finds chunk `rank` of 2^blocks_shift of run number `number`, by all lanes of a warp. A feature
// has as many runs as its lookups need, of equal length. Offsets out of order are reported by
// clear_bags; here they only must not lead out of bounds, so every position is clamped.
__device__ __forceinline__ void find_chunk(SortedChunk& chunk, const TiledGroup& group,
                                           const BagBatch& batch, const TiledRange& range,
                                           int32_t number, int32_t rank, int32_t blocks_shift) {
  if (batch.num_features > 1 || range.end_sample - range.first_sample < batch.batch_size) {
    find_chunk_of_group(chunk, group, batch, range, number, rank, blocks_shift);
    return;
  }
  // The only feature has all lookups: nothing to wait for.
  if (threadIdx.x % 32 == 0) {
    FeatureRuns runs{};
    runs.lookups = batch.nnz;
    runs.skipped = static_cast<int32_t>(range.first_lookup);
    runs.count = static_cast<int32_t>(range.end_lookup - range.first_lookup);
    runs.runs = count_runs(runs.count, range.run_lookups);
    describe_chunk(chunk, range, number < runs.runs ? 0 : -1, runs, number, rank, blocks_shift);
  }
}

}  // namespace flowtt::cuda
