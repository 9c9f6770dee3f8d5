// The bag of each lookup of a block's chunk, and what its row is multiplied by there.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"

namespace flowtt::cuda {

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
__device__ __forceinline__ uint32_t find_sample(const BagMarks& marks, const SortedChunk& chunk,
                                                bool equal_bags, const BagBatch& batch,
                                                const TiledRange& range, int32_t item) {
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
