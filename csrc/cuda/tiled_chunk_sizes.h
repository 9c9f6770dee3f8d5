// How the host cuts lookups into the chunks that blocks sort.

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Defined in tiled_sort.cu. As in TiledRange.
int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors);

// Of a launch, at most.
int32_t max_chunks(const TiledLaunch& launch);

// Counts the lookups and finds their places; clears control words and piece_arrivals.
cudaError_t launch_sort(const TiledLaunch& launch);

}  // namespace flowtt::cuda
