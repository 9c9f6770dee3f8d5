// The lookups of a chunk, ordered by bucket: the first step of sorting. Ids are checked here.

#pragma once

#include <cstdio>

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"

namespace flowtt::cuda {

// In dynamic shared memory.
struct __align__(16) PartitionScratch {
  // Lookups of each bucket that have been seen, then where the bucket starts in the chunk.
  uint32_t buckets[kBuckets];
  uint32_t warp_sums[kBuckets / 32];
  SortedChunk chunk;
  BagMarks marks;
  // As many of each as a chunk may have.
  //
  // Lookups on their way to device memory: GroupedLookups.
  __device__ __forceinline__ uint4* entries() { return reinterpret_cast<uint4*>(this + 1); }
  // {outer as in GroupedLookup, i2 | rank within the chunk and the bucket << 16}. A thread reads
  // only what it has written.
  __device__ __forceinline__ uint2* staged(const TiledRange& range) {
    return reinterpret_cast<uint2*>(entries() + (1 << range.chunk_shift));
  }

  static constexpr size_t bytes(int32_t chunk_shift) {
    return sizeof(PartitionScratch) + ((sizeof(uint4) + sizeof(uint2)) << chunk_shift);
  }
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

// Reports the first of a thread's lookups that has no row.
inline __device__ __noinline__ void find_bad_lookup(const TiledFeature& feature,
                                                    const BagBatch& batch, int64_t position,
                                                    int64_t end) {
  for (; position < end; position += kPrepareThreads) {
    const int64_t id = load_index(batch.indices, batch.indices_are_int64, position);
    if (!has_row(feature, id)) trap_on_bad_lookup(feature, position, id);
  }
}

// The sample of the chunk's lookup `item`, as in GroupedLookup.
__device__ __forceinline__ uint32_t find_sample(const PartitionScratch& scratch,
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

// Whether all bags of the chunk's lookups are of one length, as far as this thread sees.
__device__ __forceinline__ bool confirm_bags(const SortedChunk& chunk, const BagBatch& batch,
                                             int64_t first_bag) {
  if (batch.pooling_mode == PoolingMode::kNone) return true;
  const EqualBags bags(chunk);
  if (bags.length == 0) return false;
  return batch.offsets_are_int64
             ? bags.confirm(static_cast<const int64_t*>(batch.offsets) + first_bag, chunk.count)
             : bags.confirm(static_cast<const int32_t*>(batch.offsets) + first_bag, chunk.count);
}

// Takes apart the ids of the chunk and numbers the lookups of each bucket. first_bag: of the
// samples. Returns what confirm_bags does.
template <bool kWide>
__device__ __forceinline__ bool stage_lookups(PartitionScratch& scratch, const SortedChunk& chunk,
                                              const TiledFeature& feature, const BagBatch& batch,
                                              const TiledRange& range, int64_t first_bag) {
  const int64_t first = range.first_lookup + chunk.first;
  const int32_t item = static_cast<int32_t>(threadIdx.x);
  int64_t ids[kBatch];
  load_ids(ids, batch, first + item, chunk.count - item);
  const bool confirmed = confirm_bags(chunk, batch, first_bag);
  const IdSplitter splitter(feature);
  const PrefixOrder order(feature);
  const bool sorts = !keeps_order(range);
  uint2* const staged = scratch.staged(range);
  bool is_bad = false;
#pragma unroll 1
  for (int32_t base = item; base < chunk.count; base += kBatch * kPrepareThreads) {
    const int32_t more = base + kBatch * kPrepareThreads;
    int64_t next_ids[kBatch];
    load_ids(next_ids, batch, first + more, chunk.count - more);
    // Not unrolled: what is executed once is read from far away, which takes longer than to execute
    // it.
#pragma unroll 1
    for (int32_t own = base; own < min(chunk.count, more); own += kPrepareThreads) {
      const bool exists = has_row(feature, ids[0]);
      const LookupDigits digits = splitter.split_id<kWide>(exists ? ids[0] : 0);
      is_bad |= !exists;
      const uint32_t rank =
          sorts ? atomicAdd(&scratch.buckets[order.bucket_of(digits.outer, digits.i2)], 1u) : own;
      staged[own] = make_uint2(digits.outer, digits.i2 | rank << 16);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) ids[i - 1] = ids[i];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) ids[i] = next_ids[i];
  }
  if (is_bad) find_bad_lookup(feature, batch, first + item, first + chunk.count);
  return confirmed;
}

// From the lookups of each bucket to where it starts in the chunk, which is also left in `row` for
// the next launch. Called by all threads; ends with a barrier.
__device__ __forceinline__ void find_bucket_starts(PartitionScratch& scratch, uint16_t* row,
                                                   int32_t count, bool sorts) {
  const int bucket = static_cast<int>(threadIdx.x);
  const int warp = bucket / 32;
  static_assert(kBuckets % 32 == 0 && kBuckets < kPrepareThreads && kBuckets / 32 <= 32);
  uint32_t lookups = 0;
  uint32_t up_to = 0;
  if (bucket < kBuckets) {
    // Where the order is kept the first bucket has all.
    lookups = sorts ? scratch.buckets[bucket] : bucket == 0 ? count : 0;
    up_to = inclusive_sum(lookups);
    if (bucket % 32 == 31) scratch.warp_sums[warp] = up_to;
  }
  __syncthreads();
  if (bucket < kBuckets) {
    const int lane = bucket % 32;
    const uint32_t before = __reduce_add_sync(kAllLanes, lane < warp ? scratch.warp_sums[lane] : 0);
    const uint32_t start = before + up_to - lookups;
    scratch.buckets[bucket] = start;
    row[bucket] = static_cast<uint16_t>(start);
  } else if (bucket < kBucketRow) {
    row[bucket] = static_cast<uint16_t>(count);
  }
  __syncthreads();
}

// Partitions chunk `number`. Called by all threads of a block.
__device__ __forceinline__ void partition_chunk(PartitionScratch& scratch, const TiledGroup& group,
                                                const BagBatch& batch, const TiledRange& range,
                                                const TiledWorkspace& workspace, int32_t number) {
  if (threadIdx.x < kBuckets) scratch.buckets[threadIdx.x] = 0;
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  __syncthreads();
  const int64_t first_bag = feature.feature * batch.batch_size + range.first_sample;
  const bool confirmed =
      feature.num_embeddings > kMaxNarrowRows
          ? stage_lookups<true>(scratch, chunk, feature, batch, range, first_bag)
          : stage_lookups<false>(scratch, chunk, feature, batch, range, first_bag);
  const bool equal_bags = __syncthreads_and(confirmed);
  if (!equal_bags) {
    mark_bags(scratch.marks, batch, first_bag, range, range.first_lookup + chunk.first,
              chunk.count);
  }
  const bool sorts = !keeps_order(range);
  find_bucket_starts(scratch, workspace.bucket_starts + static_cast<int64_t>(number) * kBucketRow,
                     chunk.count, sorts);
  const PrefixOrder order(feature);
#pragma unroll 1
  for (int32_t item = threadIdx.x; item < chunk.count; item += kPrepareThreads) {
    const uint2 staged = scratch.staged(range)[item];
    const uint32_t i2 = staged.y & 0xffffu;
    const uint32_t bucket = sorts ? order.bucket_of(staged.x, i2) : 0;
    const uint32_t place = scratch.buckets[bucket] + (staged.y >> 16);
    const uint32_t sample = find_sample(scratch, chunk, equal_bags, batch, range, item);
    scratch.entries()[place] = make_uint4(staged.x, i2, chunk.first + item, sample);
    if (workspace.partitioned_factors != nullptr) {
      workspace.partitioned_factors[chunk.first_entry + place] =
          find_factor(batch, feature, range.first_lookup + chunk.first + item, sample,
                      equal_bags ? chunk.bag_length : 0);
    }
  }
  __syncthreads();
  uint4* const entries = reinterpret_cast<uint4*>(workspace.partitioned) + chunk.first_entry;
#pragma unroll 2
  for (int32_t i = threadIdx.x; i < chunk.count; i += kPrepareThreads) {
    entries[i] = scratch.entries()[i];
  }
}

}  // namespace flowtt::cuda
