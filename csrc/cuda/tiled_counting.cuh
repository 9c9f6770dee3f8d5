// The first half of the counting sort: each block picks the lookups of its chunk whose bins are in
// the cluster's part, and counts them.

#pragma once

#include <cstdio>

#include "cluster.cuh"
#include "tiled_bags.cuh"
#include "tiled_digits.cuh"
#include "tiled_runs.cuh"

namespace flowtt::cuda {

// Parts of the bins: a power of two, so that every thread has as many bins.
inline constexpr int kMaxBinParts = kMaxTiledBins / kPrepareThreads;

// Tables of more rows take a slower way from id to bin.
inline constexpr int64_t kMaxNarrowRows = int64_t{1} << 31;

// In shared memory.
struct GroupingScratch {
  // The block's lookups of each bin of the part, then the places of the first of them.
  alignas(16) uint32_t counts[kMaxTiledBins];
  uint32_t places[kMaxTiledBins];  // of each block's first lookup of each bin of this block's share
  uint2 lookups[kMaxChunk];        // {number in the chunk | bin of the part << 16, rank in its bin}
  uint32_t taken;                  // how many of them
  uint32_t before_part;            // the block's lookups of the parts before this one
  uint32_t share_counts[kMaxClusterBlocks];  // the block's lookups of each block's bins
  uint32_t warp_sums[kPrepareWarps];
  uint32_t warp_bases[kPrepareWarps];
  SortedChunk chunk;
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

// Called by all threads; nothing of the scratch may be used before the next barrier.
__device__ __forceinline__ void clear_counts(GroupingScratch& scratch) {
  uint4* words = reinterpret_cast<uint4*>(scratch.counts);
#pragma unroll
  for (int i = 0; i < kMaxTiledBins / 4 / kPrepareThreads; ++i) {
    words[i * kPrepareThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x < kMaxClusterBlocks) scratch.share_counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) scratch.before_part = scratch.taken = 0;
}

// Bins of a part of a feature's bins: [first, first + count).
struct BinPart {
  uint32_t first;
  uint32_t count;

  __device__ __forceinline__ BinPart(const TiledFeature& feature, int32_t number,
                                     int32_t parts_shift)
      : count((feature.bins + (1u << parts_shift) - 1) >> parts_shift) {
    first = number * count;
  }
};

// Ids of a thread's lookups, kPrepareThreads apart; 0 beyond `existing`.
template <typename index_t, int kBatch>
__device__ __forceinline__ void load_ids(int64_t (&ids)[kBatch], const index_t* indices,
                                         int32_t existing) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    ids[i] = i * kPrepareThreads < existing ? indices[i * kPrepareThreads] : 0;
  }
}

// Picks and counts those of a warp's lookups whose bins are in the part. bins: numbered within the
// part, of lookups that lie kPrepareThreads apart from `item` on; there are `existing` of them.
template <int kBatch>
__device__ __forceinline__ void count_batch(GroupingScratch& scratch,
                                            const uint32_t (&bins)[kBatch], uint32_t part_bins,
                                            int32_t item, int32_t existing) {
  const int lane = threadIdx.x % 32;
  uint32_t taken = 0;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    taken += i * kPrepareThreads < existing && bins[i] < part_bins;
  }
  // Room for the warp's lookups.
  uint32_t place = taken;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, place, offset);
    if (lane >= offset) place += other;
  }
  uint32_t warp_place = 0;
  if (lane == 31) warp_place = add_to_shared(&scratch.taken, place);
  place += __shfl_sync(kAllLanes, warp_place, 31) - taken;
  uint2* target = scratch.lookups + place;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (i * kPrepareThreads < existing && bins[i] < part_bins) {
      *target++ = make_uint2((item + i * kPrepareThreads) | bins[i] << 16,
                             atomicAdd(&scratch.counts[bins[i]], 1u));
    }
  }
}

inline __device__ __noinline__ void count_wide_bins(GroupingScratch& scratch,
                                                    const TiledFeature& feature,
                                                    const BagBatch& batch, const BinPart& part,
                                                    int64_t first, int32_t count) {
  uint32_t before = 0;
  for (int32_t base = 0; base < count; base += kPrepareThreads) {
    const int32_t item = base + static_cast<int32_t>(threadIdx.x);
    uint32_t bins[1] = {0};
    if (item < count) {
      const int64_t id = load_index(batch.indices, batch.indices_are_int64, first + item);
      if (id < 0 || id >= feature.num_embeddings) trap_on_bad_lookup(feature, first + item, id);
      bins[0] = split_wide(feature, static_cast<uint64_t>(id)).bin;
      before += bins[0] < part.first;
      bins[0] -= part.first;
    }
    count_batch(scratch, bins, part.count, item, count - item);
  }
  if (before != 0) atomicAdd(&scratch.before_part, before);
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

__device__ __forceinline__ void count_bins(GroupingScratch& scratch, const TiledGroup& group,
                                           const BagBatch& batch, const TiledRange& range,
                                           int32_t part_number, int32_t parts_shift) {
  const TiledFeature& feature = group.features[scratch.chunk.feature];
  const BinPart part(feature, part_number, parts_shift);
  const int64_t first = range.first_lookup + scratch.chunk.first;
  const int32_t count = scratch.chunk.count;
  if (feature.num_embeddings > kMaxNarrowRows) {
    count_wide_bins(scratch, feature, batch, part, first, count);
    return;
  }
  constexpr int kBatch = 8;  // ids loaded before the first is used
  const uint32_t num_embeddings = static_cast<uint32_t>(feature.num_embeddings);
  const IdSplitter splitter(feature);
  uint32_t before = 0;
#pragma unroll 1
  for (int32_t item = threadIdx.x; item - static_cast<int32_t>(threadIdx.x) < count;
       item += kBatch * kPrepareThreads) {
    const int32_t existing = count - item;
    int64_t ids[kBatch];
    if (batch.indices_are_int64) {
      load_ids(ids, static_cast<const int64_t*>(batch.indices) + first + item, existing);
    } else {
      load_ids(ids, static_cast<const int32_t*>(batch.indices) + first + item, existing);
    }
    uint32_t bins[kBatch];
    bool is_bad = false;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      is_bad |= static_cast<uint64_t>(ids[i]) >= num_embeddings;
      bins[i] = splitter.split(static_cast<uint32_t>(ids[i])).bin;
      before += i * kPrepareThreads < existing && bins[i] < part.first;
      bins[i] -= part.first;
    }
    if (is_bad) find_bad_lookup(feature, batch, first + item, first + count);
    count_batch(scratch, bins, part.count, item, existing);
  }
  if (part.first > 0) {
    before = __reduce_add_sync(kAllLanes, before);
    if (threadIdx.x % 32 == 0) add_to_shared(&scratch.before_part, before);
  }
}

}  // namespace flowtt::cuda
