// The other way to sort lookups: by the cluster that contracts them. A cluster takes one run of a
// feature's lookups at a time, its share of the call, and leaves it in the shared memory of its
// blocks: equal slices of the sorted order, whatever the bins are.
//   each block counts the lookups of its chunk per bin,
//   each block reads the counts of all blocks, and so knows where its own lookups belong,
//   each block writes its lookups into the slices of the blocks that will work on them.
// Two barriers of the cluster; nothing of it goes to device memory.

#pragma once

#include "cluster.cuh"
#include "tiled_bags.cuh"
#include "tiled_counting.cuh"
#include "tiled_digits.cuh"
#include "tiled_queue.cuh"

namespace flowtt::cuda {

// In shared memory while a run is sorted; the warps need the place afterwards.
struct ShareScratch {
  // Lookups of each bin, two bins a word: no run has more than 16 bits of them.
  alignas(16) uint32_t counts[kMaxShareBins / 2];
  uint32_t places[kMaxShareBins];  // in the run, of the block's first lookup of each bin
  uint32_t warp_sums[32];
  SortedChunk chunk;
  BagMarks marks;
};
static_assert(kMaxSliceLookups * kMaxClusterBlocks < 65536);
static_assert(kMaxSliceLookups <= kMaxChunk);

// In shared memory. How a sorted run lies in the slices of the cluster's blocks.
struct SortedRun {
  int32_t feature;
  int32_t count;
  int32_t first_entry;  // of the run, as if all features' entries were in one array
  int32_t window;       // lookups of a window
  int32_t slice;        // lookups of all but the last slices, whole windows
  uint32_t reciprocal;  // of `slice`, as a fraction of 2^32, rounded up
  bool has_queues;      // otherwise the windows of a warp are known beforehand
  uint32_t taken;       // of the block's windows, beside the first of each warp; read by others

  __device__ __forceinline__ int32_t lookups_of(uint32_t rank) const {
    return min(max(count - static_cast<int32_t>(rank) * slice, 0), slice);
  }
  __device__ __forceinline__ int32_t windows_of(uint32_t rank) const {
    return (lookups_of(rank) + window - 1) / window;
  }
};

// As many windows for each warp, by one thread.
__device__ __forceinline__ void divide_run(SortedRun& run, const SortedChunk& chunk,
                                           uint32_t blocks, int32_t warps, uint32_t disabled) {
  const int32_t shift = 31 - __clz(blocks);
  const int32_t average = ((max(chunk.run_count, 1) - 1) >> shift) + 1;
  const int32_t rounds = (average + warps * kWindow - 1) / (warps * kWindow);
  const int32_t window =
      max((average + warps * rounds - 1) / (warps * rounds), static_cast<int32_t>(kMinWindow));
  run.feature = chunk.feature;
  run.count = chunk.run_count;
  run.first_entry = chunk.first_entry;
  run.window = window;
  run.slice = (average + window - 1) / window * window;
  run.reciprocal = 0xffffffffu / static_cast<uint32_t>(run.slice) + 1;
  run.has_queues = (disabled & kStealingDisabled) == 0 && run.slice > window * warps;
}

template <typename index_t, int kThreads, int kBatch>
__device__ __forceinline__ void load_share_ids(int64_t (&ids)[kBatch], const index_t* indices,
                                               int32_t count) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    ids[i] = item < count ? __ldcg(indices + item) : 0;
  }
}

// Whether the thread's lookups lie in bags of one length. offsets: of the samples' first bag.
template <typename offset_t, int kThreads, int kBatch>
__device__ __forceinline__ bool confirm_share(const EqualBags& bags, const offset_t* offsets,
                                              int32_t count) {
  bool confirmed = true;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (item < count) confirmed &= bags.confirms(offsets, item);
  }
  return confirmed;
}

// Where the block's first lookup of each bin belongs, from the counts of all blocks. Called by all
// threads; ends with a barrier.
__device__ __forceinline__ void place_share_bins(ShareScratch& scratch, uint32_t bins,
                                                 uint32_t rank, uint32_t blocks) {
  const uint32_t word = threadIdx.x;
  const uint32_t words = (bins + 1) / 2;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint32_t total = 0;   // of both bins of the thread, in all blocks
  uint32_t before = 0;  // in blocks before this one
  if (word < words) {
    uint32_t count[kMaxClusterBlocks];
#pragma unroll
    for (uint32_t i = 0; i < kMaxClusterBlocks; ++i) {
      // Each block begins with itself: they would all ask the same one.
      const uint32_t other = (rank + i) & (blocks - 1);
      count[i] = i < blocks ? RemoteWord(scratch.counts + word, other).load() : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kMaxClusterBlocks; ++i) {
      total += count[i];
      if (((rank + i) & (blocks - 1)) < rank) before += count[i];
    }
  }
  const uint32_t sum = (total & 0xffffu) + (total >> 16);
  uint32_t up_to = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  if (lane == 31) scratch.warp_sums[warp] = up_to;
  __syncthreads();
  const uint32_t earlier = __reduce_add_sync(kAllLanes, lane < warp ? scratch.warp_sums[lane] : 0);
  if (word < words) {
    const uint32_t place = earlier + up_to - sum;
    scratch.places[2 * word] = place + (before & 0xffffu);
    scratch.places[2 * word + 1] = place + (total & 0xffffu) + (before >> 16);
  }
  __syncthreads();
}

// Sorts run number `number`, of features of at most kMaxNarrowRows rows; false if there are not so
// many. `slice`: room for the block's own. The scratch may be used for other things afterwards.
// Called by all threads of the cluster.
template <int kThreads>
__device__ __forceinline__ bool sort_share(ShareScratch& scratch, SortedRun& run,
                                           GroupedLookup* slice, const TiledGroup& group,
                                           const BagBatch& batch, const TiledRange& range,
                                           int32_t number) {
  constexpr int kBatch = (kMaxSliceLookups + kThreads - 1) / kThreads;
  static_assert(kMaxShareBins / 2 <= kThreads && kThreads <= 1024);
  const uint32_t rank = cluster_rank();
  const uint32_t blocks = cluster_blocks();
  const SortedChunk& chunk = scratch.chunk;
  if (threadIdx.x < kMaxShareBins / 8) {
    reinterpret_cast<uint4*>(scratch.counts)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < 32) {
    find_chunk(scratch.chunk, group, batch, range, number, rank, 31 - __clz(blocks));
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
  bool equal_bags = true;
  if (pools) {
    const EqualBags bags(chunk);
    equal_bags = bags.length != 0;
    if (equal_bags && batch.offsets_are_int64) {
      equal_bags = confirm_share<int64_t, kThreads, kBatch>(
          bags, static_cast<const int64_t*>(batch.offsets) + first_bag, count);
    } else if (equal_bags) {
      equal_bags = confirm_share<int32_t, kThreads, kBatch>(
          bags, static_cast<const int32_t*>(batch.offsets) + first_bag, count);
    }
  }
  // While the others wait for their ids.
  if (threadIdx.x == kThreads - 1) divide_run(run, chunk, blocks, kThreads / 32, range.disabled);
  equal_bags = __syncthreads_and(equal_bags || count == 0);
  const EqualBags bags(chunk);
  // Values that are never used, but some on every path: otherwise registers are kept for them in
  // the calls below.
  uint32_t samples[kBatch] = {};
  if (!equal_bags) {
    mark_bags(scratch.marks, batch, first_bag, range, first, count);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
      samples[i] = item < count ? marked_sample(scratch.marks, batch, item) : 0;
    }
  }

  const uint32_t num_embeddings = static_cast<uint32_t>(feature.num_embeddings);
  const IdSplitter splitter(feature);
  LookupDigits digits[kBatch] = {};  // `bin` becomes bin << 16 | rank in the bin
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (item >= count) break;
    if (static_cast<uint64_t>(ids[i]) >= num_embeddings) {
      trap_on_bad_lookup(feature, first + item, ids[i]);
    }
    digits[i] = splitter.split(static_cast<uint32_t>(ids[i]));
    const uint32_t bin = digits[i].bin;
    const uint32_t half = bin % 2 * 16;
    const uint32_t counted = atomicAdd(&scratch.counts[bin / 2], 1u << half);
    digits[i].bin = bin << 16 | (counted >> half & 0xffffu);
  }
  __syncthreads();
  // Also, that the block has done with its slice of the run before.
  arrive_at_cluster();
  wait_for_cluster();
  // No block looks for windows of the run before any more, and none yet for those of this one.
  if (threadIdx.x == 0) run.taken = 0;
  place_share_bins(scratch, feature.bins, rank, blocks);

  const bool sorts = (range.disabled & kGroupingDisabled) == 0;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (item >= count) break;
    const uint32_t place = sorts ? scratch.places[digits[i].bin >> 16] + (digits[i].bin & 0xffffu)
                                 : static_cast<uint32_t>(chunk.begin + item);
    if (!pools) {
      samples[i] = static_cast<uint32_t>(first + item) | kLoneLookup;
    } else if (equal_bags) {
      samples[i] = (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
                   (bags.length == 1 ? kLoneLookup : 0);
    }
    const uint32_t owner = __umulhi(place, run.reciprocal);
    const uint32_t own_place = place - owner * static_cast<uint32_t>(run.slice);
    RemoteVector(reinterpret_cast<const uint4*>(slice) + own_place, owner)
        .store(make_uint4(digits[i].outer, digits[i].i2, chunk.first + item, samples[i]));
  }
  arrive_after_remote_stores();
  wait_for_cluster();
  return true;
}

}  // namespace flowtt::cuda
