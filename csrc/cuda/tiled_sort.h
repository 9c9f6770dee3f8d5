// The host side of the sort: how lookups are cut into chunks, and its second launch.

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Defined in tiled_sort.cu. As in TiledRange.
int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors);

// Of a range of so many lookups, at most.
int32_t max_chunks(const TiledPlan& plan, int64_t lookups);

// Fills in what the sort needs to know of a feature with three cores: how ids are divided, and the
// order of prefixes.
void set_prefix_order(TiledFeature* feature);

// Orders the partitioned lookups, or folds them.
cudaError_t launch_sort(const TiledLaunch& launch);

}  // namespace flowtt::cuda
