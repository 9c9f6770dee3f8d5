// How the preparation is launched: what needs zeros is cleared, lookups are counted while cores are
// packed, and lookups are written to their places.

#pragma once

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

// Defined in tiled_sort.cu.
int32_t choose_chunk_shift(const TiledLaunch& launch);
int32_t count_sorting_blocks(const TiledLaunch& launch);
cudaError_t launch_clear(const TiledLaunch& launch);
cudaError_t launch_scatter(const TiledLaunch& launch);

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& call) {
  TiledRange range = call.range;
  range.chunk_shift = choose_chunk_shift(call);
  const TiledLaunch launch{call.plan,        call.batch,     range,
                           call.workspace,   call.output,    call.packs_cores,
                           call.clears_sums, call.ends_sums, call.stream};
  cudaError_t error = launch_clear(launch);
  if (error != cudaSuccess) return error;
  const int32_t counting = count_sorting_blocks(launch);
  const int32_t pieces = launch.packs_cores ? launch.plan.group.pack_blocks : 0;
  // As many packing blocks as fit beside those that count.
  const int32_t multiprocessors = launch.plan.multiprocessors;
  const int32_t packing =
      std::min(pieces, std::max(kPrepareBlocksPerMultiprocessor * multiprocessors - counting,
                                (multiprocessors + 1) / 2));
  if (counting + packing > 0) {
    error = launch_kernel(tiled_prepare_kernel<Packing>, counting + packing, kPrepareThreads, 0,
                          launch.plan.dependent_launch, launch.stream, launch.plan.group,
                          launch.batch, range, launch.workspace, counting, pieces);
    if (error != cudaSuccess) return error;
  }
  return launch_scatter(launch);
}

}  // namespace flowtt::cuda
