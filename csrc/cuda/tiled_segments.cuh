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

__device__ __forceinline__ int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// The sum of the values of the lanes up to this one. By all lanes of a warp.
template <typename T>
__device__ __forceinline__ T inclusive_sum(T value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kAllLanes, value, offset);
    if (threadIdx.x % 32 >= offset) value += other;
  }
  return value;
}

// The sum of the values of the block's threads before this one. warp_sums: in shared memory, free.
// Called by all threads; has a barrier.
template <int kWarps>
__device__ __forceinline__ uint32_t sum_of_threads_before(uint32_t value,
                                                          uint32_t (&warp_sums)[kWarps]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const uint32_t up_to = inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = up_to;
  __syncthreads();
  return up_to - value + __reduce_add_sync(kAllLanes, lane < warp ? warp_sums[lane] : 0);
}

// The lookups of a feature's samples.
struct LookupSpan {
  int64_t begin;  // in or out of the range, as the offsets say
  int64_t end;
  int64_t first;  // and those in the range
  int32_t count;
};

// Offsets out of order are reported by clear_bags; here they only must not lead out of bounds, so
// every position is clamped.
__device__ __forceinline__ LookupSpan load_span(const TiledFeature& feature, const BagBatch& batch,
                                                const TiledRange& range) {
  const int64_t bag = feature.feature * batch.batch_size + range.first_sample;
  LookupSpan span;
  span.begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
  span.end = load_index(batch.offsets, batch.offsets_are_int64,
                        bag + range.end_sample - range.first_sample);
  span.first = clamped(span.begin, range.first_lookup, range.end_lookup);
  span.count = static_cast<int32_t>(clamped(span.end, span.first, range.end_lookup) - span.first);
  return span;
}

// Whether the only feature has all lookups, so that offsets need not be read to find them.
__device__ __forceinline__ bool has_all_lookups(const BagBatch& batch, const TiledRange& range) {
  return batch.num_features == 1 && range.end_sample - range.first_sample == batch.batch_size;
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

// Called by all threads; ends with a barrier.
__device__ __forceinline__ void load_segments(Segments& segments, const TiledGroup& group,
                                              const BagBatch& batch, const TiledRange& range) {
  if (threadIdx.x < 32) {
    static_assert(kTiledFeaturesPerLaunch <= 32);
    const int32_t f = static_cast<int32_t>(threadIdx.x);
    int32_t entries = 0;
    if (f < group.count) {
      entries = has_all_lookups(batch, range)
                    ? static_cast<int32_t>(range.end_lookup - range.first_lookup)
                    : load_span(group.features[f], batch, range).count;
    }
    const int32_t up_to = inclusive_sum(entries);
    if (f < group.count) segments.first_entry[f + 1] = up_to;
    if (f == 0) segments.first_entry[0] = 0;
  }
  __syncthreads();
}

// Entries [first, first + count) of feature f of the group.
struct EntryChunk {
  int32_t f;
  int32_t first;
  int32_t count;  // 0: there are none
};

// Finds chunk `number`; feature after feature, of each as many as it needs, of equal length, at
// most `most`. By the first warp.
__device__ __forceinline__ void find_entry_chunk(EntryChunk& chunk, const Segments& segments,
                                                 int32_t features, int32_t most, int32_t number) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t first = segments.first_entry[min(lane, features - 1)];
  const int32_t entries = lane < features ? segments.first_entry[lane + 1] - first : 0;
  const int32_t chunks = (entries + most - 1) / most;
  const int32_t up_to = inclusive_sum(chunks);
  const int32_t f = __ffs(__ballot_sync(kAllLanes, up_to > number)) - 1;
  if (lane == max(f, 0)) {
    const int32_t per_chunk = chunks > 0 ? (entries + chunks - 1) / chunks : 0;
    const int32_t begin = min((number - (up_to - chunks)) * per_chunk, entries);
    chunk = {f, first + begin, f < 0 ? 0 : min(per_chunk, entries - begin)};
  }
}

}  // namespace flowtt::cuda
