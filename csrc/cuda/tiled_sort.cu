// The first two launches of the preparation, which are the same for all tables.

#include <algorithm>

#include "tiled_counting.cuh"
#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

ClearedVectors whole_sums(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  // Where most bags have one lookup, few sums need it.
  if (!launch.clears_sums || plan.row_slots == 0) return {nullptr, 0};
  const int64_t samples = launch.samples();
  const int64_t stride = launch.output.row_stride;
  float* sums = launch.workspace.sums;
  if (sums == nullptr) {
    int64_t columns = 0;
    for (int32_t f = 0; f < plan.group.count; ++f) {
      columns += plan.group.features[f].embedding_dim;
    }
    // Other launches may have written the other columns.
    if (columns != stride) return {nullptr, 0};
    sums = static_cast<float*>(launch.output.data) + launch.range.first_sample * stride;
  }
  if (reinterpret_cast<uintptr_t>(sums) % 16 != 0 || samples * stride % 4 != 0) {
    return {nullptr, 0};
  }
  return {reinterpret_cast<uint4*>(sums), samples * stride / 4};
}

int32_t set_sort_order(int32_t most_bins, TiledFeature* feature) {
  for (int k = 0; k < feature->num_cores; ++k) {
    uint8_t& shift = feature->reciprocal_shifts[k];
    shift = 0;
    while (int64_t{1} << shift < feature->p[k]) ++shift;
    feature->reciprocals[k] =
        static_cast<uint32_t>((int64_t{1} << (31 + shift)) / feature->p[k] + 1);
  }
  int shift = 0;
  while ((feature->p[1] - 1) >> shift >= most_bins) ++shift;
  const int32_t groups = ((feature->p[1] - 1) >> shift) + 1;
  feature->bin_shift = static_cast<uint16_t>(shift);
  feature->bin_split = static_cast<uint16_t>(std::min(feature->p[0], most_bins / groups));
  feature->minor_scale = static_cast<uint32_t>(
      std::min((int64_t{feature->bin_split} << 32) / feature->p[0], int64_t{0xffffffff}));
  const int32_t bins = groups * feature->bin_split;
  return (bins + kSummedBins - 1) / kSummedBins * kSummedBins;
}

void set_bag_length(const BagBatch& batch, TiledRange* range) {
  const int64_t bags = batch.num_features * batch.batch_size;
  if (batch.nnz == 0 || batch.nnz % bags != 0 || batch.nnz >= int64_t{1} << 31) return;
  range->bag_length = static_cast<uint32_t>(batch.nnz / bags);
  range->bag_reciprocal = bag_reciprocal(range->bag_length);
}

int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors) {
  // Few enough chunks that the blocks of the last launch fit on the device beside those that pack.
  const int64_t most = int64_t{multiprocessors} * 3 / 4;
  int32_t shift = kMinChunkShift;
  while (shift < kMaxChunkShift && lookups > most << shift) ++shift;
  return shift;
}

int32_t max_chunks(const TiledPlan& plan, int64_t lookups) {
  if (lookups == 0) return 0;
  const int64_t chunk = int64_t{1} << plan.chunk_shift;
  // No chunk has lookups of two features.
  return static_cast<int32_t>((lookups + chunk - 1) / chunk + plan.group.count - 1);
}

cudaError_t launch_count(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  const TiledWorkspace& workspace = launch.workspace;
  // What lies between the two is cleared too.
  const uint32_t* const end = workspace.piece_arrivals != nullptr
                                  ? workspace.piece_arrivals + plan.lookups_per_range / kPoolPiece
                                  : workspace.control + kControlWords;
  const ClearedVectors counters{reinterpret_cast<uint4*>(workspace.control),
                                (end - workspace.control + 3) / 4};
  const int32_t chunks = max_chunks(plan, launch.lookups());
  const cudaError_t error = share_memory_split(tiled_count_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_count_kernel, chunks + 1, kPrepareThreads, 0, plan.dependent_launch,
                       launch.stream, plan.group, launch.batch, launch.range, workspace, chunks,
                       counters);
}

cudaError_t launch_starts(const TiledLaunch& launch) {
  if (launch.lookups() == 0) return cudaSuccess;
  const int64_t blocks = int64_t{launch.range.bins / kSummedBins} * launch.plan.group.count;
  const cudaError_t error = share_memory_split(tiled_prepare_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_prepare_kernel, blocks, kPrepareThreads, 0,
                       launch.plan.dependent_launch, launch.stream, launch.plan.group, launch.batch,
                       launch.range, launch.workspace);
}

}  // namespace flowtt::cuda
