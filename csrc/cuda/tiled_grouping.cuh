// Sorting of a feature's lookups into bins by a counting sort. One cluster sorts one run of them:
//   each block counts its chunk of lookups per bin in its own shared memory,
//   block s of the cluster turns the counts of its share of the bins, over all blocks, into places,
//   each block writes its lookups to their places.
// Places are exact: no bin can overflow, however the ids are distributed, and nothing has to be
// cleared before or outlives the launch.

#pragma once

#include <cstdio>

#include "cluster.cuh"
#include "lookup_checks.cuh"
#include "tiled_bags.cuh"
#include "tiled_digits.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

// In shared memory.
struct GroupingScratch {
  alignas(16) uint32_t bins[kMaxTiledBins];              // counts, then places
  uint32_t share_counts[kMaxClusterBlocks];  // lookups of this block in each block's bins
  uint32_t warp_sums[kPrepareWarps];
  uint32_t warp_bases[kPrepareWarps];
  BagMarks marks;
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

__device__ __forceinline__ void clear_counts(GroupingScratch& scratch) {
  uint4* words = reinterpret_cast<uint4*>(scratch.bins);
#pragma unroll
  for (int i = 0; i < kMaxTiledBins / 4 / kPrepareThreads; ++i) {
    words[i * kPrepareThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < kMaxClusterBlocks) scratch.share_counts[threadIdx.x] = 0;
}

// share_counts[s]: the block's lookups in the bins of block s. Every thread sums consecutive bins.
__device__ __forceinline__ void count_shares(GroupingScratch& scratch, uint32_t blocks) {
  constexpr int kPerThread = kMaxTiledBins / kPrepareThreads;
  const uint4* words = reinterpret_cast<const uint4*>(scratch.bins + threadIdx.x * kPerThread);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread / 4; ++i) {
    const uint4 count = words[i];
    sum += count.x + count.y + count.z + count.w;
  }
  static_assert(kPrepareThreads / kMaxClusterBlocks == 32);
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&scratch.share_counts[threadIdx.x * blocks / kPrepareThreads], sum);
  }
}

// Replaces the counts of every block by the places of its first lookup of each bin, numbered
// within the run. Called by all threads of the cluster after count_shares.
__device__ __forceinline__ void place_bins(GroupingScratch& scratch, uint32_t rank,
                                           uint32_t blocks) {
  // The counts of the share's bins, block by block within a bin, are scanned as one sequence.
  constexpr int kPerThread = kMaxTiledBins / kPrepareThreads;
  const uint32_t shift = 31 - __clz(blocks);
  const uint32_t share = rank * (kMaxTiledBins >> shift);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  // Lookups in the shares of the blocks before this one.
  uint32_t base = 0;
  const uint32_t other_share = threadIdx.x & (blocks - 1);
  if (threadIdx.x < blocks * blocks && other_share < rank) {
    base = RemoteWord(&scratch.share_counts[other_share], threadIdx.x >> shift).load();
  }
  uint32_t count[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t element = threadIdx.x * kPerThread + i;
    count[i] = RemoteWord(&scratch.bins[share + (element >> shift)], element & (blocks - 1)).load();
  }
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) sum += count[i];
  uint32_t up_to = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  base = __reduce_add_sync(kAllLanes, base);
  if (lane == 31) {
    scratch.warp_sums[warp] = up_to;
    scratch.warp_bases[warp] = base;
  }
  __syncthreads();
  uint32_t earlier = 0;
  if (lane < kPrepareWarps) {
    earlier = scratch.warp_bases[lane] + (lane < warp ? scratch.warp_sums[lane] : 0);
  }
  uint32_t place = __reduce_add_sync(kAllLanes, earlier) + up_to - sum;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t element = threadIdx.x * kPerThread + i;
    RemoteWord(&scratch.bins[share + (element >> shift)], element & (blocks - 1)).store(place);
    place += count[i];
  }
}

// Called by all threads of the clusters that sort, after clear_counts.
__device__ __forceinline__ void group_run(GroupingScratch& scratch, const Segments& segments,
                                          const TiledGroup& group, const BagBatch& batch,
                                          const TiledRange& range, const TiledWorkspace& workspace,
                                          int32_t run, uint32_t rank, uint32_t blocks) {
  if (run >= segments.first_run[group.count]) return;
  // Offsets out of order can make features overlap; clear_bags reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  int32_t f = 0;
  while (segments.first_run[f + 1] <= run) ++f;
  const TiledFeature& feature = group.features[f];
  const int32_t runs = segments.first_run[f + 1] - segments.first_run[f];
  const int32_t entries = segments.first_entry[f + 1] - segments.first_entry[f];
  const int32_t per_run = (entries + runs - 1) / runs;
  const int32_t run_begin = (run - segments.first_run[f]) * per_run;
  const int32_t run_count = min(per_run, entries - run_begin);
  // Whole words of marks.
  const int32_t per_block = (run_count + static_cast<int32_t>(blocks) * 32 - 1) /
                            (static_cast<int32_t>(blocks) * 32) * 32;
  const int32_t chunk_begin = static_cast<int32_t>(rank) * per_block;
  const int32_t count = max(min(per_block, run_count - chunk_begin), 0);
  const int64_t first = segments.begin[f] + run_begin + chunk_begin;
  const bool sorts = (range.disabled & kGroupingDisabled) == 0;

  const IdSplitter splitter(feature);
  ChunkBags bags(scratch.marks, segments, f, feature, batch, range, first, count);

  constexpr int kBatch = 8;  // ids loaded before the first is used
  // The bin of each lookup, and above it the number of the block's lookups met before in the bin.
  uint32_t ranked[kSortItems];
  bool uniform = true;
#pragma unroll
  for (int base = 0; base < kSortItems; base += kBatch) {
    if (base * kPrepareThreads >= count) break;
    int64_t ids[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = (base + i) * kPrepareThreads + threadIdx.x;
      ids[i] = item < count ? load_index(batch.indices, batch.indices_are_int64, first + item) : 0;
    }
    if (base == 0) uniform = bags.is_uniform();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = (base + i) * kPrepareThreads + threadIdx.x;
      if (item >= count) continue;
      if (!splitter.contains(ids[i])) trap_on_bad_lookup(feature, first + item, ids[i]);
      const uint32_t bin = splitter.split(ids[i]).bin;
      ranked[base + i] = bin | atomicAdd(&scratch.bins[bin], 1u) * kMaxTiledBins;
    }
  }
  const bool all_uniform = __syncthreads_and(uniform);
  count_shares(scratch, blocks);
  arrive_at_cluster();
  if (!all_uniform) bags.mark();
  wait_for_cluster();
  place_bins(scratch, rank, blocks);
  arrive_at_cluster();
  wait_for_cluster();

  const int64_t run_entry = segments.first_entry[f] + run_begin;
  const uint32_t first_position = static_cast<uint32_t>(first - range.first_lookup);
#pragma unroll
  for (int base = 0; base < kSortItems; base += kBatch) {
    if (base * kPrepareThreads >= count) break;
    int64_t ids[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = (base + i) * kPrepareThreads + threadIdx.x;
      ids[i] = item < count ? load_index(batch.indices, batch.indices_are_int64, first + item) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = (base + i) * kPrepareThreads + threadIdx.x;
      if (item >= count) continue;
      const LookupDigits digits = splitter.split(ids[i]);
      const uint32_t sample = bags.sample_of(item);
      const uint32_t place =
          scratch.bins[ranked[base + i] % kMaxTiledBins] + ranked[base + i] / kMaxTiledBins;
      const int64_t entry = run_entry + (sorts ? place : chunk_begin + item);
      *reinterpret_cast<uint4*>(workspace.entries + entry) =
          make_uint4(digits.outer, digits.i2, first_position + item, sample);
      if (workspace.factors != nullptr) {
        const float weight = load_sample_weight<float>(batch, first + item);
        workspace.factors[entry] =
            batch.pooling_mode == PoolingMode::kMean ? weight / bags.length(sample) : weight;
      }
    }
  }
}

}  // namespace flowtt::cuda
