// How a map of ids takes the place of the sort.

#pragma once

#include "tiled_map.h"
#include "tiled_map_marks.cuh"
#include "tiled_prepare_launch.cuh"

namespace flowtt::cuda {

template <typename Packing>
cudaError_t launch_id_map(const TiledLaunch& launch) {
  cudaError_t error = launch_map_clear(launch);
  const int32_t chunks = max_chunks(launch.plan, launch.lookups());
  const SideWork work = plan_side_work(launch, whole_sums(launch), chunks);
  const auto kernel = tiled_map_mark_kernel<Packing>;
  if (error == cudaSuccess) error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  error = launch_kernel(kernel, chunks + work.blocks(), kPrepareThreads, 0,
                        launch.plan.dependent_launch, launch.stream, launch.plan.group,
                        launch.batch, launch.range, launch.workspace, launch.output, work, chunks);
  return error == cudaSuccess ? launch_map_rows(launch) : error;
}

}  // namespace flowtt::cuda
