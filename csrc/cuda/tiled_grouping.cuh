// Sorting of a feature's lookups into bins by a counting sort. A run of lookups is sorted by one
// cluster, or by several that each take a part of the bins. All of them read all ids of the run,
// which costs less than telling each other:
//   each block counts the lookups of its chunk per bin of the part, in its own shared memory,
//   block s of the cluster turns the counts of its share of the bins, over all blocks, into places,
//   each block writes its lookups to their places.
// Places are exact: no bin can overflow, however the ids are distributed, and nothing has to be
// cleared before or outlives the launch.

#pragma once

#include "cluster.cuh"
#include "lookup_checks.cuh"
#include "tiled_bags.cuh"
#include "tiled_counting.cuh"

namespace flowtt::cuda {

// share_counts[s]: the block's lookups of the bins of block s. Every thread sums consecutive bins.
// width: room for the bins of a part.
__device__ __forceinline__ void count_shares(GroupingScratch& scratch, uint32_t width,
                                             uint32_t blocks) {
  const uint32_t per_thread = width / kPrepareThreads;
  uint32_t sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < per_thread; ++i) sum += scratch.counts[threadIdx.x * per_thread + i];
  static_assert(kPrepareThreads / kMaxClusterBlocks == 32);
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0 && sum != 0) {
    add_to_shared(&scratch.share_counts[threadIdx.x * blocks / kPrepareThreads], sum);
  }
}

// From the counts of all blocks to the places of every block's first lookup of each bin of this
// block's share, numbered within the run. Called by all threads.
__device__ __forceinline__ void place_bins(GroupingScratch& scratch, uint32_t width, uint32_t rank,
                                           uint32_t blocks) {
  // A thread has consecutive bins, and of each the counts of all blocks one after the other.
  constexpr int kMaxCounts = kMaxClusterBlocks;
  const uint32_t shift = 31 - __clz(blocks);
  const uint32_t share_bins = width >> shift;
  const uint32_t per_thread = max(share_bins / kPrepareThreads, 1u);
  const int counts = static_cast<int>(per_thread << shift);
  const uint32_t bin0 = threadIdx.x * per_thread;
  const bool has_bins = bin0 < share_bins;
  const uint32_t* const share = scratch.counts + rank * share_bins + bin0;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  static_assert(kMaxTiledBins / kPrepareThreads <= kMaxCounts);
  uint32_t count[kMaxCounts] = {};
  if (has_bins) {
#pragma unroll
    for (int i = 0; i < kMaxCounts; ++i) {
      if (i < counts) count[i] = RemoteWord(share + (i >> shift), i & (blocks - 1)).load();
    }
  }
  // Lookups of the parts and shares before this one.
  uint32_t base = 0;
  const uint32_t other_share = threadIdx.x & (blocks - 1);
  const uint32_t other_block = threadIdx.x >> shift;
  if (other_block < blocks && other_share <= rank) {
    const uint32_t* const word =
        other_share < rank ? &scratch.share_counts[other_share] : &scratch.before_part;
    base = RemoteWord(word, other_block).load();
  }
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxCounts; ++i) sum += count[i];
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
  if (!has_bins) return;
#pragma unroll
  for (int i = 0; i < kMaxCounts; ++i) {
    if (i < counts) {
      scratch.places[(i & (blocks - 1)) * share_bins + bin0 + (i >> shift)] = place;
    }
    place += count[i];
  }
}

// Fetches the places of the block's own lookups from all blocks. Called by all threads.
__device__ __forceinline__ void fetch_places(GroupingScratch& scratch, uint32_t width,
                                             uint32_t rank, uint32_t blocks) {
  constexpr int kMaxPerThread = kMaxTiledBins / kPrepareThreads;
  const uint32_t share_bins = width / blocks;
  const uint32_t share_shift = 31 - __clz(share_bins);
  uint32_t place[kMaxPerThread];
#pragma unroll
  for (int i = 0; i < kMaxPerThread; ++i) {
    const uint32_t bin = i * kPrepareThreads + threadIdx.x;
    if (bin < width) {
      const uint32_t* const word = scratch.places + rank * share_bins + (bin & (share_bins - 1));
      place[i] = RemoteWord(word, bin >> share_shift).load();
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxPerThread; ++i) {
    const uint32_t bin = i * kPrepareThreads + threadIdx.x;
    if (bin < width) scratch.counts[bin] = place[i];
  }
}

// Lookups that a thread works on at the same time.
constexpr int kLookupsInFlight = 4;

// Whether the bags of the lookups that the thread will write are of one length. offsets: of the
// samples' first bag.
template <typename offset_t>
__device__ __forceinline__ bool confirm_bags(const GroupingScratch& scratch, const EqualBags& bags,
                                             const offset_t* offsets) {
  const uint32_t taken = scratch.taken;
  const offset_t first = offsets[0];
  bool confirmed = true;
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < taken; base += kLookupsInFlight * kPrepareThreads) {
    offset_t begin[kLookupsInFlight];
    offset_t end[kLookupsInFlight];
    uint32_t bag[kLookupsInFlight];
#pragma unroll
    for (int i = 0; i < kLookupsInFlight; ++i) {
      // Beyond the last lookup, the first of the batch again.
      const uint32_t number = base + i * kPrepareThreads;
      bag[i] = bags.bag_of(scratch.lookups[number < taken ? number : base].x & 0xffff);
      begin[i] = offsets[bag[i]];
      end[i] = offsets[bag[i] + 1];
    }
#pragma unroll
    for (int i = 0; i < kLookupsInFlight; ++i) {
      confirmed &= end[i] - begin[i] == bags.length && begin[i] - first == bag[i] * bags.length;
    }
  }
  return confirmed;
}

// Finds out whether the bags of all lookups that the block will write are of one length, and marks
// the chunk's bags if not. Called by all threads; has barriers.
__device__ __forceinline__ bool find_bags(GroupingScratch& scratch, const TiledGroup& group,
                                          const BagBatch& batch, const TiledRange& range) {
  if (batch.pooling_mode == PoolingMode::kNone) return true;
  const SortedChunk& chunk = scratch.chunk;
  const int64_t first_bag =
      group.features[chunk.feature].feature * batch.batch_size + range.first_sample;
  const EqualBags bags(chunk);
  bool confirmed = bags.length != 0;
  if (confirmed) {
    confirmed =
        batch.offsets_are_int64
            ? confirm_bags(scratch, bags, static_cast<const int64_t*>(batch.offsets) + first_bag)
            : confirm_bags(scratch, bags, static_cast<const int32_t*>(batch.offsets) + first_bag);
  }
  if (__syncthreads_and(confirmed || scratch.taken == 0)) return true;
  mark_bags(scratch.marks, batch, first_bag, range, range.first_lookup + chunk.first, chunk.count);
  return false;
}

// Writes the lookups of the block to their places.
__device__ __forceinline__ void write_entries(const GroupingScratch& scratch, bool equal_bags,
                                              const TiledGroup& group, const BagBatch& batch,
                                              const TiledRange& range,
                                              const TiledWorkspace& workspace) {
  const SortedChunk& chunk = scratch.chunk;
  const TiledFeature& feature = group.features[chunk.feature];
  const IdSplitter splitter(feature);
  const bool is_wide = feature.num_embeddings > kMaxNarrowRows;
  const bool sorts = (range.disabled & kGroupingDisabled) == 0;
  const EqualBags bags(chunk);
  const int64_t first = range.first_lookup + chunk.first;
  const uint32_t taken = scratch.taken;
#pragma unroll 1
  for (uint32_t base = threadIdx.x; base < taken; base += kLookupsInFlight * kPrepareThreads) {
    int64_t id[kLookupsInFlight];
#pragma unroll
    for (int i = 0; i < kLookupsInFlight; ++i) {
      const uint32_t number = base + i * kPrepareThreads;
      const uint32_t item = scratch.lookups[number < taken ? number : base].x & 0xffff;
      id[i] = load_index(batch.indices, batch.indices_are_int64, first + item);
    }
#pragma unroll
    for (int i = 0; i < kLookupsInFlight; ++i) {
      const uint32_t number = base + i * kPrepareThreads;
      if (number >= taken) break;
      const uint2 lookup = scratch.lookups[number];
      const int32_t item = lookup.x & 0xffff;
      const uint32_t place = scratch.counts[lookup.x >> 16] + lookup.y;
      uint32_t sample = 0;
      if (batch.pooling_mode == PoolingMode::kNone) {
        sample = static_cast<uint32_t>(first + item) | kLoneLookup;
      } else if (equal_bags) {
        sample = (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
                 (bags.length == 1 ? kLoneLookup : 0);
      } else {
        sample = marked_sample(scratch.marks, batch, item);
      }
      const LookupDigits digits = is_wide ? split_wide(feature, static_cast<uint64_t>(id[i]))
                                          : splitter.split(static_cast<uint32_t>(id[i]));
      const uint32_t entry =
          chunk.first_entry + (sorts ? place : static_cast<uint32_t>(chunk.begin + item));
      reinterpret_cast<uint4*>(workspace.entries)[entry] =
          make_uint4(digits.outer, digits.i2, chunk.first + item, sample);
      if (workspace.factors != nullptr) {
        const int64_t length =
            equal_bags ? bags.length
            : batch.pooling_mode == PoolingMode::kMean
                ? bag_length(batch, feature.feature * batch.batch_size + (sample & ~kLoneLookup))
                : 1;
        const float weight = load_sample_weight<float>(batch, first + item);
        workspace.factors[entry] =
            batch.pooling_mode == PoolingMode::kMean ? weight / static_cast<float>(length) : weight;
      }
    }
  }
}

// Sorts one part of one run: part `number` % 2^parts_shift of run number / 2^parts_shift. Called by
// all threads of the clusters that sort, after clear_counts.
__device__ __forceinline__ void group_run(GroupingScratch& scratch, const TiledGroup& group,
                                          const BagBatch& batch, const TiledRange& range,
                                          const TiledWorkspace& workspace, int32_t number,
                                          int32_t parts_shift) {
  const SortedChunk& chunk = scratch.chunk;
  const uint32_t blocks = cluster_blocks();
  if (threadIdx.x < 32) {
    find_chunk(scratch.chunk, group, batch, range, number >> parts_shift, cluster_rank(),
               31 - __clz(blocks));
  }
  __syncthreads();
  if (chunk.feature < 0) return;  // as in all blocks of the cluster
  count_bins(scratch, group, batch, range, number & ((1 << parts_shift) - 1), parts_shift);
  __syncthreads();
  const uint32_t width = kMaxTiledBins >> parts_shift;
  count_shares(scratch, width, blocks);
  __syncthreads();
  arrive_at_cluster();
  const bool equal_bags = find_bags(scratch, group, batch, range);
  wait_for_cluster();
  place_bins(scratch, width, cluster_rank(), blocks);
  __syncthreads();
  arrive_at_cluster();
  wait_for_cluster();
  fetch_places(scratch, width, cluster_rank(), blocks);
  __syncthreads();
  arrive_at_cluster(false);
  write_entries(scratch, equal_bags, group, batch, range, workspace);
  // The others have fetched the places that are here.
  wait_for_cluster();
}

}  // namespace flowtt::cuda
