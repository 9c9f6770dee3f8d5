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
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return cudaSuccess;
  constexpr int64_t kMinPerWarp = 4;  // fewer lookups would not fill a group
  const int64_t blocks =
      std::min<int64_t>(static_cast<int64_t>(launch.plan.multiprocessors) * Products::kBlocks,
                        (lookups + Products::kWarps * kMinPerWarp - 1) / (Products::kWarps * kMinPerWarp));
  return launch_kernel(two_core_kernel<kSteps, kTiles, kThree>, blocks, Products::kWarps * 32, 0,
                       launch.plan.dependent_launch, 1, launch.stream, launch.plan.group, launch.batch,
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
  int32_t steps = 1;
  int32_t tiles = 1;
  for (int32_t f = 0; f < arguments.plan.group.count; ++f) {
    const TwoCoreShape shape(arguments.plan.group.features[f]);
    steps = std::max(steps, shape.steps);
    tiles = std::max(tiles, shape.right_tiles);
  }
  if (steps == 1) return tiles == 1 ? launch<1, 1>(arguments) : launch<1, 2>(arguments);
  return tiles == 1 ? launch<4, 1>(arguments) : launch<4, 2>(arguments);
}

}  // namespace flowtt::cuda
