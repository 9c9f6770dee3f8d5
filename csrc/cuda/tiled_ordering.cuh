// The entries of a granule in the order of their prefixes: a counting sort in shared memory.

#pragma once

#include "tiled_gather.cuh"

namespace flowtt::cuda {

// Ranges of prefixes that the buckets of a granule are divided into, at most.
inline constexpr int kFineBits = 10;
inline constexpr int kFineRanges = 1 << kFineBits;

// In shared memory.
template <int kBlockThreads>
struct OrderScratch {
  static constexpr int kThreads = kBlockThreads;
  alignas(16) uint32_t ranges[kFineRanges];  // entries seen, then where the range starts
  uint32_t warp_sums[kThreads / 32];
};

// Which range an entry lies in; as fine as the granule's buckets allow.
class FineOrder {
 public:
  // scratch: after find_buckets.
  template <typename Scratch>
  __device__ __forceinline__ FineOrder(const Scratch& scratch, const TiledFeature& feature)
      : order_(feature) {
    const uint32_t buckets = scratch.last_bucket - scratch.first_bucket + 1;
    shift_ = kFineBits - (32 - __clz(buckets - 1));
    first_ = scratch.first_bucket << shift_;
  }

  __device__ __forceinline__ uint32_t range_of(uint32_t outer, uint32_t i2) const {
    return order_.range_of(outer, i2, shift_) - first_;
  }

 private:
  PrefixOrder order_;
  int shift_;
  uint32_t first_;
};

// Called by all threads.
template <int kThreads>
__device__ __forceinline__ void clear_ranges(OrderScratch<kThreads>& scratch) {
  for (int i = threadIdx.x; i < kFineRanges; i += kThreads) scratch.ranges[i] = 0;
}

// From the entries of each range to where it starts. Called by all threads; starts and ends with a
// barrier.
template <int kThreads>
__device__ __forceinline__ void find_range_starts(OrderScratch<kThreads>& scratch) {
  constexpr int kOwn = (kFineRanges + kThreads - 1) / kThreads;
  const bool has_ranges = threadIdx.x < kFineRanges / kOwn;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  uint32_t* const own = scratch.ranges + threadIdx.x * kOwn;
  __syncthreads();
  uint32_t counts[kOwn];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    counts[i] = has_ranges ? own[i] : 0;
    sum += counts[i];
  }
  const uint32_t up_to = inclusive_sum(sum);
  if (lane == 31) scratch.warp_sums[warp] = up_to;
  __syncthreads();
  uint32_t start =
      up_to - sum + __reduce_add_sync(kAllLanes, lane < warp ? scratch.warp_sums[lane] : 0);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (has_ranges) own[i] = start;
    start += counts[i];
  }
  __syncthreads();
}

// Numbers the entries of the granule that exist in the order of their prefixes. Called by all
// threads, after clear_ranges; has barriers.
template <int kThreads>
__device__ __forceinline__ uint32_t order_entry(OrderScratch<kThreads>& scratch,
                                                const FineOrder& order, uint32_t outer, uint32_t i2,
                                                bool exists) {
  const uint32_t range = order.range_of(outer, i2);
  const uint32_t rank = exists ? atomicAdd(&scratch.ranges[range], 1u) : 0;
  find_range_starts(scratch);
  return scratch.ranges[range] + rank;
}

}  // namespace flowtt::cuda
