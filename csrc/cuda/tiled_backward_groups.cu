// The backward kernels whose warps multiply in groups of four, which only sm_90a has.

#include "tiled_backward_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_grouped_gradients(const BackwardPlan& plan, const TiledLaunch& launch,
                                     const BackwardPass& pass) {
#ifdef FLOWTT_GROUPED_BACKWARD
  constexpr auto kGrouped = GradientShape::kGrouped;
  constexpr auto kBlocks = GradientShape::kGroupedBlocks;
  return plan.tables.rank == 16   ? launch_gradients<float, 16, false, kGrouped>(plan, launch, pass)
         : plan.shape == kGrouped ? launch_gradients<float, 32, false, kGrouped>(plan, launch, pass)
                                  : launch_gradients<float, 32, false, kBlocks>(plan, launch, pass);
#else
  return cudaErrorInvalidValue;
#endif
}

}  // namespace flowtt::cuda
