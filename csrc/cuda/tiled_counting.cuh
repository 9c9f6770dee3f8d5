// The first launch of the preparation: how many lookups of each chunk each bin has. Beside it, what
// later kernels count in and add to is cleared.

#pragma once

#include <cstdio>

#include "tiled_chunks.cuh"
#include "tiled_clearing.cuh"

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

// Counts the lookups of the chunk, a batch at a time.
template <bool kWide>
__device__ __forceinline__ void count_lookups(uint32_t* bins, const SortedChunk& chunk,
                                              const TiledFeature& feature, const BagBatch& batch,
                                              const TiledRange& range) {
  const IdSplitter splitter(feature);
  const int64_t first = range.first_lookup + chunk.first + threadIdx.x;
  bool is_bad = false;
#pragma unroll 1
  for (int32_t base = 0; base < chunk.count; base += kBatch * kPrepareThreads) {
    const int32_t existing = chunk.count - base - static_cast<int32_t>(threadIdx.x);
    int64_t ids[kBatch];
    load_ids(ids, batch, first + base, existing);
    // Not unrolled: what is executed once is read from far away, which takes longer than to execute
    // it.
#pragma unroll 1
    for (int32_t item = 0; item < min(existing, kBatch * kPrepareThreads);
         item += kPrepareThreads) {
      const bool exists = has_row(feature, ids[0]);
      is_bad |= !exists;
      atomicAdd(&bins[splitter.split_id<kWide>(exists ? ids[0] : 0).bin], 1u);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) ids[i - 1] = ids[i];
    }
  }
  if (is_bad)
    find_bad_lookup(feature, batch, first, range.first_lookup + chunk.first + chunk.count);
}

// The grid: `chunks` blocks, a chunk each, and those that clear the counters of later kernels.
__global__ void __launch_bounds__(kPrepareThreads, 3)
    tiled_count_kernel(const __grid_constant__ TiledGroup group,
                       const __grid_constant__ BagBatch batch,
                       const __grid_constant__ TiledRange range,
                       const __grid_constant__ TiledWorkspace workspace, int32_t chunks,
                       ClearedVectors counters) {
  __shared__ uint4 bins[kMaxTiledBins / 4];
  __shared__ SortedChunk shared_chunk;
  for (int32_t i = threadIdx.x; i < range.bins / 4; i += kPrepareThreads) {
    bins[i] = make_uint4(0, 0, 0, 0);
  }
  wait_for_previous_kernel();
  // Only now: the next kernels read indices and offsets before they wait, and kernels ahead of the
  // call may have written them.
  allow_dependent_launch();
  const int32_t number = static_cast<int32_t>(blockIdx.x);
  if (number >= chunks) {
    counters.clear(number - chunks, static_cast<int32_t>(gridDim.x) - chunks);
    if (workspace.order_counters != nullptr && threadIdx.x < kOrderCounters) {
      workspace.order_counters[threadIdx.x] = 0;
    }
    return;
  }
  const SortedChunk chunk = find_chunk(shared_chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  __syncthreads();
  const TiledFeature& feature = group.features[chunk.feature];
  uint32_t* const counts = reinterpret_cast<uint32_t*>(bins);
  if (feature.num_embeddings > kMaxNarrowRows) {
    count_lookups<true>(counts, chunk, feature, batch, range);
  } else {
    count_lookups<false>(counts, chunk, feature, batch, range);
  }
  __syncthreads();
  uint4* const row =
      reinterpret_cast<uint4*>(workspace.bin_starts + static_cast<int64_t>(number) * kMaxTiledBins);
  // Whole warps: a warp's vectors are the bins of a sum.
  static_assert(kSummedBins == 4 * 32);
  for (int32_t vector = threadIdx.x; vector < range.bins / 4; vector += kPrepareThreads) {
    const uint4 count = bins[vector];
    row[vector] = count;
    const uint32_t sum = __reduce_add_sync(kAllLanes, count.x + count.y + count.z + count.w);
    if (threadIdx.x % 32 == 0) workspace.bin_sums[number * kBinSums + vector / 32] = sum;
  }
}

}  // namespace flowtt::cuda
