// Grouping of lookups by i2, the digit whose core slices are the large ones. One block orders one
// chunk of a feature's lookups by a counting sort in shared memory and writes it to the chunk's own
// place, together with the first entry of every i2. Nothing is shared between blocks, so there are
// no counters to clear, no capacity to exceed, and the contraction finds the i2-th group of the
// whole feature by adding up columns of `starts` (tiled_window.cuh).

#pragma once

#include "lookup_checks.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

constexpr int kPrepareThreads = 512;

struct GroupingScratch {
  int32_t bins[kMaxTiledBins];
  int32_t warp_sums[kPrepareThreads / 32];
  int64_t bag_bounds[2];
};

// Unlike trap_on_bad_index, for one thread alone.
inline __device__ __noinline__ void trap_on_bad_lookup(const TiledFeature& feature,
                                                       int64_t position, int64_t index) {
  printf(
      "flowtt: index out of range: feature %d (table %d), indices[%lld] = %lld, expected "
      "0 <= index < num_embeddings = %lld\n",
      feature.feature, feature.table, static_cast<long long>(position),
      static_cast<long long>(index), static_cast<long long>(feature.num_embeddings));
  __trap();
}

// The last bag of [low, high] that starts at or before `position`, by all lanes of a warp.
__device__ __forceinline__ int64_t find_bag_by_warp(const BagBatch& batch, int64_t low,
                                                    int64_t high, int64_t position) {
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t probe = low + (lane + 1) * step;
    const bool starts_before =
        probe <= high && load_index(batch.offsets, batch.offsets_are_int64, probe) <= position;
    const int before = __popc(__ballot_sync(kAllLanes, starts_before));
    low += before * step;
    high = min(high, low + step - 1);
  }
  return low;
}

__device__ __forceinline__ int64_t find_bag(const BagBatch& batch, int64_t low, int64_t high,
                                            int64_t position) {
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (load_index(batch.offsets, batch.offsets_are_int64, middle) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Exclusive sums over scratch.bins[0 .. bins), in place. Begins and ends with a barrier.
__device__ __forceinline__ void scan_bins(GroupingScratch& scratch, int32_t bins) {
  constexpr int kPerThread = kMaxTiledBins / kPrepareThreads;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int32_t first = threadIdx.x * kPerThread;
  __syncthreads();
  int32_t count[kPerThread];
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    count[i] = first + i < bins ? scratch.bins[first + i] : 0;
    sum += count[i];
  }
  int32_t up_to = sum;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  if (lane == 31) scratch.warp_sums[warp] = up_to;
  __syncthreads();
  const int32_t earlier = __reduce_add_sync(
      kAllLanes, lane < warp && lane < kPrepareThreads / 32 ? scratch.warp_sums[lane] : 0);
  int32_t exclusive = earlier + up_to - sum;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i < bins) scratch.bins[first + i] = exclusive;
    exclusive += count[i];
  }
  __syncthreads();
}

struct RowDigits {
  uint32_t i1;
  uint32_t i2;
  uint32_t i3;
};

__device__ __forceinline__ RowDigits row_digits(const TiledFeature& feature, int64_t id) {
  const uint32_t p2 = static_cast<uint32_t>(feature.p[1]);
  const uint32_t p3 = static_cast<uint32_t>(feature.p[2]);
  if (id <= 0xffffffffll) {
    const uint32_t prefix = static_cast<uint32_t>(id) / p3;
    return {prefix / p2, prefix % p2, static_cast<uint32_t>(id) - prefix * p3};
  }
  const uint64_t prefix = static_cast<uint64_t>(id) / p3;
  return {static_cast<uint32_t>(prefix / p2), static_cast<uint32_t>(prefix % p2),
          static_cast<uint32_t>(static_cast<uint64_t>(id) - prefix * p3)};
}

// Called by all threads of block `chunk`.
template <int kItems>
__device__ void group_chunk(GroupingScratch& scratch, const Segments& segments,
                            const TiledGroup& group, const BagBatch& batch, const TiledRange& range,
                            const TiledWorkspace& workspace, int32_t chunk) {
  if (chunk >= segments.first_chunk[group.count]) return;
  // Offsets out of order can make features overlap; clear_bags reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  int32_t f = 0;
  while (segments.first_chunk[f + 1] <= chunk) ++f;
  const TiledFeature& feature = group.features[f];
  const int32_t before = (chunk - segments.first_chunk[f]) * range.chunk_lookups;
  const int32_t entries = segments.first_entry[f + 1] - segments.first_entry[f];
  const int32_t count = min(range.chunk_lookups, entries - before);
  const int64_t first = segments.begin[f] + before;

  for (int32_t bin = threadIdx.x; bin < feature.p[1]; bin += kPrepareThreads) scratch.bins[bin] = 0;

  // Bags of one length are the common case: then the bag follows from the position, and one look
  // at the offsets confirms it.
  const int64_t first_bag = feature.feature * batch.batch_size;
  const int64_t low = first_bag + range.first_sample;
  const int64_t high = first_bag + range.end_sample - 1;
  const int64_t feature_begin = segments.samples_begin[f];
  const int64_t feature_end = segments.samples_end[f];
  const double bags_per_lookup = static_cast<double>(high + 1 - low) /
                                 static_cast<double>(max(feature_end - feature_begin, int64_t{1}));
  uint32_t digits[kItems];
  int32_t bins[kItems];
  int32_t samples[kItems];
  int32_t lengths[kItems];
  bool all_found = true;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t item = i * kPrepareThreads + threadIdx.x;
    if (item >= count) continue;
    const int64_t position = first + item;
    const int64_t id = load_index(batch.indices, batch.indices_are_int64, position);
    const double guess = (static_cast<double>(position - feature_begin) + 0.5) * bags_per_lookup;
    const int64_t bag = clamped(low + static_cast<int64_t>(guess), low, high);
    const int64_t begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
    all_found = all_found && begin <= position && position < end;
    samples[i] = static_cast<int32_t>(bag - first_bag);
    lengths[i] = static_cast<int32_t>(end - begin);
    if (id < 0 || id >= feature.num_embeddings) trap_on_bad_lookup(feature, position, id);
    const RowDigits row = row_digits(feature, id);
    digits[i] = row.i1 << 16 | row.i3;
    bins[i] = static_cast<int32_t>(row.i2);
  }
  if (!__syncthreads_and(all_found)) {
    if (threadIdx.x < 64) {
      const int end = threadIdx.x / 32;
      const int64_t bag = find_bag_by_warp(batch, low, high, end == 0 ? first : first + count - 1);
      if (threadIdx.x % 32 == 0) scratch.bag_bounds[end] = bag;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int32_t item = i * kPrepareThreads + threadIdx.x;
      if (item >= count) continue;
      const int64_t bag =
          find_bag(batch, scratch.bag_bounds[0], scratch.bag_bounds[1], first + item);
      samples[i] = static_cast<int32_t>(bag - first_bag);
      lengths[i] =
          static_cast<int32_t>(load_index(batch.offsets, batch.offsets_are_int64, bag + 1) -
                               load_index(batch.offsets, batch.offsets_are_int64, bag));
    }
  }

  // The rank within the group goes above the bin, which needs 11 bits.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * kPrepareThreads + static_cast<int32_t>(threadIdx.x) >= count) continue;
    bins[i] |= atomicAdd(&scratch.bins[bins[i]], 1) * kMaxTiledBins;
  }
  scan_bins(scratch, feature.p[1]);

  uint16_t* starts = workspace.starts + static_cast<int64_t>(chunk) * range.starts_stride;
  for (int32_t bin = threadIdx.x; bin <= feature.p[1]; bin += kPrepareThreads) {
    starts[bin] = static_cast<uint16_t>(bin < feature.p[1] ? scratch.bins[bin] : count);
  }
  const int64_t chunk_entry = segments.first_entry[f] + before;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t item = i * kPrepareThreads + threadIdx.x;
    if (item >= count) continue;
    const int64_t entry =
        chunk_entry + scratch.bins[bins[i] % kMaxTiledBins] + bins[i] / kMaxTiledBins;
    const uint32_t sample = static_cast<uint32_t>(samples[i]);
    workspace.entries[entry] = make_uint2(digits[i], sample | (lengths[i] == 1 ? kLoneLookup : 0));
    if (workspace.factors != nullptr) {
      const float weight = load_sample_weight<float>(batch, first + item);
      workspace.factors[entry] = batch.pooling_mode == PoolingMode::kMean
                                     ? weight / static_cast<float>(lengths[i])
                                     : weight;
    }
  }
}

}  // namespace flowtt::cuda
