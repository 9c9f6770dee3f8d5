// Host side of the contraction: its kernels and their launch.

#pragma once

#include <algorithm>

#include "device_attributes.h"
#include "tiled_contract.cuh"
#include "tiled_pooled_contract.cuh"
#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// What the kernel has besides the storage of its warps, rounded up.
inline constexpr int kStaticSharedBytes = 2048;

// What is fastest of what the registers allow: warps of a block, and how many of the four b of a
// slice of core 2 each warp holds.
template <int kRank, bool kThreeProducts>
struct ContractShape {
  static constexpr int kWarps = kRank == 32 ? 16 : kThreeProducts ? 20 : 24;
  static constexpr int kHeld = kThreeProducts ? 0 : 4;
};

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused,
          bool kPooled>
cudaError_t launch_contract_kernel(const TiledLaunch& launch) {
  using Shape = ContractShape<kRank1, kThreeProducts>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, Shape::kHeld>;
  constexpr auto kernel = [] {
    if constexpr (kPooled) {
      return tiled_pooled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused,
                                          Shape::kHeld, Shape::kWarps>;
    } else {
      return tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused,
                                   Shape::kHeld, Shape::kWarps>;
    }
  }();
  static_assert(Shape::kWarps * Chain::kTile <= kScratchBytesPerMultiprocessor);
  int shared_limit = 0;
  cudaError_t error = read_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_limit);
  if (error != cudaSuccess) return error;
  constexpr int kWarpBytes = sizeof(WarpStorage<Chain, kFused>);
  const int index_bytes =
      kPooled ? bin_starts_bytes(launch.plan.group.count, launch.range.bins) : 0;
  const int warps =
      std::min(Shape::kWarps, (shared_limit - kStaticSharedBytes - index_bytes) / kWarpBytes);
  const int shared_bytes = warps * kWarpBytes + index_bytes;
  const int64_t lookups = launch.lookups();
  const int64_t blocks = std::min<int64_t>(
      {launch.plan.multiprocessors, kMaxQueues, (lookups + kMinWindow - 1) / kMinWindow});
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, warps * 32, shared_bytes, launch.plan.dependent_launch,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output);
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact>
cudaError_t launch_contract(const TiledLaunch& launch) {
  if (launch.range.end_lookup == launch.range.first_lookup) return cudaSuccess;
  const bool fused = (launch.range.disabled & kFusionDisabled) == 0;
  const auto launch_fused = [&]<bool kFused>() {
    return launch.plan.folds
               ? launch_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused, true>(
                     launch)
               : launch_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kFused, false>(
                     launch);
  };
  return fused ? launch_fused.template operator()<true>()
               : launch_fused.template operator()<false>();
}

}  // namespace flowtt::cuda
