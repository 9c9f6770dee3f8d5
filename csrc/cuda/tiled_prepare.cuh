// The second launch of the preparation: where the bins of each chunk start.

#pragma once

#include "tiled_starts.cuh"

namespace flowtt::cuda {

constexpr int kPrepareBlocksPerMultiprocessor = 2;

// A block finds starts for kSummedBins bins of a feature.
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace) {
  __shared__ StartsScratch scratch;
  allow_dependent_launch();
  find_starts(scratch, group, batch, range, workspace, static_cast<int32_t>(blockIdx.x));
}

}  // namespace flowtt::cuda
