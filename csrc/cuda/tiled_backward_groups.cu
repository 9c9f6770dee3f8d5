// The backward kernel whose warps multiply in groups of four, which only sm_90a has.

#include "tiled_backward_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_grouped_gradients(const BackwardPlan& plan, const TiledLaunch& launch,
                                     const BackwardPass& pass) {
#ifdef FLOWTT_GROUPED_BACKWARD
  return plan.shape == GradientShape::kGrouped
             ? launch_gradients<float, 32, false, GradientShape::kGrouped>(plan, launch, pass)
             : launch_gradients<float, 32, false, GradientShape::kGroupedBlocks>(plan, launch,
                                                                                 pass);
#else
  return cudaErrorInvalidValue;
#endif
}

}  // namespace flowtt::cuda
