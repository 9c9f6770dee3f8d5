// The launch ahead of grouping, which is the same for all tables.

#include "tiled_group.h"

#include <algorithm>
#include <cstdlib>

#include "tiled_clearing.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {
namespace {

constexpr int kMinGroupChunkShift = 9;
constexpr int kMaxFoldedChunkShift = 11;

__global__ void __launch_bounds__(kPrepareThreads) tiled_clear_kernel(ClearedVectors counters) {
  wait_for_previous_kernel();
  // Only now: the next kernels read indices and offsets and write to the workspace before they
  // wait, and kernels ahead of the call may have to do with either.
  allow_dependent_launch();
  counters.clear(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
}

}  // namespace

int32_t choose_group_chunk_shift(const TiledPlan& plan) {
  // Large chunks have more equal ids, small ones are spread over more blocks.
  const int64_t most = int64_t{plan.multiprocessors};
#ifdef LAB
  if (getenv("GCS")) return atoi(getenv("GCS"));
#endif
  int32_t shift = kMinGroupChunkShift;
  while (shift < kMaxFoldedChunkShift && plan.lookups_per_range > most << shift) ++shift;
  return shift;
}

int64_t bin_counters(const TiledPlan& plan) {
  return int64_t{plan.bins + 1} * plan.group.count;
}

cudaError_t launch_clear(const TiledLaunch& launch) {
  const ClearedVectors counters = used_counters(launch);
  const int64_t blocks =
      std::clamp<int64_t>(counters.count / kPrepareThreads, 1, launch.plan.multiprocessors);
  const cudaError_t error = share_memory_split(tiled_clear_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_clear_kernel, blocks, kPrepareThreads, 0,
                       launch.plan.dependent_launch, launch.stream, counters);
}

}  // namespace flowtt::cuda
