// Which lookups a block partitions: a chunk of consecutive lookups of one feature.

#pragma once

#include "tiled_digits.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

constexpr int kPrepareThreads = 512;
constexpr int kPrepareWarps = kPrepareThreads / 32;

// Sizes of a chunk: TiledRange::chunk_shift is one of these or between them.
constexpr int kMinChunkShift = 9;
constexpr int kMaxChunkShift = 12;
constexpr int kMaxChunk = 1 << kMaxChunkShift;
static_assert(1 << kMinChunkShift == kPrepareThreads);

// Lookups of a chunk that a thread loads before it uses the first; they lie kPrepareThreads apart.
constexpr int kBatch = 4;

struct SortedChunk {
  int32_t feature;  // of the group; -1: there is no such chunk
  int32_t first;    // lookup of the range
  int32_t count;    // at least 1
  int32_t first_entry;
  // If all bags of the feature's samples may have one length: this length, its reciprocal as in
  // TiledRange, and how many of the samples' lookups are before the chunk's. Otherwise 0.
  uint32_t bag_length;
  uint32_t bag_reciprocal;
  uint32_t skipped;
};

__device__ __forceinline__ bool keeps_order(const TiledRange& range) {
  return (range.disabled & kGroupingDisabled) != 0;
}

__device__ __forceinline__ int32_t count_chunks(int32_t lookups, int32_t chunk_shift) {
  return (lookups + (1 << chunk_shift) - 1) >> chunk_shift;
}

// The lookups of one of several features in the range, a lane a feature.
struct FeatureLookups {
  int64_t lookups;  // of the feature's samples, in the range or not
  int64_t skipped;  // of these, before the range
  int32_t first;
  int32_t count;
  int32_t chunks;
  int32_t chunks_up_to;  // of this feature and those before
  int32_t entries_up_to;
  bool overlap;  // of any features, as offsets out of order can make it

  // By all lanes of a warp.
  __device__ __forceinline__ FeatureLookups(const TiledGroup& group, const BagBatch& batch,
                                            const TiledRange& range)
      : lookups(0), skipped(0), first(0), count(0) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    if (lane < group.count) {
      const LookupSpan span = load_span(group.features[lane], batch, range);
      lookups = span.end - span.begin;
      skipped = span.first - span.begin;
      first = static_cast<int32_t>(span.first - range.first_lookup);
      count = span.count;
    }
    chunks = count_chunks(count, range.chunk_shift);
    chunks_up_to = inclusive_sum(chunks);
    entries_up_to = inclusive_sum(count);
    overlap = __shfl_sync(kAllLanes, entries_up_to, 31) > range.end_lookup - range.first_lookup;
  }
};

// Chunk `number` of several features, by all lanes of a warp.
inline __device__ __noinline__ void find_chunk_of_group(SortedChunk& chunk, const TiledGroup& group,
                                                        const BagBatch& batch,
                                                        const TiledRange& range, int32_t number) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const FeatureLookups own(group, batch, range);
  const int feature = __ffs(__ballot_sync(kAllLanes, own.chunks_up_to > number)) - 1;
  if (own.overlap || feature < 0) {
    if (lane == 0) chunk.feature = -1;
    return;
  }
  if (lane != feature) return;
  const int64_t bags = range.end_sample - range.first_sample;
  uint32_t length = range.bag_length;
  uint32_t reciprocal = range.bag_reciprocal;
  if (length == 0 || bags * length != own.lookups) {
    length = 0;
    if (bags <= own.lookups && own.lookups < int64_t{1} << 31) {
      const uint32_t quotient = static_cast<uint32_t>(own.lookups) / static_cast<uint32_t>(bags);
      if (quotient * bags == own.lookups) length = quotient;
      reciprocal = bag_reciprocal(quotient);
    }
  }
  const int32_t begin = (number - (own.chunks_up_to - own.chunks)) << range.chunk_shift;
  chunk.feature = feature;
  chunk.first = own.first + begin;
  chunk.count = min(own.count - begin, 1 << range.chunk_shift);
  chunk.first_entry = own.entries_up_to - own.count + begin;
  chunk.bag_length = length;
  chunk.bag_reciprocal = reciprocal;
  chunk.skipped = static_cast<uint32_t>(own.skipped + begin);
}

// Called by all threads; may have a barrier. shared: to pass the chunk from one thread to all.
__device__ __forceinline__ SortedChunk find_chunk(SortedChunk& shared, const TiledGroup& group,
                                                  const BagBatch& batch, const TiledRange& range,
                                                  int32_t number) {
  if (!has_all_lookups(batch, range)) {
    if (threadIdx.x < 32) find_chunk_of_group(shared, group, batch, range, number);
    __syncthreads();
    return shared;
  }
  const int32_t begin = number << range.chunk_shift;
  const int32_t lookups = static_cast<int32_t>(range.end_lookup - range.first_lookup);
  SortedChunk chunk;
  chunk.feature = 0;
  chunk.first = begin;
  chunk.count = min(lookups - begin, 1 << range.chunk_shift);
  chunk.first_entry = begin;
  chunk.bag_length = range.bag_length;
  chunk.bag_reciprocal = range.bag_reciprocal;
  chunk.skipped = static_cast<uint32_t>(range.first_lookup + begin);
  return chunk;
}

__device__ __forceinline__ bool has_row(const TiledFeature& feature, int64_t id) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(feature.num_embeddings);
}

// Ids of a batch of a thread's lookups; 0 beyond the `existing` ones from the first on.
template <typename index_t>
__device__ __forceinline__ void load_ids(int64_t (&ids)[kBatch], const index_t* indices,
                                         int32_t existing) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    ids[i] = i * kPrepareThreads < existing ? indices[i * kPrepareThreads] : 0;
  }
}

// first: of the thread's lookups, in the call.
__device__ __forceinline__ void load_ids(int64_t (&ids)[kBatch], const BagBatch& batch,
                                         int64_t first, int32_t existing) {
  if (batch.indices_are_int64) {
    load_ids(ids, static_cast<const int64_t*>(batch.indices) + first, existing);
  } else {
    load_ids(ids, static_cast<const int32_t*>(batch.indices) + first, existing);
  }
}

}  // namespace flowtt::cuda
