// The first two launches of the preparation, which are the same for all tables.

#include "tiled_chunk_sizes.h"
#include "tiled_kernel_launch.cuh"
#include "tiled_starts.cuh"

namespace flowtt::cuda {

int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors) {
  // Few enough chunks that the blocks of the last launch fit on the device beside those that pack.
  const int64_t most = int64_t{multiprocessors} * 3 / 4;
  int32_t shift = kMinChunkShift;
  while (shift < kMaxChunkShift && lookups > most << shift) ++shift;
  return shift;
}

int32_t max_chunks(const TiledLaunch& launch) {
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return 0;
  const int64_t chunk = int64_t{1} << launch.range.chunk_shift;
  // No chunk has lookups of two features.
  return static_cast<int32_t>((lookups + chunk - 1) / chunk + launch.plan.group.count - 1);
}

cudaError_t launch_sort(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  const TiledWorkspace& workspace = launch.workspace;
  // The two lie one after the other.
  const uint32_t* const end = workspace.piece_arrivals != nullptr
                                  ? workspace.piece_arrivals + plan.lookups_per_range / kPoolPiece
                                  : workspace.control + kControlWords;
  const auto cleared = static_cast<int32_t>((end - workspace.control + 3) / 4);
  const int32_t chunks = max_chunks(launch);
  const cudaError_t error =
      launch_kernel(tiled_count_kernel, chunks + 1, kPrepareThreads, 0, plan.dependent_launch,
                    launch.stream, plan.group, launch.batch, launch.range, workspace,
                    reinterpret_cast<uint4*>(workspace.control), cleared);
  if (error != cudaSuccess || chunks == 0) return error;
  // A warp for every few chunks of an average feature, and enough threads for the bins.
  int32_t warps = kSummedBins / 32;
  while (warps < kMaxStartsWarps && warps * kHeldChunks < chunks / plan.group.count) warps *= 2;
  return launch_kernel(tiled_starts_kernel, int64_t{kBinSums} * plan.group.count, warps * 32, 0,
                       plan.dependent_launch, launch.stream, plan.group, launch.batch, launch.range,
                       workspace);
}

}  // namespace flowtt::cuda
