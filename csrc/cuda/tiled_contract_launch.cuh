// Host side of the contraction: its kernels and their launch.

#pragma once

#include <algorithm>

#include "tiled_contract.cuh"
#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// What is fastest of what the registers allow: warps of a block, and how many of the four b of a
// slice of core 2 each warp holds.
template <int kRank, bool kThreeProducts>
struct ContractShape {
  static constexpr int kWarps = kRank == 32 ? 16 : kThreeProducts ? 20 : 24;
  static constexpr int kHeld = kThreeProducts ? 0 : 4;
};

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused>
cudaError_t launch_contract_kernel(const TiledLaunch& launch) {
  using Shape = ContractShape<kRank1, kThreeProducts>;
  constexpr int kWarps = Shape::kWarps;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  constexpr int64_t kFewest = 8;  // lookups that are worth a block
  const int64_t blocks = std::min<int64_t>(
      {launch.plan.multiprocessors, kMaxQueues, (lookups + kFewest - 1) / kFewest});
  constexpr auto kernel = tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused,
                                                Shape::kHeld, kWarps>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, Shape::kHeld>;
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
