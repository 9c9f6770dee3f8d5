// Which features of a forward call take the tiled kernels, and their launches.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/kernel_params.h"
#include "cuda/tiled_backward.h"
#include "cuda_call.h"

namespace flowtt {

// Looks up the features whose tables have a tiling, and returns the others in ascending order.
//
// FLOWTT_CUDA_FORWARD in the environment chooses: "auto" (the default) leaves small batches to the
// general kernel, "tiled" none, "general" everything. FLOWTT_CUDA_DISABLE switches off mechanisms
// of the tiled kernels, a comma between them: fusion, grouping, folding, sharing, stealing,
// checkpoints. `deterministic`: results are equal, bit by bit, from run to run.
// `order`: null, or becomes what differentiate_tiled_features takes, if one launch takes all
// features; otherwise it is left as it is.
// `packed`: null, or the tables' packed cores (packed_cores.h).
std::vector<int64_t> look_up_tiled_features(const CudaCall& call, const cuda::PooledOutput& output,
                                            bool allow_tf32, bool deterministic, Tensor* order,
                                            const Tensor* packed);

// Where the gradients of core k of a table are added up, and its slices that were looked up.
using FindGradient = std::function<std::pair<float*, uint8_t*>(int32_t table, int k)>;

// Adds the core gradients of the features that have a fast path, and returns the others. If any has
// one, `start` is done. `order`: of a forward pass of the same lookups, or empty.
std::vector<int64_t> differentiate_tiled_features(const CudaCall& call,
                                                  const StridedMatrix& grad_output,
                                                  const FindGradient& find_gradient,
                                                  const cuda::BackwardStart& start, bool allow_tf32,
                                                  const Tensor* order);

}  // namespace flowtt
