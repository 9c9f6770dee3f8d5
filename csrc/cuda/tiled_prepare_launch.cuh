// How the preparation is launched: lookups are counted, cores are packed while places are found for
// them, and they are written to their places.

#pragma once

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

// cleared: what is to be zeros after it, beside counters.
template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch, const ClearedVectors& cleared) {
  const TiledGroup& group = launch.plan.group;
  cudaError_t error = launch_count(launch);
  if (error != cudaSuccess) return error;
  const int32_t starting = launch.lookups() > 0 ? launch.range.bins / kSummedBins * group.count : 0;
  const int32_t pieces = launch.packs_cores ? group.pack_blocks : 0;
  // As many packing blocks as fit beside those that find starts.
  const int32_t multiprocessors = launch.plan.multiprocessors;
  const int32_t packing = std::min(
      pieces,
      std::max(kPrepareBlocksPerMultiprocessor * multiprocessors - starting, multiprocessors));
  if (starting + packing > 0) {
    const auto kernel = tiled_prepare_kernel<Packing>;
    error = share_memory_split(kernel);
    if (error != cudaSuccess) return error;
    error = launch_kernel(kernel, starting + packing, kPrepareThreads, 0,
                          launch.plan.dependent_launch, launch.stream, group, launch.batch,
                          launch.range, launch.workspace, starting, pieces);
    if (error != cudaSuccess) return error;
  }
  return launch_scatter(launch, cleared);
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  return launch_prepare<Packing>(launch, whole_sums(launch));
}

}  // namespace flowtt::cuda
