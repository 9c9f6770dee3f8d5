// The first launch of the preparation: how many lookups of each chunk each bin has, and the rank of
// each of these. Beside it, offsets are checked, and what later kernels count in or add to is
// cleared.

#pragma once

#include <cstdio>

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

// Counts the lookups of the chunk, a batch at a time. ranks: of the lookups of the range.
template <bool kWide>
__device__ __forceinline__ void count_lookups(uint32_t* bins, const SortedChunk& chunk,
                                              const TiledFeature& feature, const BagBatch& batch,
                                              const TiledRange& range, uint16_t* ranks) {
  const IdSplitter splitter(feature);
  const int64_t first = range.first_lookup + chunk.first + threadIdx.x;
  bool is_bad = false;
#pragma unroll 1
  for (int32_t base = 0; base < chunk.count; base += kBatch * kPrepareThreads) {
    const int32_t existing = chunk.count - base - static_cast<int32_t>(threadIdx.x);
    int64_t ids[kBatch];
    load_ids(ids, batch, first + base, existing);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i * kPrepareThreads >= existing) break;
      const bool exists = has_row(feature, ids[i]);
      is_bad |= !exists;
      ranks[chunk.first + base + i * kPrepareThreads + threadIdx.x] = static_cast<uint16_t>(
          atomicAdd(&bins[splitter.split_id<kWide>(exists ? ids[i] : 0).bin], 1u));
    }
  }
  if (is_bad)
    find_bad_lookup(feature, batch, first, range.first_lookup + chunk.first + chunk.count);
}

// The grid: `counting` blocks, a chunk each, one that clears words, and one for each piece of
// clearing. cleared: words that are to be zeros.
__global__ void __launch_bounds__(kPrepareThreads, 3) tiled_count_kernel(
    const __grid_constant__ TiledGroup group, const __grid_constant__ BagBatch batch,
    const __grid_constant__ TiledRange range, const __grid_constant__ TiledWorkspace workspace,
    const __grid_constant__ PooledOutput output, const __grid_constant__ ClearingPieces pieces,
    int32_t counting, uint4* cleared, int32_t cleared_vectors) {
  __shared__ uint4 bins[kMaxTiledBins / 4];
  __shared__ SortedChunk shared_chunk;
  constexpr int kVectors = kMaxTiledBins / 4 / kPrepareThreads;  // of a thread
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    bins[i * kPrepareThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  wait_for_previous_kernel();
  // Only now: the next kernels read indices and offsets before they wait, and kernels ahead of the
  // call may have written them.
  allow_dependent_launch();
  const int32_t number = static_cast<int32_t>(blockIdx.x);
  if (number > counting) {
    clear_bags(group, batch, range, workspace, output, pieces, number - counting - 1);
    return;
  }
  if (number == counting) {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < cleared_vectors; i += kPrepareThreads) {
      cleared[i] = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const SortedChunk chunk = find_chunk(shared_chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  __syncthreads();
  const TiledFeature& feature = group.features[chunk.feature];
  uint32_t* const counts = reinterpret_cast<uint32_t*>(bins);
  if (feature.num_embeddings > kMaxNarrowRows) {
    count_lookups<true>(counts, chunk, feature, batch, range, workspace.ranks);
  } else {
    count_lookups<false>(counts, chunk, feature, batch, range, workspace.ranks);
  }
  __syncthreads();
  uint4* const row =
      reinterpret_cast<uint4*>(workspace.bin_starts + static_cast<int64_t>(number) * kMaxTiledBins);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t vector = i * kPrepareThreads + static_cast<int32_t>(threadIdx.x);
    const uint4 count = bins[vector];
    row[vector] = count;
    static_assert(kSummedBins == 4 * 32);
    const uint32_t sum = __reduce_add_sync(kAllLanes, count.x + count.y + count.z + count.w);
    if (threadIdx.x % 32 == 0) workspace.bin_sums[number * kBinSums + vector / 32] = sum;
  }
}

}  // namespace flowtt::cuda
