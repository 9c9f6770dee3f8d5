// Where the lookups lie that one launch groups. The bins of a feature have equally many places,
// which are given to lookups as they come; lookups of a bin that is full go to the feature's
// overflow, in which those of a chunk and a bin are neighbours. How many places that are is worked
// out from the offsets by every block that needs it.

#pragma once

#include "tiled_segments.cuh"

namespace flowtt::cuda {

// Places of a bin: so many times its average share of the lookups, as if none were folded, and
// some more.
inline constexpr int32_t kPlacesPerLookup = 2;
inline constexpr int32_t kSparePlaces = 8;

// At most, of a launch.
constexpr int64_t max_bin_places(int64_t lookups, int64_t bins) {
  return lookups * kPlacesPerLookup + bins * kSparePlaces;
}

// Of the bins of one feature.
struct BinPlaces {
  uint32_t first;     // place of its first bin
  uint32_t capacity;  // of each bin
};

__device__ __forceinline__ int32_t used_bins(const TiledFeature& feature) {
  return (((feature.p[1] - 1) >> feature.bin_shift) + 1) * feature.bin_split;
}

__device__ __forceinline__ uint32_t bin_capacity(const TiledFeature& feature, int32_t lookups) {
  return static_cast<uint32_t>(lookups * kPlacesPerLookup / used_bins(feature) + kSparePlaces);
}

// Of one of several features, a lane a feature. By all lanes of a warp.
__device__ __forceinline__ BinPlaces find_bin_places(const TiledGroup& group,
                                                     int32_t lookups) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  BinPlaces places{0, 0};
  uint32_t wanted = 0;
  if (lane < group.count) {
    places.capacity = bin_capacity(group.features[lane], lookups);
    wanted = places.capacity * used_bins(group.features[lane]);
  }
  places.first = inclusive_sum(wanted) - wanted;
  return places;
}

// What a block of the contraction knows of the bins, in shared memory.
struct BinIndex {
  BinPlaces places[kTiledFeaturesPerLaunch];
  int32_t in_bins[kTiledFeaturesPerLaunch];   // lookups of the feature that have found a place
  int32_t overflow[kTiledFeaturesPerLaunch];  // and that have not
  uint32_t warp_sums[32];
};

// Of index_bins' `starts`, a multiple of 16.
constexpr int bin_starts_bytes(int32_t features, int32_t bins) {
  return (features * bins + 4) * static_cast<int>(sizeof(uint32_t));
}

// Sums up the lookups of bins: starts[i] is how many lie in the bins before bin i of all features.
// Called by all threads when index.places is known; ends with a barrier.
__device__ __forceinline__ void index_bins(BinIndex& index, uint32_t* starts, int32_t features,
                                           int32_t bins, const uint32_t* counts) {
  const int32_t total = features * bins;
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t warps = static_cast<int32_t>(blockDim.x / 32);
  uint32_t overflow = 0;
  if (static_cast<int32_t>(threadIdx.x) < features) overflow = __ldcg(counts + total + threadIdx.x);
  uint32_t before = 0;
  for (int32_t base = 0; base < total; base += 4 * static_cast<int32_t>(blockDim.x)) {
    const int32_t first = base + 4 * static_cast<int32_t>(threadIdx.x);
    uint4 count = make_uint4(0, 0, 0, 0);
    if (first < total) {
      count = __ldcg(reinterpret_cast<const uint4*>(counts + first));
      const uint32_t capacity = index.places[features == 1 ? 0 : first / bins].capacity;
      count = make_uint4(min(count.x, capacity), min(count.y, capacity), min(count.z, capacity),
                         min(count.w, capacity));
    }
    const uint32_t own = count.x + count.y + count.z + count.w;
    const uint32_t up_to = inclusive_sum(own);
    if (lane == 31) index.warp_sums[warp] = up_to;
    __syncthreads();
    const uint32_t sum = lane < warps ? index.warp_sums[lane] : 0;
    uint32_t start = before + up_to - own + __reduce_add_sync(kAllLanes, lane < warp ? sum : 0);
    before += __reduce_add_sync(kAllLanes, sum);
    if (first < total) {
      const uint32_t second = start + count.x;
      const uint32_t third = second + count.y;
      *reinterpret_cast<uint4*>(starts + first) =
          make_uint4(start, second, third, third + count.z);
    }
    if (base + 4 * static_cast<int32_t>(blockDim.x) < total) __syncthreads();
  }
  if (threadIdx.x == 0) starts[total] = before;
  __syncthreads();
  if (static_cast<int32_t>(threadIdx.x) < features) {
    const int32_t f = static_cast<int32_t>(threadIdx.x);
    index.in_bins[f] = static_cast<int32_t>(starts[(f + 1) * bins] - starts[f * bins]);
    index.overflow[f] = static_cast<int32_t>(overflow);
  }
  __syncthreads();
}

// Where a lookup of feature f lies.
struct BinnedPlace {
  const BinnedLookup* lookup;
  int32_t bin;          // of the feature; -1: in its overflow
  uint32_t in_overflow;  // place there
};

// number: of the feature's lookups that have found a place, bin after bin.
__device__ __forceinline__ BinnedPlace find_binned(const BinIndex& index, const uint32_t* starts,
                                                   const TiledWorkspace& workspace, int f,
                                                   int32_t bins, int32_t number) {
  const uint32_t* const own = starts + f * bins;
  const uint32_t target = own[0] + static_cast<uint32_t>(number);
  // The last bin that starts at or before it.
  int32_t low = 0;
  for (int32_t step = 1 << (31 - __clz(bins - 1)); step > 0; step /= 2) {
    if (low + step < bins && own[low + step] <= target) low += step;
  }
  const BinPlaces places = index.places[f];
  return {workspace.binned + places.first + static_cast<uint32_t>(low) * places.capacity +
              (target - own[low]),
          low, 0};
}

// The digit of core 2, whose low bits the lookup has.
__device__ __forceinline__ uint32_t second_digit(const BinnedLookup& lookup,
                                                 const BinnedPlace& place,
                                                 const TiledFeature& feature,
                                                 const TiledWorkspace& workspace) {
  const uint32_t low = lookup.place >> kLowDigitShift;
  if (static_cast<uint32_t>(feature.p[1]) <= kLowDigitMask + 1) return low;
  if (place.bin < 0) return __ldg(workspace.overflow_i2 + place.in_overflow);
  const uint32_t high = static_cast<uint32_t>(place.bin) / feature.bin_split << feature.bin_shift;
  return (high & ~kLowDigitMask) | low;
}

}  // namespace flowtt::cuda
