// The first half of the counting sort: how many lookups each bin has, and the place of every lookup
// within its bin. A block counts its chunk in shared memory, then adds each count to the bin's
// counter in device memory, which answers with the place of the block's first lookup of the bin:
// one atomic for each block and bin, however many lookups share the bin.

#pragma once

#include <cstdio>

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

// In shared memory.
struct CountingScratch {
  // The block's lookups of each bin, then the place of the first of them within the bin.
  alignas(16) uint32_t bins[kMaxTiledBins];
  SortedChunk chunk;
};

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

// Called by all threads; the bins may be used after the next barrier.
__device__ __forceinline__ void clear_bins(CountingScratch& scratch) {
  uint4* words = reinterpret_cast<uint4*>(scratch.bins);
#pragma unroll
  for (int i = 0; i < kMaxTiledBins / 4 / kPrepareThreads; ++i) {
    words[i * kPrepareThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
}

// Counts chunk `number`. Called by all threads of a block. Waits for the previous kernel, which
// clears the counters, only when it needs them.
__device__ __forceinline__ void count_chunk(CountingScratch& scratch, const TiledGroup& group,
                                            const BagBatch& batch, const TiledRange& range,
                                            const TiledWorkspace& workspace, int32_t number) {
  clear_bins(scratch);
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  const int32_t existing = chunk.count - static_cast<int32_t>(threadIdx.x);
  const int64_t first = range.first_lookup + chunk.first + threadIdx.x;
  int64_t ids[kMaxItems];
  load_ids(ids, batch, first, existing);
  bool is_bad = false;
  uint32_t bins[kMaxItems];
  const IdSplitter splitter(feature);
  if (feature.num_embeddings <= kMaxNarrowRows) {
    const uint32_t num_embeddings = static_cast<uint32_t>(feature.num_embeddings);
#pragma unroll
    for (int i = 0; i < kMaxItems; ++i) {
      // The same for all threads: small chunks skip the rest.
      if (i * kPrepareThreads >= chunk.count) break;
      is_bad |= static_cast<uint64_t>(ids[i]) >= num_embeddings;
      bins[i] = splitter.split(static_cast<uint32_t>(ids[i])).bin;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kMaxItems; ++i) {
      if (i * kPrepareThreads >= chunk.count) break;
      is_bad |= ids[i] < 0 || ids[i] >= feature.num_embeddings;
      bins[i] = splitter.split_wide(static_cast<uint64_t>(ids[i])).bin;
    }
  }
  if (is_bad) {
    find_bad_lookup(feature, batch, first, range.first_lookup + chunk.first + chunk.count);
  }
  __syncthreads();
  uint32_t ranks[kMaxItems];  // within the block and the bin
#pragma unroll
  for (int i = 0; i < kMaxItems; ++i) {
    if (i * kPrepareThreads < existing) ranks[i] = atomicAdd(&scratch.bins[bins[i]], 1u);
  }
  __syncthreads();
  wait_for_previous_kernel();
  uint32_t* const counters = workspace.bin_counts + chunk.feature * kMaxTiledBins;
  uint32_t starts[kMaxItems];
#pragma unroll
  for (int i = 0; i < kMaxItems; ++i) {
    if (i * kPrepareThreads < existing && ranks[i] == 0) {
      starts[i] = atomicAdd(counters + bins[i], scratch.bins[bins[i]]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxItems; ++i) {
    if (i * kPrepareThreads < existing && ranks[i] == 0) scratch.bins[bins[i]] = starts[i];
  }
  __syncthreads();
  uint32_t* const places = workspace.places + chunk.first + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kMaxItems; ++i) {
    if (i * kPrepareThreads < existing) {
      places[i * kPrepareThreads] = scratch.bins[bins[i]] + ranks[i];
    }
  }
}

}  // namespace flowtt::cuda
