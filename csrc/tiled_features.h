// Which features of a forward call take the tiled kernels, and their launches.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernel_params.h"
#include "cuda_call.h"

namespace flowtt {

// Looks up the features whose tables have a tiling, and returns the others in ascending order.
//
// FLOWTT_CUDA_FORWARD in the environment chooses: "auto" (the default) leaves small batches to the
// general kernel, "tiled" none, "general" everything. FLOWTT_CUDA_DISABLE switches off mechanisms
// of the tiled kernels, a comma between them: fusion, grouping, folding, sharing, stealing,
// checkpoints. `deterministic`: results are equal, bit by bit, from run to run.
std::vector<int64_t> look_up_tiled_features(const CudaCall& call, const cuda::PooledOutput& output,
                                            bool allow_tf32, bool deterministic);

}  // namespace flowtt
