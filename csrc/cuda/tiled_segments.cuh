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
  int32_t first_run[kTiledFeaturesPerLaunch + 1];
};

__device__ __forceinline__ int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// The pieces of the range that lie in the bag [begin, end).
struct BagPieces {
  int32_t first;
  int32_t end;

  __device__ __forceinline__ BagPieces(const TiledRange& range, int64_t begin, int64_t end_lookup) {
    const int64_t from = max(begin, range.first_lookup) - range.first_lookup;
    const int64_t to = min(end_lookup, range.end_lookup) - range.first_lookup;
    first = static_cast<int32_t>((from + kPoolPiece - 1) / kPoolPiece);
    end = from < to ? static_cast<int32_t>(to / kPoolPiece) : first;
  }
  __device__ __forceinline__ bool is_long() const { return end - first >= kLongBagPieces; }
};

// Called by all threads; ends with a barrier. Offsets out of order are reported by clear_bags; here
// they only must not lead out of bounds, so every position is clamped.
__device__ __forceinline__ void load_segments(Segments& segments, const TiledGroup& group,
                                              const BagBatch& batch, const TiledRange& range) {
  // The only feature has all lookups: nothing to wait for.
  const bool is_whole =
      batch.num_features == 1 && range.first_sample == 0 && range.end_sample == batch.batch_size;
  if (threadIdx.x < 32) {
    static_assert(kTiledFeaturesPerLaunch <= 32);
    const int32_t f = static_cast<int32_t>(threadIdx.x);
    int32_t entries = 0;
    int64_t begin = range.first_lookup;
    if (f < group.count) {
      int64_t samples_begin = 0;
      int64_t samples_end = batch.nnz;
      if (!is_whole) {
        const int64_t first_bag = group.features[f].feature * batch.batch_size;
        samples_begin =
            load_index(batch.offsets, batch.offsets_are_int64, first_bag + range.first_sample);
        samples_end =
            load_index(batch.offsets, batch.offsets_are_int64, first_bag + range.end_sample);
      }
      begin = clamped(samples_begin, range.first_lookup, range.end_lookup);
      entries = static_cast<int32_t>(clamped(samples_end, begin, range.end_lookup) - begin);
      segments.samples_begin[f] = samples_begin;
      segments.samples_end[f] = samples_end;
      segments.begin[f] = begin;
    }
    const int32_t runs = (entries + range.run_lookups - 1) / range.run_lookups;
    int32_t entries_up_to = entries;
    int32_t runs_up_to = runs;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other_entries = __shfl_up_sync(kAllLanes, entries_up_to, offset);
      const int32_t other_runs = __shfl_up_sync(kAllLanes, runs_up_to, offset);
      if (static_cast<int>(threadIdx.x) >= offset) {
        entries_up_to += other_entries;
        runs_up_to += other_runs;
      }
    }
    if (f < group.count) {
      segments.first_entry[f + 1] = entries_up_to;
      segments.first_run[f + 1] = runs_up_to;
    }
    if (f == 0) segments.first_entry[0] = segments.first_run[0] = 0;
  }
  __syncthreads();
}

}  // namespace flowtt::cuda
