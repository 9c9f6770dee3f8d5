// The last launch of the preparation: every lookup is written to its place. What needs nothing of
// the launches before is done before waiting for them, and kept in shared memory.

#pragma once

#include "tiled_lookup_bags.cuh"
#include "tiled_side_work.cuh"

namespace flowtt::cuda {

// At the start of dynamic shared memory. Small, so that a multiprocessor has room for two blocks of
// the largest chunks beside what the contraction leaves to the L1 cache.
struct __align__(16) ScatterScratch {
  SortedChunk chunk;
  BagMarks marks;

  // Behind it: lookups of the chunk that have been seen of each bin, then where they start.
  __device__ __forceinline__ uint32_t* bins() { return reinterpret_cast<uint32_t*>(this + 1); }
  // Of each lookup of the chunk {outer as in GroupedLookup, i2 | rank within the chunk and the bin
  // << 16}. A thread reads only what it has written.
  __device__ __forceinline__ uint2* lookups(const TiledRange& range) {
    return reinterpret_cast<uint2*>(bins() + range.bins);
  }

  static_assert(kMaxChunkShift <= 16);
  static constexpr size_t bytes(int32_t bins, int32_t chunk_shift) {
    return sizeof(ScatterScratch) + bins * sizeof(uint32_t) + (sizeof(uint2) << chunk_shift);
  }
};

// Takes apart the ids of the chunk and numbers the lookups of each bin.
template <bool kWide>
__device__ __forceinline__ void stage_lookups(ScatterScratch& scratch, const SortedChunk& chunk,
                                              const TiledFeature& feature, const BagBatch& batch,
                                              const TiledRange& range) {
  const IdSplitter splitter(feature);
  const int64_t first = range.first_lookup + chunk.first;
  uint32_t* const bins = scratch.bins();
  uint2* const lookups = scratch.lookups(range);
#pragma unroll 1
  for (int32_t base = threadIdx.x; base < chunk.count; base += kBatch * kPrepareThreads) {
    const int32_t existing = chunk.count - base;
    int64_t ids[kBatch];
    load_ids(ids, batch, first + base, existing);
    const int32_t end = min(chunk.count, base + kBatch * kPrepareThreads);
#pragma unroll 1
    for (int32_t item = base; item < end; item += kPrepareThreads) {
      // The launch that counts reports ids without a row, but maybe later.
      const LookupDigits digits = splitter.split_id<kWide>(has_row(feature, ids[0]) ? ids[0] : 0);
      const uint32_t rank = atomicAdd(&bins[digits.bin], 1u);
      lookups[item] = make_uint2(digits.outer, digits.i2 | rank << 16);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) ids[i - 1] = ids[i];
    }
  }
}

// Writes the entries of chunk `number`. Called by all threads of a block.
__device__ __forceinline__ void scatter_chunk(ScatterScratch& scratch, const TiledGroup& group,
                                              const BagBatch& batch, const TiledRange& range,
                                              const TiledWorkspace& workspace, int32_t number) {
  for (int32_t i = threadIdx.x; i < range.bins / 4; i += kPrepareThreads) {
    reinterpret_cast<uint4*>(scratch.bins())[i] = make_uint4(0, 0, 0, 0);
  }
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  __syncthreads();
  if (feature.num_embeddings > kMaxNarrowRows) {
    stage_lookups<true>(scratch, chunk, feature, batch, range);
  } else {
    stage_lookups<false>(scratch, chunk, feature, batch, range);
  }
  const bool equal_bags = find_bags(scratch.marks, chunk, group, batch, range);
  const bool sorts = !keeps_order(range);
  const uint4* const starts = reinterpret_cast<const uint4*>(
      workspace.bin_starts + static_cast<int64_t>(number) * kMaxTiledBins);
  __syncthreads();  // the bins have been counted
  wait_for_previous_kernel();
  if (sorts) {
    // All loads are under way before the first is used.
    constexpr int kVectors = kMaxTiledBins / 4 / kPrepareThreads;
    uint4 of_thread[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = i * kPrepareThreads + static_cast<int32_t>(threadIdx.x);
      if (vector < range.bins / 4) of_thread[i] = starts[vector];
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t vector = i * kPrepareThreads + static_cast<int32_t>(threadIdx.x);
      if (vector < range.bins / 4) reinterpret_cast<uint4*>(scratch.bins())[vector] = of_thread[i];
    }
  }
  __syncthreads();
  const IdSplitter splitter(feature);
  // Not unrolled, as in count_lookups.
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const uint2 lookup = scratch.lookups(range)[item];
    const uint32_t i2 = lookup.y & 0xffffu;
    const uint32_t entry =
        chunk.first_entry +
        (sorts ? scratch.bins()[splitter.bin_of(lookup.x, i2)] + (lookup.y >> 16) : item);
    const uint32_t sample = find_sample(scratch.marks, chunk, equal_bags, batch, range, item);
    reinterpret_cast<uint4*>(workspace.entries)[entry] =
        make_uint4(lookup.x, i2, chunk.first + item, sample);
    if (workspace.factors != nullptr) {
      workspace.factors[entry] =
          find_factor(batch, feature, range.first_lookup + chunk.first + item, sample,
                      equal_bags ? chunk.bag_length : 0);
    }
  }
}

// The grid: `scattering` blocks, a chunk each, then those of the side work.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tiled_scatter_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ SideWork work, int32_t scattering) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < scattering) {
    scatter_chunk(*reinterpret_cast<ScatterScratch*>(shared), group, batch, range, workspace,
                  block);
  } else {
    do_side_work<Packing>(work, group, batch, range, workspace, output, shared, block - scattering);
  }
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
