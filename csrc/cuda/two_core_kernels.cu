// The kernels for tables of two cores: ranks up to 128, q1 up to 64, q2 up to 32.

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "two_core_contract.cuh"
#include "wide_tilings.h"

namespace flowtt::cuda {
namespace {

template <int kSteps, int kTiles, bool kThree>
cudaError_t launch(const TiledLaunch& launch) {
  using Products = TwoCoreProducts<kSteps, kTiles, kThree>;
  const int64_t lookups = launch.lookups();
  if (lookups == 0) return cudaSuccess;
  constexpr int64_t kMinPerWarp = 4;  // fewer lookups would not fill a group
  const int64_t blocks = std::min<int64_t>(
      static_cast<int64_t>(launch.plan.multiprocessors) * Products::kBlocks,
      (lookups + Products::kWarps * kMinPerWarp - 1) / (Products::kWarps * kMinPerWarp));
  return launch_kernel(two_core_kernel<kSteps, kTiles, kThree>, blocks, Products::kWarps * 32, 0,
                       launch.plan.dependent_launch, launch.stream, launch.plan.group, launch.batch,
                       launch.range, launch.workspace, launch.output);
}

template <int kSteps, int kTiles>
cudaError_t launch(const TiledLaunch& arguments) {
  return arguments.plan.three_products ? launch<kSteps, kTiles, true>(arguments)
                                       : launch<kSteps, kTiles, false>(arguments);
}

}  // namespace

cudaError_t launch_two_core(const TiledLaunch& arguments) {
  const cudaError_t error = launch_wide_prepare<true>(arguments);
  if (error != cudaSuccess) return error;
  // All features of a launch have one tiling.
  const Tiling& tiling = arguments.plan.tiling;
  const bool wide = tiling.q3 > 16;
  switch (tiling.rank1) {
    case 32:
      return wide ? launch<1, 2>(arguments) : launch<1, 1>(arguments);
    case 64:
      return wide ? launch<2, 2>(arguments) : launch<2, 1>(arguments);
    default:
      return wide ? launch<4, 2>(arguments) : launch<4, 1>(arguments);
  }
}

}  // namespace flowtt::cuda
