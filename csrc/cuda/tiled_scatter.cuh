// The last launch of the preparation: every lookup is written to its place. What needs nothing of
// the launches before is done before waiting for them, and kept in shared memory.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"

namespace flowtt::cuda {

// In dynamic shared memory.
struct ScatterScratch {
  SortedChunk chunk;
  BagMarks marks;
  // As many as a part of a chunk has: {outer, i2, sample (of bags that are marked), all as in
  // GroupedLookup, bin}. A thread reads only what it has written.
  alignas(16) uint4 lookups[1];

  static constexpr size_t bytes(int32_t part_shift) {
    return sizeof(ScatterScratch) + (sizeof(uint4) << part_shift);
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

// Takes apart the ids of the chunk.
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
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // The launch that counts reports ids without a row, but maybe later.
      const LookupDigits digits = splitter.split_id<kWide>(has_row(feature, ids[i]) ? ids[i] : 0);
      if (i * kPrepareThreads < existing) {
        scratch.lookups[base + i * kPrepareThreads] =
            make_uint4(digits.outer, digits.i2, 0, digits.bin);
      }
    }
  }
}

// Writes the entries of part `number` of the chunks, each of which has 2^parts_shift. Called by all
// threads of a block.
__device__ __forceinline__ void scatter_part(ScatterScratch& scratch, const TiledGroup& group,
                                             const BagBatch& batch, const TiledRange& range,
                                             const TiledWorkspace& workspace, int32_t number,
                                             int32_t parts_shift) {
  const int32_t chunk_number = number >> parts_shift;
  SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, chunk_number);
  if (chunk.feature < 0) return;
  // From here on the chunk is this part of it.
  const int32_t begin = (number & ((1 << parts_shift) - 1)) << (range.chunk_shift - parts_shift);
  if (begin >= chunk.count) return;
  chunk.first += begin;
  chunk.count = min(chunk.count - begin, 1 << (range.chunk_shift - parts_shift));
  chunk.first_entry += keeps_order(range) ? begin : 0;
  chunk.skipped += static_cast<uint32_t>(begin);
  const TiledFeature& feature = group.features[chunk.feature];
  if (feature.num_embeddings > kMaxNarrowRows) {
    stage_lookups<true>(scratch, chunk, feature, batch, range);
  } else {
    stage_lookups<false>(scratch, chunk, feature, batch, range);
  }
  const bool equal_bags = find_bags(scratch, chunk, group, batch, range);
  if (!equal_bags) stage_marked_samples(scratch, batch, chunk.count);
  const bool sorts = !keeps_order(range);
  const uint32_t* const starts =
      workspace.bin_starts + static_cast<int64_t>(chunk_number) * kMaxTiledBins;
  const uint16_t* const ranks = workspace.ranks + chunk.first;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int32_t base = threadIdx.x; base < chunk.count; base += kBatch * kPrepareThreads) {
    const int32_t existing = chunk.count - base;
    uint4 lookups[kBatch];
    uint32_t entries[kBatch];
    uint32_t of_bin[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // All loads of the batch are under way before the first is used.
      const bool exists = i * kPrepareThreads < existing;
      const int32_t item = exists ? base + i * kPrepareThreads : base;
      lookups[i] = scratch.lookups[item];
      entries[i] = sorts ? starts[lookups[i].w] : item;
      of_bin[i] = sorts ? ranks[item] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = base + i * kPrepareThreads;
      const uint32_t entry = chunk.first_entry + entries[i] + of_bin[i];
      const uint32_t sample = find_sample(lookups[i].z, chunk, equal_bags, batch, range, item);
      if (i * kPrepareThreads < existing) {
        reinterpret_cast<uint4*>(workspace.entries)[entry] =
            make_uint4(lookups[i].x, lookups[i].y, chunk.first + item, sample);
        if (workspace.factors != nullptr) {
          scratch.lookups[item].z = sample;
          scratch.lookups[item].w = entry;
        }
      }
    }
  }
  if (workspace.factors != nullptr) {
    write_factors(scratch, feature, chunk, equal_bags, batch, range.first_lookup + chunk.first,
                  workspace.factors);
  }
}

// The grid: a block for each part of a chunk.
__global__ void __launch_bounds__(kPrepareThreads, 3)
    tiled_scatter_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace, int32_t parts_shift) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  scatter_part(*reinterpret_cast<ScatterScratch*>(shared), group, batch, range, workspace,
               static_cast<int32_t>(blockIdx.x), parts_shift);
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
