// The last launch of the preparation: every lookup is written to its place. What needs nothing of
// the launches before is done before waiting for them, and kept in shared memory. Other blocks pack
// cores meanwhile, and clear what later kernels add to.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"
#include "tiled_clearing.cuh"
#include "tiled_packing.cuh"

namespace flowtt::cuda {

// Whether the lookups of a chunk are written bin after bin: where several have one bin,
// neighbouring threads then write to neighbouring places.
constexpr bool writes_by_bin(int32_t bins, int32_t chunk_shift) {
  return 2 * bins <= 1 << chunk_shift;
}

// At the start of dynamic shared memory. Small, so that a multiprocessor has room for two blocks of
// the largest chunks beside what the contraction leaves to the L1 cache.
struct __align__(16) ScatterScratch {
  SortedChunk chunk;
  BagMarks marks;
  uint32_t warp_sums[kPrepareWarps];

  // Behind it: lookups of the chunk that have been seen of each bin, then where they start.
  __device__ __forceinline__ uint32_t* bins() { return reinterpret_cast<uint32_t*>(this + 1); }
  // Of each lookup of the chunk {outer as in GroupedLookup, i2 | rank within the chunk and the bin
  // << 16}. Unless they are written by bin, a thread reads only what it has written.
  __device__ __forceinline__ uint2* lookups(const TiledRange& range) {
    return reinterpret_cast<uint2*>(bins() + range.bins);
  }
  // Their numbers in the order of their bins, if they are written so.
  __device__ __forceinline__ uint16_t* order(const TiledRange& range) {
    return reinterpret_cast<uint16_t*>(lookups(range) + (1 << range.chunk_shift));
  }

  static_assert(kMaxChunkShift <= 16);
  static constexpr size_t bytes(int32_t bins, int32_t chunk_shift) {
    return sizeof(ScatterScratch) + bins * sizeof(uint32_t) + (sizeof(uint2) << chunk_shift) +
           (writes_by_bin(bins, chunk_shift) ? sizeof(uint16_t) << chunk_shift : 0);
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

// The sample of the chunk's lookup `item`, as in GroupedLookup.
__device__ __forceinline__ uint32_t find_sample(const ScatterScratch& scratch,
                                                const SortedChunk& chunk, bool equal_bags,
                                                const BagBatch& batch, const TiledRange& range,
                                                int32_t item) {
  if (batch.pooling_mode == PoolingMode::kNone) {
    return static_cast<uint32_t>(range.first_lookup + chunk.first + item) | kLoneLookup;
  }
  if (!equal_bags) return marked_sample(scratch.marks, batch, item);
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

// Finds the order of the lookups by bin, whose counts become the starts within the chunk. Called by
// all threads, after a barrier.
__device__ __forceinline__ void order_by_bin(ScatterScratch& scratch, const SortedChunk& chunk,
                                             const IdSplitter& splitter, const TiledRange& range) {
  static_assert(writes_by_bin(4 * kPrepareThreads, kMaxChunkShift) &&
                !writes_by_bin(8 * kPrepareThreads, kMaxChunkShift));
  const bool has_bins = 4 * static_cast<int32_t>(threadIdx.x) < range.bins;
  uint4& own = reinterpret_cast<uint4*>(scratch.bins())[has_bins ? threadIdx.x : 0];
  const uint4 counts = has_bins ? own : make_uint4(0, 0, 0, 0);
  uint4 starts;
  starts.x = sum_of_threads_before(counts.x + counts.y + counts.z + counts.w, scratch.warp_sums);
  starts.y = starts.x + counts.x;
  starts.z = starts.y + counts.y;
  starts.w = starts.z + counts.z;
  if (has_bins) own = starts;
  __syncthreads();
#pragma unroll 4
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const uint2 lookup = scratch.lookups(range)[item];
    const uint32_t place =
        scratch.bins()[splitter.bin_of(lookup.x, lookup.y & 0xffffu)] + (lookup.y >> 16);
    scratch.order(range)[place] = static_cast<uint16_t>(item);
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
  const bool equal_bags = find_bags(scratch, chunk, group, batch, range);
  const bool sorts = !keeps_order(range);
  const uint4* const starts = reinterpret_cast<const uint4*>(
      workspace.bin_starts + static_cast<int64_t>(number) * kMaxTiledBins);
  const IdSplitter splitter(feature);
  const bool by_bin = sorts && writes_by_bin(range.bins, range.chunk_shift);
  __syncthreads();  // the bins have been counted
  if (by_bin) {
    order_by_bin(scratch, chunk, splitter, range);
    __syncthreads();
  }
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
  // Not unrolled, as in count_lookups.
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < chunk.count; i += kPrepareThreads) {
    const int32_t item = by_bin ? scratch.order(range)[i] : i;
    const uint2 lookup = scratch.lookups(range)[item];
    const uint32_t i2 = lookup.y & 0xffffu;
    const uint32_t entry =
        chunk.first_entry +
        (sorts ? scratch.bins()[splitter.bin_of(lookup.x, i2)] + (lookup.y >> 16) : item);
    const uint32_t sample = find_sample(scratch, chunk, equal_bags, batch, range, item);
    reinterpret_cast<uint4*>(workspace.entries)[entry] =
        make_uint4(lookup.x, i2, chunk.first + item, sample);
    if (workspace.factors != nullptr) {
      workspace.factors[entry] =
          find_factor(batch, feature, range.first_lookup + chunk.first + item, sample,
                      equal_bags ? chunk.bag_length : 0);
    }
  }
}

// The grid: `scattering` blocks, a chunk each, then `packing` that take pieces of packing in turn,
// then those that take pieces of clearing. The latter clear `cleared` too.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tiled_scatter_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ ClearingPieces pieces, ClearedVectors cleared,
                         int32_t scattering, int32_t packing, int32_t packing_pieces) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < scattering) {
    scatter_chunk(*reinterpret_cast<ScatterScratch*>(shared), group, batch, range, workspace,
                  block);
  } else if (block < scattering + packing) {
#pragma unroll 1
    for (int32_t piece = block - scattering; piece < packing_pieces; piece += packing) {
      pack_piece<Packing>(group, workspace, *reinterpret_cast<typename Packing::Scratch*>(shared),
                          piece);
    }
  } else {
    const int32_t number = block - scattering - packing;
    const int32_t clearing = static_cast<int32_t>(gridDim.x) - scattering - packing;
#pragma unroll 1
    for (int32_t piece = number; piece < pieces.count; piece += clearing) {
      clear_bags(group, batch, range, workspace, output, pieces, piece);
    }
    cleared.clear(number, clearing);
  }
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
