// The contraction's view of grouped lookups: a feature's entries ordered by i2 over all chunks.

#pragma once

#include "tiled_segments.cuh"

namespace flowtt::cuda {

// The chunks of one feature.
struct FeatureChunks {
  const uint16_t* starts;  // of the first chunk
  int32_t stride;
  int32_t count;
  int32_t lookups;      // in every chunk but the last
  int64_t first_entry;  // of the first chunk
};

// bin_start[b] = lookups of the feature with i2 < b: the sum of a column of `starts`. Called by all
// threads; begins and ends with a barrier.
__device__ __forceinline__ void sum_bin_starts(int32_t* bin_start, const FeatureChunks& chunks,
                                               int32_t bins) {
  constexpr int kUnroll = 8;
  __syncthreads();
  for (int32_t bin = threadIdx.x; bin <= bins; bin += blockDim.x) bin_start[bin] = 0;
  __syncthreads();
  // Two columns a thread; as many groups of chunks as there are threads for.
  const int32_t pairs = (bins + 2) / 2;
  const int32_t groups =
      max(1, min(static_cast<int32_t>(blockDim.x) / pairs, (chunks.count + kUnroll - 1) / kUnroll));
  const uint32_t* columns = reinterpret_cast<const uint32_t*>(chunks.starts);
  for (int32_t item = threadIdx.x; item < pairs * groups; item += blockDim.x) {
    const int32_t pair = item % pairs;
    int32_t even = 0;
    int32_t odd = 0;
    for (int32_t base = item / pairs * kUnroll; base < chunks.count; base += groups * kUnroll) {
      uint32_t loaded[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        loaded[i] =
            base + i < chunks.count ? __ldg(columns + (base + i) * (chunks.stride / 2) + pair) : 0u;
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        even += static_cast<int32_t>(loaded[i] & 0xffffu);
        odd += static_cast<int32_t>(loaded[i] >> 16);
      }
    }
    if (even != 0) atomicAdd(&bin_start[2 * pair], even);
    if (odd != 0 && 2 * pair + 1 <= bins) atomicAdd(&bin_start[2 * pair + 1], odd);
  }
  __syncthreads();
}

// The bin that holds position `p` of the feature.
__device__ __forceinline__ int32_t find_bin(const int32_t* bin_start, int32_t bins, int32_t p) {
  int32_t low = 0;
  int32_t high = bins - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (bin_start[middle] <= p) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The entry at position `p` of the feature, which lies in `bin`, for every lane of a warp.
__device__ __forceinline__ int64_t find_entry(const FeatureChunks& chunks, const int32_t* bin_start,
                                              int32_t bin, int32_t p) {
  const int lane = threadIdx.x % 32;
  const int32_t within_bin = p - bin_start[bin];
  int64_t entry = 0;
  for (uint32_t todo = kAllLanes; todo != 0;) {
    const int32_t current = __shfl_sync(kAllLanes, bin, __ffs(todo) - 1);
    const uint32_t members = __ballot_sync(kAllLanes, bin == current);
    todo &= ~members;
    int32_t passed = 0;  // entries of the bin in earlier chunks
    for (int32_t base = 0; base < chunks.count; base += 32) {
      int32_t start = 0;
      int32_t size = 0;
      if (base + lane < chunks.count) {
        const uint16_t* column =
            chunks.starts + static_cast<int64_t>(base + lane) * chunks.stride + current;
        start = __ldg(column);
        size = __ldg(column + 1) - start;
      }
      int32_t up_to = size;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
        if (lane >= offset) up_to += other;
      }
      const int32_t earlier = passed + up_to - size;
      // The last chunk whose entries start at or before the lane's position.
      int chunk = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(kAllLanes, earlier, chunk + step) <= within_bin) chunk += step;
      }
      const int32_t chunk_start = __shfl_sync(kAllLanes, start, chunk);
      const int32_t chunk_earlier = __shfl_sync(kAllLanes, earlier, chunk);
      const int32_t end = passed + __shfl_sync(kAllLanes, up_to, 31);
      if (bin == current && within_bin >= passed && within_bin < end) {
        entry = chunks.first_entry + static_cast<int64_t>(base + chunk) * chunks.lookups +
                chunk_start + within_bin - chunk_earlier;
      }
      passed = end;
    }
  }
  return entry;
}

}  // namespace flowtt::cuda
