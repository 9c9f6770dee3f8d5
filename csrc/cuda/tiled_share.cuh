// A cluster's part of a run of sorted lookups: from the ids to the slices in shared memory. See
// tiled_share_sort.cuh.

#pragma once

#include "tiled_share_sort.cuh"

namespace flowtt::cuda {

// Sorts part number `number` % range.run_parts of run `number` / range.run_parts, of features of at
// most kMaxNarrowRows rows; false if there are not so many. `slice`: room for the block's own. The
// scratch may be used for other things afterwards. Called by all threads of the cluster.
template <int kThreads>
__device__ __forceinline__ bool sort_share(ShareScratch& scratch, SortedRun& run,
                                           GroupedLookup* slice, const TiledGroup& group,
                                           const BagBatch& batch, const TiledRange& range,
                                           int32_t number) {
  constexpr int kBatch = (kMaxShareChunk + kThreads - 1) / kThreads;
  static_assert(kBinGroups <= kThreads && kThreads <= 1024);
  const uint32_t rank = cluster_rank();
  const uint32_t blocks = cluster_blocks();
  const SortedChunk& chunk = scratch.chunk;
  for (uint32_t i = threadIdx.x; i < kMaxShareBins / 8; i += kThreads) {
    reinterpret_cast<uint4*>(scratch.counts)[i] = make_uint4(0, 0, 0, 0);
  }
  for (uint32_t i = threadIdx.x; i < kMaxShareBins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(scratch.places)[i] =
        make_uint4(kNoPlace, kNoPlace, kNoPlace, kNoPlace);
  }
  if (threadIdx.x < 32) {
    find_chunk(scratch.chunk, group, batch, range, number / range.run_parts, rank,
               31 - __clz(blocks));
  }
  __syncthreads();
  if (chunk.feature < 0) return false;  // as in all blocks of the cluster
  const TiledFeature& feature = group.features[chunk.feature];
  const int64_t first = range.first_lookup + chunk.first;
  const int32_t count = chunk.count;
  int64_t ids[kBatch];
  if (batch.indices_are_int64) {
    load_share_ids<int64_t, kThreads>(ids, static_cast<const int64_t*>(batch.indices) + first,
                                      count);
  } else {
    load_share_ids<int32_t, kThreads>(ids, static_cast<const int32_t*>(batch.indices) + first,
                                      count);
  }
  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  const int64_t first_bag = feature.feature * batch.batch_size + range.first_sample;
  const EqualBags bags(chunk);
  bool equal_bags = true;
  if (pools) {
    equal_bags = bags.length != 0;
    if (equal_bags && batch.offsets_are_int64) {
      equal_bags = confirm_chunk<int64_t, kThreads, kBatch>(
          bags, static_cast<const int64_t*>(batch.offsets) + first_bag, count);
    } else if (equal_bags) {
      equal_bags = confirm_chunk<int32_t, kThreads, kBatch>(
          bags, static_cast<const int32_t*>(batch.offsets) + first_bag, count);
    }
  }
  // While the others wait for their ids.
  if (threadIdx.x == kThreads - 1) {
    divide_run(run, chunk, range, number % range.run_parts, static_cast<int32_t>(blocks),
               kThreads / 32);
  }
  equal_bags = __syncthreads_and(equal_bags || count == 0);
  if (!equal_bags) mark_bags(scratch.marks, batch, first_bag, range, first, count);

  const uint32_t num_embeddings = static_cast<uint32_t>(feature.num_embeddings);
  const IdSplitter splitter(feature);
  uint32_t lookups[kBatch];  // bin << 16 | number in the bin
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    lookups[i] = kNoBin << 16;
    if (i * kThreads >= count || item >= count) continue;
    if (static_cast<uint64_t>(ids[i]) >= num_embeddings) {
      trap_on_bad_lookup(feature, first + item, ids[i]);
    }
    const uint32_t bin = splitter.split(static_cast<uint32_t>(ids[i])).bin;
    const uint32_t half = bin % 2 * 16;
    const uint32_t counted = atomicAdd(&scratch.counts[bin / 2], 1u << half);
    lookups[i] = bin << 16 | (counted >> half & 0xffffu);
  }
  __syncthreads();
  count_groups(scratch);
  __syncthreads();
  // Also, that the block has done with its slice of the run before.
  arrive_at_cluster();
  wait_for_cluster();
  // No block looks for windows of the run before any more, and none yet for those of this one.
  if (threadIdx.x == 0) run.taken = scratch.num_kept = 0;
  place_share_bins(scratch, run, rank, blocks);
  if (range.run_parts > 1) {
    order_cut_bins(scratch, lookups, (count + kThreads - 1) / kThreads);
  }

  keep_part<kThreads>(scratch, run, ids, lookups, count, (range.disabled & kGroupingDisabled) == 0);

#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < scratch.num_kept; i += kThreads) {
    const uint2 kept = scratch.kept[i];
    const int32_t item = static_cast<int32_t>(kept.y & 0xffffu);
    uint32_t sample = 0;
    if (!pools) {
      sample = static_cast<uint32_t>(first + item) | kLoneLookup;
    } else if (equal_bags) {
      sample = (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
               (bags.length == 1 ? kLoneLookup : 0);
    } else {
      sample = marked_sample(scratch.marks, batch, item);
    }
    const LookupDigits digits = splitter.split(kept.x);
    const uint32_t place = kept.y >> 16;
    const uint32_t owner = __umulhi(place, run.reciprocal);
    const uint32_t at = place - owner * static_cast<uint32_t>(run.slice);
    RemoteVector(reinterpret_cast<const uint4*>(slice) + at, owner)
        .store(make_uint4(digits.outer, digits.i2, chunk.first + item, sample));
  }
  __syncwarp();
  arrive_after_remote_stores();
  wait_for_cluster();
  return true;
}

}  // namespace flowtt::cuda
