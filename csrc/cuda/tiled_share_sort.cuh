// The other way to sort lookups: by the clusters that contract them, in shared memory. One or more
// clusters sort a run of a feature's lookups together; each of them keeps an equal part of the
// sorted order, and each of its blocks an equal slice of that, whatever the bins are.
//   each block counts the lookups of its chunk of the run per bin,
//   each block reads the counts of the cluster's blocks, and so knows where its own lookups belong,
//   each block writes its lookups into the slices of the blocks that will work on them.
// Two barriers of the cluster; nothing of it goes to device memory. Clusters do not tell each other
// anything: all of them read all ids of the run, and leave out the lookups of the other parts. So
// each has to find the same places for the lookups of a bin that lies in two parts: these are
// numbered in the order of the batch, the others as they come.

#pragma once

#include "cluster.cuh"
#include "tiled_bags.cuh"
#include "tiled_counting.cuh"
#include "tiled_digits.cuh"
#include "tiled_queue.cuh"

namespace flowtt::cuda {

// Consecutive bins whose counts are one vector.
inline constexpr uint32_t kGroupBins = 8;
inline constexpr uint32_t kBinGroups = kMaxShareBins / kGroupBins;
inline constexpr uint32_t kNoBin = 0xffff;
inline constexpr uint32_t kNoPlace = 0x80000000u;

// In shared memory while a run is sorted; the warps need the place afterwards.
struct ShareScratch {
  // The block's lookups of each bin and of each group of bins, two of them a word.
  alignas(16) uint32_t counts[kMaxShareBins / 2];
  uint32_t group_counts[kBinGroups / 2];
  uint32_t group_places[kBinGroups];  // of the first lookup of each group, in the run
  // Of the block's first lookup of each bin, or kNoPlace if the bin has no lookups of the part.
  alignas(16) uint32_t places[kMaxShareBins];
  uint32_t warp_sums[32];
  uint32_t cut_bins[2];        // bins that begin before the part or end after it, or kNoBin
  uint32_t cut_counts[2][32];  // lookups of these bins that each warp has
  uint32_t num_kept;
  uint2 kept[kMaxShareChunk];  // the block's lookups of the part: {id, place in the part << 16 |
                               // number in the chunk}
  SortedChunk chunk;
  BagMarks marks;
};
static_assert(kMaxClusterBlocks * kMaxSliceLookups < 65536);
static_assert(kMaxShareChunk <= kMaxChunk && kMaxShareChunk < 65536);

// In shared memory. How the cluster's part of a sorted run lies in the slices of its blocks.
struct SortedRun {
  int32_t feature;
  int32_t begin;        // of the part in the run
  int32_t count;        // lookups of the part
  int32_t first_entry;  // of the part, as if all features' entries were in one array
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
                                           const TiledRange& range, int32_t part, int32_t blocks,
                                           int32_t warps) {
  const int32_t average = max(chunk.run_count - 1, 0) / (blocks * range.run_parts) + 1;
  const int32_t rounds = (average + warps * kWindow - 1) / (warps * kWindow);
  const int32_t window =
      max((average + warps * rounds - 1) / (warps * rounds), static_cast<int32_t>(kMinWindow));
  run.feature = chunk.feature;
  run.window = window;
  run.slice = (average + window - 1) / window * window;
  run.begin = min(part * blocks * run.slice, chunk.run_count);
  run.count = min(chunk.run_count - run.begin, blocks * run.slice);
  run.first_entry = chunk.first_entry + run.begin;
  run.reciprocal = 0xffffffffu / static_cast<uint32_t>(run.slice) + 1;
  run.has_queues = (range.disabled & kStealingDisabled) == 0 && run.slice > window * warps;
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

// Whether those of the chunk's bags that the thread looks at are of one length: where each of them,
// and the one behind the last, begins. offsets: of the samples' first bag.
template <typename offset_t, int kThreads, int kBatch>
__device__ __forceinline__ bool confirm_chunk(const EqualBags& bags, const offset_t* offsets,
                                              int32_t count) {
  const uint32_t first_bag = bags.bag_of(0);
  const uint32_t end_bag = bags.bag_of(max(count - 1, 0)) + 1;
  const offset_t first = __ldcg(offsets);
  bool confirmed = true;
#pragma unroll
  for (int i = 0; i <= kBatch; ++i) {
    const uint32_t bag = first_bag + i * kThreads + threadIdx.x;
    if (count > 0 && bag <= end_bag) {
      confirmed &= __ldcg(offsets + bag) - first == static_cast<offset_t>(bag * bags.length);
    }
  }
  return confirmed;
}

// Sums of two counts in a word, over all blocks of the cluster and over those before this one.
struct ClusterCounts {
  uint32_t total[2];
  uint32_t before[2];

  __device__ __forceinline__ ClusterCounts(const uint32_t* word, uint32_t rank, uint32_t blocks)
      : total{}, before{} {
    uint32_t count[kMaxClusterBlocks];
#pragma unroll
    for (uint32_t i = 0; i < kMaxClusterBlocks; ++i) {
      // Each block begins with itself: they would all ask the same one.
      count[i] = i < blocks ? RemoteWord(word, (rank + i) & (blocks - 1)).load() : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kMaxClusterBlocks; ++i) {
      const bool is_before = ((rank + i) & (blocks - 1)) < rank;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t value = half == 0 ? count[i] & 0xffffu : count[i] >> 16;
        total[half] += value;
        before[half] += is_before ? value : 0;
      }
    }
  }
};

// Counts of groups, after those of bins. Called by all threads, between barriers.
__device__ __forceinline__ void count_groups(ShareScratch& scratch) {
  if (threadIdx.x >= kBinGroups) return;
  const uint4 counts = reinterpret_cast<const uint4*>(scratch.counts)[threadIdx.x];
  const uint32_t pairs[4] = {counts.x, counts.y, counts.z, counts.w};
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += (pairs[i] & 0xffffu) + (pairs[i] >> 16);
  const uint32_t next = __shfl_down_sync(kAllLanes, sum, 1);
  if (threadIdx.x % 2 == 0) scratch.group_counts[threadIdx.x / 2] = sum | next << 16;
}

// Where the block's first lookup of each bin belongs, in the run, of all bins that have lookups of
// the part: first of the groups, then of the bins of those groups alone. Called by all threads;
// ends with a barrier.
__device__ __forceinline__ void place_share_bins(ShareScratch& scratch, const SortedRun& run,
                                                 uint32_t rank, uint32_t blocks) {
  constexpr uint32_t kGroupWords = kBinGroups / 2;
  const uint32_t word = threadIdx.x;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint32_t sum[2] = {0, 0};
  uint32_t up_to = 0;
  if (word < kGroupWords) {
    const ClusterCounts counts(scratch.group_counts + word, rank, blocks);
    sum[0] = counts.total[0];
    sum[1] = counts.total[1];
    up_to = sum[0] + sum[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    if (lane == 31) scratch.warp_sums[warp] = up_to;
  }
  if (threadIdx.x < 2) scratch.cut_bins[threadIdx.x] = kNoBin;
  __syncthreads();
  if (word < kGroupWords) {
    uint32_t place = up_to - sum[0] - sum[1];
    for (int i = 0; i < warp; ++i) place += scratch.warp_sums[i];
    scratch.group_places[2 * word] = place;
    scratch.group_places[2 * word + 1] = place + sum[0];
  }
  __syncthreads();

  // Whole warps have four words each of up to eight groups.
  const uint32_t begin = static_cast<uint32_t>(run.begin);
  const uint32_t end = static_cast<uint32_t>(run.begin + run.count);
  constexpr uint32_t kWords = kMaxShareBins / 2;
  constexpr uint32_t kWarpGroups = 32 / (kGroupBins / 2);
  // The groups of the part are neighbours. Warps take them in turn, from the first on.
  uint32_t before_part = 0;
  for (uint32_t group = lane; group < kBinGroups; group += 32) {
    before_part += group > 0 && scratch.group_places[group] <= begin;
  }
  const uint32_t first_group = __reduce_add_sync(kAllLanes, before_part);
  for (uint32_t base = first_group + warp * kWarpGroups; base < kBinGroups;
       base += blockDim.x / 32 * kWarpGroups) {
    if (scratch.group_places[base] >= end) break;
    const uint32_t own_word = base * (kGroupBins / 2) + lane;
    ClusterCounts counts(scratch.counts + min(own_word, kWords - 1), rank, blocks);
    uint32_t place = counts.total[0] + counts.total[1];
#pragma unroll
    for (int offset = 1; offset < static_cast<int>(kGroupBins / 2); offset *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, place, offset);
      if (lane % (kGroupBins / 2) >= offset) place += other;
    }
    if (own_word >= kWords) continue;
    place += scratch.group_places[own_word / (kGroupBins / 2)] - counts.total[0] - counts.total[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bin = 2 * own_word + half;
      const uint32_t bin_end = place + counts.total[half];
      scratch.places[bin] = place + counts.before[half];
      if (place < begin && begin < bin_end) scratch.cut_bins[0] = bin;
      if (place < end && end < bin_end) scratch.cut_bins[1] = bin;
      place = bin_end;
    }
  }
  __syncthreads();
}

// Numbers the block's lookups of bins that other clusters have too in one order, that of their
// warps and places in the batch. lookups: bin << 16 | number in the bin, `batches` of them in
// any thread. By all threads; has a barrier.
template <int kBatch>
__device__ __forceinline__ void order_cut_bins(ShareScratch& scratch, uint32_t (&lookups)[kBatch],
                                               int32_t batches) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
#pragma unroll
  for (int cut = 0; cut < 2; ++cut) {
    const uint32_t bin = scratch.cut_bins[cut];
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += lookups[i] >> 16 == bin;
    sum = bin == kNoBin ? 0 : __reduce_add_sync(kAllLanes, sum);
    if (lane == 0) scratch.cut_counts[cut][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int cut = 0; cut < 2; ++cut) {
    const uint32_t bin = scratch.cut_bins[cut];
    if (bin == kNoBin || scratch.cut_counts[cut][warp] == 0) continue;
    uint32_t number = __reduce_add_sync(kAllLanes, lane < warp ? scratch.cut_counts[cut][lane] : 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i >= batches) break;
      const bool is_cut = lookups[i] >> 16 == bin;
      const uint32_t lanes = __ballot_sync(kAllLanes, is_cut);
      if (is_cut) lookups[i] = bin << 16 | (number + __popc(lanes & ((1u << lane) - 1)));
      number += __popc(lanes);
    }
  }
}

// Notes which of the thread's lookups are of the part. Called by all threads; ends with a barrier.
template <int kThreads, int kBatch>
__device__ __forceinline__ void keep_part(ShareScratch& scratch, const SortedRun& run,
                                          const int64_t (&ids)[kBatch],
                                          const uint32_t (&lookups)[kBatch], int32_t count,
                                          bool sorts) {
  const int lane = threadIdx.x % 32;
  uint32_t places[kBatch];
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = i * kThreads + static_cast<int32_t>(threadIdx.x);
    places[i] = kNoPlace;
    if (i * kThreads < count && item < count) {
      places[i] = (sorts ? scratch.places[lookups[i] >> 16] + (lookups[i] & 0xffffu)
                         : static_cast<uint32_t>(scratch.chunk.begin + item)) -
                  static_cast<uint32_t>(run.begin);
    }
    kept += places[i] < static_cast<uint32_t>(run.count);
  }
  uint32_t at = kept;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, at, offset);
    if (lane >= offset) at += other;
  }
  uint32_t warp_first = 0;
  if (lane == 31) warp_first = add_to_shared(&scratch.num_kept, at);
  at += __shfl_sync(kAllLanes, warp_first, 31) - kept;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (i * kThreads >= count) break;
    if (places[i] >= static_cast<uint32_t>(run.count)) continue;
    scratch.kept[at++] =
        make_uint2(static_cast<uint32_t>(ids[i]), places[i] << 16 | (i * kThreads + threadIdx.x));
  }
  __syncthreads();
}

}  // namespace flowtt::cuda
