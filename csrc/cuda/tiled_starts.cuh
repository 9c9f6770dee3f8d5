// From the counts of all chunks of a feature to the place of each chunk's first lookup of each bin,
// in the feature's entries. Places are exact: no bin can overflow, however the ids are distributed.

#pragma once

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

// Chunks that a warp holds in registers between its two looks at them; it loads others again.
constexpr int kHeldChunks = 4;

// In shared memory.
struct StartsScratch {
  // Counts of each warp's chunks, then those of the warps before.
  alignas(16) uint32_t bins[kPrepareWarps][kSummedBins];
  alignas(16) uint32_t starts[kSummedBins];  // of the bins
  uint32_t earlier[kPrepareWarps];  // lookups of each warp's chunks of the bins before the block's
  uint32_t sums[kSummedBins / 32];
  FeatureChunks chunks;
};

__device__ __forceinline__ uint4 sum_of(const uint4& a, const uint4& b) {
  return make_uint4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Finds the starts of kSummedBins bins of one feature, four a lane; warps have consecutive chunks
// each. block: of range.bins / kSummedBins for each feature. Called by all threads.
__device__ __forceinline__ void find_starts(StartsScratch& scratch, const TiledGroup& group,
                                            const BagBatch& batch, const TiledRange& range,
                                            const TiledWorkspace& workspace, int32_t block) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t columns = range.bins / kSummedBins;
  const int32_t column = block % columns;
  const FeatureChunks chunks =
      find_feature_chunks(scratch.chunks, group, batch, range, block / columns);
  const int32_t per_warp = (chunks.count + kPrepareWarps - 1) / kPrepareWarps;
  const int32_t first = min(warp * per_warp, chunks.count);
  const int32_t count = min(per_warp, chunks.count - first);
  const int32_t chunk0 = chunks.first + first;
  constexpr int32_t kRow = kMaxTiledBins / 4;
  uint4* const rows = reinterpret_cast<uint4*>(workspace.bin_starts) +
                      static_cast<int64_t>(chunk0) * kRow + column * 32 + lane;
  const uint32_t* const sums = workspace.bin_sums + chunk0 * kBinSums + lane;
  wait_for_previous_kernel();
  uint4 held[kHeldChunks];
  uint4 total = make_uint4(0, 0, 0, 0);
  uint32_t earlier = 0;
#pragma unroll
  for (int i = 0; i < kHeldChunks; ++i) {
    held[i] = make_uint4(0, 0, 0, 0);
    if (i < count) {
      held[i] = rows[i * kRow];
      if (lane < column) earlier += sums[i * kBinSums];
    }
  }
#pragma unroll
  for (int i = 0; i < kHeldChunks; ++i) total = sum_of(total, held[i]);
#pragma unroll 4
  for (int32_t i = kHeldChunks; i < count; ++i) {
    total = sum_of(total, rows[i * kRow]);
    if (lane < column) earlier += sums[i * kBinSums];
  }
  earlier = __reduce_add_sync(kAllLanes, earlier);
  if (lane == 0) scratch.earlier[warp] = earlier;
  reinterpret_cast<uint4*>(scratch.bins[warp])[lane] = total;
  __syncthreads();
  // From here a thread has one bin.
  const bool has_bin = threadIdx.x < kSummedBins;
  uint32_t bin_total = 0;
  uint32_t start = 0;
  if (has_bin) {
    uint32_t of_warp[kPrepareWarps];
#pragma unroll
    for (int w = 0; w < kPrepareWarps; ++w) of_warp[w] = scratch.bins[w][threadIdx.x];
#pragma unroll
    for (int w = 0; w < kPrepareWarps; ++w) {
      scratch.bins[w][threadIdx.x] = bin_total;
      bin_total += of_warp[w];
    }
    const uint32_t up_to = inclusive_sum(bin_total);
    if (lane == 31) scratch.sums[warp] = up_to;
    start = up_to - bin_total;
  }
  __syncthreads();
  if (has_bin) {
    // Bins of the warps before, and of the blocks before.
    uint32_t before = 0;
    if (lane < kPrepareWarps)
      before = scratch.earlier[lane] + (lane < warp ? scratch.sums[lane] : 0);
    scratch.starts[threadIdx.x] = start + __reduce_add_sync(kAllLanes, before);
  }
  __syncthreads();
  uint4 place = sum_of(reinterpret_cast<const uint4*>(scratch.bins[warp])[lane],
                       reinterpret_cast<const uint4*>(scratch.starts)[lane]);
#pragma unroll
  for (int i = 0; i < kHeldChunks; ++i) {
    if (i < count) rows[i * kRow] = place;
    place = sum_of(place, held[i]);
  }
#pragma unroll 4
  for (int32_t i = kHeldChunks; i < count; ++i) {
    const uint4 counts = rows[i * kRow];
    rows[i * kRow] = place;
    place = sum_of(place, counts);
  }
}

}  // namespace flowtt::cuda
