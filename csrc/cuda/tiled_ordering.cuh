// Up to a block's threads of neighbouring entries in the order of their prefixes: a counting sort
// in shared memory. Entries come sorted by bin, and a bin has several prefixes.

#pragma once

#include "tiled_segments.cuh"

namespace flowtt::cuda {

// Ranges that the prefixes of the block's entries are divided into.
inline constexpr int kPrefixRanges = 1024;

// In shared memory.
template <int kBlockThreads>
struct OrderScratch {
  static constexpr int kThreads = kBlockThreads;
  alignas(16) uint32_t ranges[kPrefixRanges];  // entries seen, then where the range starts
  uint32_t warp_sums[kThreads / 32];
  uint32_t first_prefix;
  uint32_t last_prefix;
};

// Called by all threads; a barrier must follow.
template <int kThreads>
__device__ __forceinline__ void clear_order(OrderScratch<kThreads>& scratch) {
  for (int i = threadIdx.x; i < kPrefixRanges; i += kThreads) scratch.ranges[i] = 0;
  if (threadIdx.x == 0) {
    scratch.first_prefix = ~0u;
    scratch.last_prefix = 0;
  }
}

// From the entries of each range to where it starts. Called by all threads; starts and ends with a
// barrier.
template <int kThreads>
__device__ __forceinline__ void find_range_starts(OrderScratch<kThreads>& scratch) {
  constexpr int kOwn = (kPrefixRanges + kThreads - 1) / kThreads;
  const bool has_ranges = threadIdx.x < kPrefixRanges / kOwn;
  uint32_t* const own = scratch.ranges + threadIdx.x * kOwn;
  __syncthreads();
  uint32_t counts[kOwn];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    counts[i] = has_ranges ? own[i] : 0;
    sum += counts[i];
  }
  uint32_t start = sum_of_threads_before(sum, scratch.warp_sums);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (has_ranges) own[i] = start;
    start += counts[i];
  }
  __syncthreads();
}

// Numbers the block's entries that exist, of one feature, in the order of their prefixes; those of
// close prefixes may be mixed. Called by all threads, after clear_order and a barrier; has
// barriers.
template <int kThreads>
__device__ __forceinline__ uint32_t order_entry(OrderScratch<kThreads>& scratch,
                                                const TiledFeature& feature, uint32_t outer,
                                                uint32_t i2, bool exists) {
  // Below 2^32, as both factors are at most 2^16.
  const uint32_t prefix = i2 * static_cast<uint32_t>(feature.p[0]) + (outer & 0xffffu);
  const uint32_t first = __reduce_min_sync(kAllLanes, exists ? prefix : ~0u);
  const uint32_t last = __reduce_max_sync(kAllLanes, exists ? prefix : 0u);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&scratch.first_prefix, first);
    atomicMax(&scratch.last_prefix, last);
  }
  __syncthreads();
  const float scale =
      kPrefixRanges / (static_cast<float>(scratch.last_prefix - scratch.first_prefix) + 1.0f);
  const uint32_t range =
      min(static_cast<uint32_t>(static_cast<float>(prefix - scratch.first_prefix) * scale),
          kPrefixRanges - 1u);
  const uint32_t rank = exists ? atomicAdd(&scratch.ranges[range], 1u) : 0;
  find_range_starts(scratch);
  return scratch.ranges[range] + rank;
}

}  // namespace flowtt::cuda
