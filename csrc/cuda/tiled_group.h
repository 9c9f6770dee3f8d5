// The host side of grouping: sizes, and the launch ahead of it.

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// As in TiledRange, for lookups that are grouped in one launch.
int32_t choose_group_chunk_shift(const TiledPlan& plan);

// Words of TiledWorkspace::bin_counts.
int64_t bin_counters(const TiledPlan& plan);

// Clears what is counted in.
cudaError_t launch_clear(const TiledLaunch& launch);

}  // namespace flowtt::cuda
