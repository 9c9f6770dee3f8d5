// Reports ids that have no row in their table.

#pragma once

#include <cstdio>

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

// For one thread alone.
inline __device__ __noinline__ void trap_on_bad_lookup(const TiledFeature& feature,
                                                       int64_t position, int64_t index) {
  printf(
      "flowtt: index out of range: feature %d (table %d), indices[%lld] = %lld, expected "
      "0 <= index < num_embeddings = %lld\n",
      feature.feature, feature.table, static_cast<long long>(position),
      static_cast<long long>(index), static_cast<long long>(feature.num_embeddings));
  __trap();
}

// Reports the first of a thread's lookups that has no row.
inline __device__ __noinline__ void find_bad_lookup(const TiledFeature& feature,
                                                    const BagBatch& batch, int64_t position,
                                                    int64_t end) {
  for (; position < end; position += kPrepareThreads) {
    const int64_t id = load_index(batch.indices, batch.indices_are_int64, position);
    if (id < 0 || id >= feature.num_embeddings) trap_on_bad_lookup(feature, position, id);
  }
}

}  // namespace flowtt::cuda
