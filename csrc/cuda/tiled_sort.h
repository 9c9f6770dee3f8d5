// The host side of the sort: how lookups are cut into chunks, and its first and last launch.

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Defined in tiled_sort.cu. As in TiledRange.
int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors);

// Chunks of a range of so many lookups, at most.
int32_t max_chunks(const TiledPlan& plan, int64_t lookups);

// The launches that are the same for all tables.
cudaError_t launch_count(const TiledLaunch& launch);
cudaError_t launch_scatter(const TiledLaunch& launch);

}  // namespace flowtt::cuda
