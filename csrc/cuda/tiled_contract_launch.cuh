// How the contraction is launched.

#pragma once

#include <algorithm>

#include "tiled_contract.cuh"
#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

#ifndef WARPS
#define WARPS 16
#endif
#ifndef WARPS3
#define WARPS3 16
#endif
#ifndef HELD
#define HELD 4
#endif
#ifndef HELD3
#define HELD3 0
#endif
template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused>
cudaError_t launch_contract_kernel(const TiledLaunch& launch) {
  constexpr int kWarps = kThreeProducts ? WARPS3 : WARPS;
  constexpr int kHeld = kThreeProducts ? HELD3 : HELD;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  constexpr int64_t kFewest = 8;  // lookups that are worth a block
  const int64_t blocks = std::min<int64_t>(
      {launch.plan.multiprocessors, kMaxQueues, (lookups + kFewest - 1) / kFewest});
  constexpr auto kernel =
      tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused, kHeld, kWarps>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  constexpr size_t kSharedBytes = kWarps * sizeof(WarpStorage<Chain, kFused>);
  static_assert(kWarps * Chain::kTile <= kScratchBytesPerMultiprocessor);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, kWarps * 32, kSharedBytes, launch.plan.dependent_launch, 1,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output);
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact>
cudaError_t launch_contract(const TiledLaunch& launch) {
  if (launch.range.end_lookup == launch.range.first_lookup) return cudaSuccess;
  if ((launch.range.disabled & kFusionDisabled) != 0) {
    return launch_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, false>(launch);
  }
  return launch_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, true>(launch);
}

}  // namespace flowtt::cuda
