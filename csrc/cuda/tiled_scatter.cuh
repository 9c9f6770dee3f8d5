// The last launch of the preparation: every lookup is written to its place. What needs nothing of
// the launches before is done before waiting for them, and kept in shared memory.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"
#include "tiled_clearing.cuh"

namespace flowtt::cuda {

// In dynamic shared memory.
struct ScatterScratch {
  // Lookups of the chunk that have been seen of each bin, then where they start.
  alignas(16) uint32_t bins[kMaxTiledBins];
  SortedChunk chunk;
  BagMarks marks;
  // As many as a chunk has: {outer, i2, sample (of bags that are marked), all as in GroupedLookup,
  // bin | rank within the chunk and the bin << kRankShift}. A thread reads only what it has
  // written.
  alignas(16) uint4 lookups[1];

  static constexpr int kRankShift = 12;
  static_assert(kMaxTiledBins <= 1 << kRankShift && kMaxChunkShift + kRankShift <= 32);
  static constexpr size_t bytes(int32_t chunk_shift) {
    return sizeof(ScatterScratch) + (sizeof(uint4) << chunk_shift);
  }
};

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
__device__ __forceinline__ bool find_bags(ScatterScratch& scratch, const SortedChunk& chunk,
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
  mark_bags(scratch.marks, batch, first_bag, range, range.first_lookup + chunk.first, chunk.count);
  return false;
}

// Stages the samples of the thread's lookups, after mark_bags.
inline __device__ __noinline__ void stage_marked_samples(ScatterScratch& scratch,
                                                         const BagBatch& batch, int32_t count) {
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < count; item += kPrepareThreads) {
    scratch.lookups[item].z = marked_sample(scratch.marks, batch, item);
  }
}

// The sample of the chunk's lookup `item`, as in GroupedLookup. staged: what the lookup has.
__device__ __forceinline__ uint32_t find_sample(uint32_t staged, const SortedChunk& chunk,
                                                bool equal_bags, const BagBatch& batch,
                                                const TiledRange& range, int32_t item) {
  if (batch.pooling_mode == PoolingMode::kNone) {
    return static_cast<uint32_t>(range.first_lookup + chunk.first + item) | kLoneLookup;
  }
  if (!equal_bags) return staged;
  const EqualBags bags(chunk);
  return (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
         (bags.length == 1 ? kLoneLookup : 0);
}

// Writes the factors of the thread's lookups, of which `z` and `w` are the sample and the entry.
inline __device__ __noinline__ void write_factors(const ScatterScratch& scratch,
                                                  const TiledFeature& feature,
                                                  const SortedChunk& chunk, bool equal_bags,
                                                  const BagBatch& batch, int64_t first,
                                                  float* factors) {
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const uint4 lookup = scratch.lookups[item];
    float factor = load_sample_weight<float>(batch, first + item);
    if (batch.pooling_mode == PoolingMode::kMean) {
      const int64_t length =
          equal_bags
              ? chunk.bag_length
              : bag_length(batch, feature.feature * batch.batch_size + (lookup.z & ~kLoneLookup));
      factor /= static_cast<float>(length);
    }
    factors[lookup.w] = factor;
  }
}

// Takes apart the ids of the chunk and numbers the lookups of each bin.
template <bool kWide>
__device__ __forceinline__ void stage_lookups(ScatterScratch& scratch, const SortedChunk& chunk,
                                              const TiledFeature& feature, const BagBatch& batch,
                                              const TiledRange& range) {
  const IdSplitter splitter(feature);
  const int64_t first = range.first_lookup + chunk.first;
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
      const uint32_t rank = atomicAdd(&scratch.bins[digits.bin], 1u);
      scratch.lookups[item] =
          make_uint4(digits.outer, digits.i2, 0, digits.bin | rank << ScatterScratch::kRankShift);
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
    reinterpret_cast<uint4*>(scratch.bins)[i] = make_uint4(0, 0, 0, 0);
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
  const bool equal_bags = find_bags(scratch, chunk, group, batch, range);
  if (!equal_bags) stage_marked_samples(scratch, batch, chunk.count);
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
      if (vector < range.bins / 4) reinterpret_cast<uint4*>(scratch.bins)[vector] = of_thread[i];
    }
  }
  __syncthreads();
  // Not unrolled, as in count_lookups.
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const uint4 lookup = scratch.lookups[item];
    const uint32_t bin = lookup.w & (kMaxTiledBins - 1);
    const uint32_t entry =
        chunk.first_entry +
        (sorts ? scratch.bins[bin] + (lookup.w >> ScatterScratch::kRankShift) : item);
    const uint32_t sample = find_sample(lookup.z, chunk, equal_bags, batch, range, item);
    reinterpret_cast<uint4*>(workspace.entries)[entry] =
        make_uint4(lookup.x, lookup.y, chunk.first + item, sample);
    if (workspace.factors != nullptr) {
      scratch.lookups[item].z = sample;
      scratch.lookups[item].w = entry;
    }
  }
  if (workspace.factors != nullptr) {
    write_factors(scratch, feature, chunk, equal_bags, batch, range.first_lookup + chunk.first,
                  workspace.factors);
  }
}

// The grid: `scattering` blocks, a chunk each, then those that take pieces of clearing in turn.
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tiled_scatter_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ ClearingPieces pieces, int32_t scattering) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < scattering) {
    scatter_chunk(*reinterpret_cast<ScatterScratch*>(shared), group, batch, range, workspace,
                  block);
  } else {
    const int32_t clearing = static_cast<int32_t>(gridDim.x) - scattering;
#pragma unroll 1
    for (int32_t piece = block - scattering; piece < pieces.count; piece += clearing) {
      clear_bags(group, batch, range, workspace, output, pieces, piece);
    }
  }
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
