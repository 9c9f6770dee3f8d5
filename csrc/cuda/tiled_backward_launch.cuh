// How the second launch of the backward pass is launched.

#pragma once

#include <algorithm>

#include "tiled_backward_kernel.cuh"
#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Shared memory of a block.
template <int kRank>
inline constexpr int kBackwardSharedBytes = sizeof(BackwardShared<kRank, GradientShape::kExact>);
template <int kRank>
inline constexpr int kGroupedSharedBytes = sizeof(BackwardShared<kRank, GradientShape::kGrouped>);

// Whether the library has been built for devices whose warps multiply in groups.
#ifdef FLOWTT_GROUPED_BACKWARD
inline constexpr bool kHasGroupedGradients = true;
#else
inline constexpr bool kHasGroupedGradients = false;
#endif

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
cudaError_t launch_gradients(const BackwardPlan& plan, const TiledLaunch& launch,
                             const BackwardPass& pass) {
  const auto kernel = tiled_backward_kernel<core_t, kRank, kThreeProducts, kShape>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(BackwardShared<kRank, kShape>));
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(
      launch.lookups() * plan.tables.blocks,
      int64_t{kBackwardBlocks<kRank, kThreeProducts, kShape>} * plan.sort.multiprocessors);
  return launch_kernel(kernel, blocks, kBackwardThreads, sizeof(BackwardShared<kRank, kShape>),
                       plan.sort.dependent_launch, launch.stream, launch.plan.group, pass);
}

// With a plan.shape whose warps multiply in groups, from a file that is compiled for sm_90a.
cudaError_t launch_grouped_gradients(const BackwardPlan& plan, const TiledLaunch& launch,
                                     const BackwardPass& pass);

}  // namespace flowtt::cuda
