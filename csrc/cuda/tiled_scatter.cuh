// The second half of the counting sort, the last launch of the preparation: every lookup goes to
// the start of its bin plus its place within the bin. Everything but that needs nothing of the
// launch before, so it is done before waiting for it.

#pragma once

#include "lookup_checks.cuh"
#include "tiled_bags.cuh"
#include "tiled_clearing.cuh"

namespace flowtt::cuda {

// In shared memory.
struct ScatterScratch {
  union {
    alignas(16) uint32_t starts[kMaxTiledBins];  // of the bins, in the feature's entries
    uint32_t samples[kMaxChunk];                 // before that, of a chunk of unequal bags
  };
  uint32_t warp_sums[kPrepareWarps];
  SortedChunk chunk;
  BagMarks marks;
};

// From the lookups of each bin of a feature to the bins' starts. Called by all threads; ends with a
// barrier.
__device__ __forceinline__ void find_starts(ScatterScratch& scratch, const uint32_t* counts) {
  constexpr int kVectors = kMaxTiledBins / kPrepareThreads / 4;  // consecutive, of a thread
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint4 count[kVectors];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    count[i] = reinterpret_cast<const uint4*>(counts)[threadIdx.x * kVectors + i];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += count[i].x + count[i].y + count[i].z + count[i].w;
  uint32_t up_to = sum;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  if (lane == 31) scratch.warp_sums[warp] = up_to;
  __syncthreads();
  uint32_t start = __reduce_add_sync(kAllLanes, lane < warp ? scratch.warp_sums[lane] : 0u);
  start += up_to - sum;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint4 starts;
    starts.x = start;
    starts.y = starts.x + count[i].x;
    starts.z = starts.y + count[i].y;
    starts.w = starts.z + count[i].z;
    start = starts.w + count[i].w;
    reinterpret_cast<uint4*>(scratch.starts)[threadIdx.x * kVectors + i] = starts;
  }
  __syncthreads();
}

// Whether the bags of the thread's lookups are of one length. offsets: of the samples' first bag.
template <int kItems, typename offset_t>
__device__ __forceinline__ bool confirm_bags(const EqualBags& bags, const offset_t* offsets,
                                             int32_t count) {
  bool confirmed = true;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t item = static_cast<int32_t>(i * kPrepareThreads + threadIdx.x);
    if (item < count) confirmed &= bags.confirms(offsets, item);
  }
  return confirmed;
}

// Finds out whether the bags of all lookups of the chunk are of one length, and the samples of the
// thread's own lookups if not. Called by all threads; has barriers.
template <int kItems>
__device__ __forceinline__ bool find_bags(ScatterScratch& scratch, const SortedChunk& chunk,
                                          const TiledGroup& group, const BagBatch& batch,
                                          const TiledRange& range) {
  if (batch.pooling_mode == PoolingMode::kNone) return true;
  const int64_t first_bag =
      group.features[chunk.feature].feature * batch.batch_size + range.first_sample;
  const EqualBags bags(chunk);
  bool confirmed = bags.length != 0;
  if (confirmed) {
    confirmed =
        batch.offsets_are_int64
            ? confirm_bags<kItems>(bags, static_cast<const int64_t*>(batch.offsets) + first_bag,
                                   chunk.count)
            : confirm_bags<kItems>(bags, static_cast<const int32_t*>(batch.offsets) + first_bag,
                                   chunk.count);
  }
  if (__syncthreads_and(confirmed)) return true;
  mark_bags(scratch.marks, batch, first_bag, range, range.first_lookup + chunk.first, chunk.count);
  find_marked_samples(scratch.samples, scratch.marks, batch, chunk.count);
  return false;
}

// The sample of the chunk's lookup `item`, as in GroupedLookup.
__device__ __forceinline__ uint32_t find_sample(const ScatterScratch& scratch,
                                                const SortedChunk& chunk, bool equal_bags,
                                                const BagBatch& batch, const TiledRange& range,
                                                int32_t item) {
  if (batch.pooling_mode == PoolingMode::kNone) {
    return static_cast<uint32_t>(range.first_lookup + chunk.first + item) | kLoneLookup;
  }
  if (!equal_bags) return scratch.samples[item];
  const EqualBags bags(chunk);
  return (static_cast<uint32_t>(range.first_sample) + bags.bag_of(item)) |
         (bags.length == 1 ? kLoneLookup : 0);
}

// The factor of the row of the chunk's lookup `item`.
__device__ __forceinline__ float find_factor(const SortedChunk& chunk, const TiledFeature& feature,
                                             bool equal_bags, const BagBatch& batch,
                                             const TiledRange& range, uint32_t sample,
                                             int32_t item) {
  const float weight = load_sample_weight<float>(batch, range.first_lookup + chunk.first + item);
  if (batch.pooling_mode != PoolingMode::kMean) return weight;
  const int64_t length =
      equal_bags ? chunk.bag_length
                 : bag_length(batch, feature.feature * batch.batch_size + (sample & ~kLoneLookup));
  return weight / static_cast<float>(length);
}

// Writes the entries of chunk `number`. Called by all threads of a block.
template <int kItems>
__device__ __forceinline__ void scatter_chunk(ScatterScratch& scratch, const TiledGroup& group,
                                              const BagBatch& batch, const TiledRange& range,
                                              const TiledWorkspace& workspace, int32_t number) {
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  const int32_t existing = chunk.count - static_cast<int32_t>(threadIdx.x);
  int64_t ids[kItems];
  load_ids(ids, batch, range.first_lookup + chunk.first + threadIdx.x, existing);
  const bool equal_bags = find_bags<kItems>(scratch, chunk, group, batch, range);
  const IdSplitter splitter(feature);
  const bool is_wide = feature.num_embeddings > kMaxNarrowRows;
  LookupDigits digits[kItems];
  uint32_t samples[kItems];
  float factors[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * kPrepareThreads < existing) {
      const int32_t item = static_cast<int32_t>(i * kPrepareThreads + threadIdx.x);
      digits[i] = is_wide ? splitter.split_wide(static_cast<uint64_t>(ids[i]))
                          : splitter.split(static_cast<uint32_t>(ids[i]));
      samples[i] = find_sample(scratch, chunk, equal_bags, batch, range, item);
      if (workspace.factors != nullptr) {
        factors[i] = find_factor(chunk, feature, equal_bags, batch, range, samples[i], item);
      }
    }
  }
  wait_for_previous_kernel();
  uint32_t entries[kItems];
  if (keeps_order(range)) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      entries[i] = chunk.first_entry + i * kPrepareThreads + threadIdx.x;
    }
  } else {
    const uint32_t position = static_cast<uint32_t>(chunk.first) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      entries[i] =
          i * kPrepareThreads < existing ? workspace.places[position + i * kPrepareThreads] : 0;
    }
    find_starts(scratch, workspace.bin_counts + chunk.feature * kMaxTiledBins);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i * kPrepareThreads < existing) {
        entries[i] += chunk.first_entry + scratch.starts[digits[i].bin];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (i * kPrepareThreads < existing) {
      const uint32_t position = chunk.first + i * kPrepareThreads + threadIdx.x;
      reinterpret_cast<uint4*>(workspace.entries)[entries[i]] =
          make_uint4(digits[i].outer, digits[i].i2, position, samples[i]);
      if (workspace.factors != nullptr) workspace.factors[entries[i]] = factors[i];
    }
  }
}

// The grid: `scattering` blocks, then one a piece of clearing. kItems: lookups of a thread.
template <int kItems>
__global__ void __launch_bounds__(kPrepareThreads, kItems == 1 ? 4 : 2)
    tiled_scatter_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ ClearingPieces pieces, int32_t scattering) {
  __shared__ ScatterScratch scratch;
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < scattering) {
    scatter_chunk<kItems>(scratch, group, batch, range, workspace, block);
  } else {
    clear_bags(group, batch, range, workspace, output, pieces, block - scattering);
  }
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
