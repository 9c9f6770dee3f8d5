// How lookups are grouped and cores packed: two launches.

#pragma once

#include <algorithm>

#include "tiled_group.h"
#include "tiled_grouping.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

template <typename Packing>
cudaError_t launch_grouping(const TiledLaunch& launch) {
  cudaError_t error = launch_clear(launch);
  if (error != cudaSuccess) return error;
  const TiledPlan& plan = launch.plan;
  const ClearedVectors cleared = whole_sums(launch);
  const ClearingPieces pieces = clearing_pieces(launch, cleared);
  const int32_t grouping = max_chunks(plan, launch.lookups());
  const int32_t packing_pieces = launch.packs_cores ? plan.group.pack_blocks : 0;
  // As many other blocks as fit beside those that group.
  const int32_t multiprocessors = plan.multiprocessors;
  const int32_t others = std::max(2 * multiprocessors - grouping, multiprocessors);
  const int32_t packing = std::min(packing_pieces, others);
  const int32_t clearing =
      std::min(pieces.count, std::max(others - packing, (multiprocessors + 1) / 2));
  const auto kernel = tiled_group_kernel<Packing>;
  const size_t shared_bytes =
      std::max(GroupArrays::bytes(launch.range.bins, 1 << launch.range.chunk_shift),
               sizeof(typename Packing::Scratch));
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error == cudaSuccess) error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, grouping + packing + clearing, kPrepareThreads, shared_bytes,
                       plan.dependent_launch, launch.stream, plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output, pieces, cleared, grouping, packing,
                       packing_pieces);
}

}  // namespace flowtt::cuda
