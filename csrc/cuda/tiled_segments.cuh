// Where the lookups of each feature lie, read from the offsets by every block that needs it: the
// host does not know, and asking the device would synchronise.

#pragma once

#include "float_types.cuh"
#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// In shared memory. Entries are numbered feature after feature from 0.
struct Segments {
  int64_t begin[kTiledFeaturesPerLaunch];  // the feature's first lookup of the range in `indices`
  // All of the feature's lookups for the samples of the range, as the offsets have them.
  int64_t samples_begin[kTiledFeaturesPerLaunch];
  int64_t samples_end[kTiledFeaturesPerLaunch];
  int32_t first_entry[kTiledFeaturesPerLaunch + 1];
  int32_t first_chunk[kTiledFeaturesPerLaunch + 1];
};

__device__ __forceinline__ int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Called by all threads; ends with a barrier. Offsets out of order are reported by clear_bags; here
// they only must not lead out of bounds, so every position is clamped.
__device__ __forceinline__ void load_segments(Segments& segments, const TiledGroup& group,
                                              const BagBatch& batch, const TiledRange& range) {
  // The only feature has all lookups: nothing to wait for.
  const bool is_whole =
      batch.num_features == 1 && range.first_sample == 0 && range.end_sample == batch.batch_size;
  if (threadIdx.x < 32) {
    int32_t entries_before = 0;
    int32_t chunks_before = 0;
    for (int32_t base = 0; base < group.count; base += 32) {
      const int32_t f = base + static_cast<int32_t>(threadIdx.x);
      int32_t entries = 0;
      int64_t begin = range.first_lookup;
      if (f < group.count && is_whole) {
        entries = static_cast<int32_t>(range.end_lookup - range.first_lookup);
        segments.samples_begin[f] = 0;
        segments.samples_end[f] = batch.nnz;
      } else if (f < group.count) {
        const int64_t first_bag = group.features[f].feature * batch.batch_size;
        begin = load_index(batch.offsets, batch.offsets_are_int64, first_bag + range.first_sample);
        int64_t end =
            load_index(batch.offsets, batch.offsets_are_int64, first_bag + range.end_sample);
        segments.samples_begin[f] = begin;
        segments.samples_end[f] = end;
        begin = clamped(begin, range.first_lookup, range.end_lookup);
        end = clamped(end, begin, range.end_lookup);
        entries = static_cast<int32_t>(end - begin);
      }
      const int32_t chunks = (entries + range.chunk_lookups - 1) / range.chunk_lookups;
      int32_t entries_up_to = entries;
      int32_t chunks_up_to = chunks;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int32_t other_entries = __shfl_up_sync(kAllLanes, entries_up_to, offset);
        const int32_t other_chunks = __shfl_up_sync(kAllLanes, chunks_up_to, offset);
        if (threadIdx.x >= offset) {
          entries_up_to += other_entries;
          chunks_up_to += other_chunks;
        }
      }
      if (f < group.count) {
        segments.begin[f] = begin;
        segments.first_entry[f + 1] = entries_before + entries_up_to;
        segments.first_chunk[f + 1] = chunks_before + chunks_up_to;
      }
      entries_before += __shfl_sync(kAllLanes, entries_up_to, 31);
      chunks_before += __shfl_sync(kAllLanes, chunks_up_to, 31);
    }
    if (threadIdx.x == 0) segments.first_entry[0] = segments.first_chunk[0] = 0;
  }
  __syncthreads();
}

}  // namespace flowtt::cuda
