// Where the lookups of each feature lie, read from the offsets by every block that needs it: the
// host does not know, and asking the device would synchronise.

#pragma once

#include "float_types.cuh"
#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// In shared memory. Entries are numbered feature after feature from 0.
struct Segments {
  int32_t first_entry[kTiledFeaturesPerLaunch + 1];
};

// Reads ids and offsets where the contraction does so before the preparation has finished. The
// preparation lets the contraction start only after its own wait for the kernels before the call,
// so these have finished, and what they wrote is in L2. No acquire of the contraction's own has
// come yet, however, so nothing may be taken from the L1 cache.
__device__ __forceinline__ int64_t load_input_index(const void* data, bool is_int64, int64_t i) {
  return is_int64 ? __ldcg(static_cast<const int64_t*>(data) + i)
                  : static_cast<int64_t>(__ldcg(static_cast<const int32_t*>(data) + i));
}

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
  if (threadIdx.x < 32) {
    static_assert(kTiledFeaturesPerLaunch <= 32);
    const int32_t f = static_cast<int32_t>(threadIdx.x);
    const int64_t samples = range.end_sample - range.first_sample;
    int32_t entries = 0;
    if (f < group.count) {
      int64_t begin = 0;
      int64_t end = batch.nnz;
      // The only feature has all lookups: nothing to wait for.
      if (batch.num_features > 1 || samples < batch.batch_size) {
        const int64_t bag = group.features[f].feature * batch.batch_size + range.first_sample;
        begin = load_input_index(batch.offsets, batch.offsets_are_int64, bag);
        end = load_input_index(batch.offsets, batch.offsets_are_int64, bag + samples);
      }
      begin = clamped(begin, range.first_lookup, range.end_lookup);
      entries = static_cast<int32_t>(clamped(end, begin, range.end_lookup) - begin);
    }
    int32_t up_to = entries;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (f >= offset) up_to += other;
    }
    if (f < group.count) segments.first_entry[f + 1] = up_to;
    if (f == 0) segments.first_entry[0] = 0;
  }
  __syncthreads();
}

}  // namespace flowtt::cuda
