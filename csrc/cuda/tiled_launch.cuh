// One tiling's kernels and how they are launched. Each tiling is compiled in a file of its own.

#pragma once

#include <algorithm>

#include "tiled_contract.cuh"
#include "tiled_prepare_launch.cuh"

namespace flowtt::cuda {

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact>
cudaError_t launch_contract(const TiledLaunch& launch) {
  // What the registers allow: a slice of core 2 takes 64 of a thread's for ranks of 32, 16 for
  // ranks of 16, and twice as many in two parts.
  constexpr int kWarps = kThreeProducts && kRank1 > 16 ? 8 : 16;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return cudaSuccess;
  // Fewer lookups a warp than a tile holds would leave tiles unfilled.
  const int64_t blocks = std::min<int64_t>(
      launch.plan.multiprocessors, (lookups + kWarps * kTileLookups - 1) / (kWarps * kTileLookups));
  constexpr auto kernel =
      tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kWarps>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts>;
  const size_t shared_bytes = kWarps * (kTileLookups * Chain::kPaddedRow * sizeof(float) +
                                        (32 + kTileLookups) * sizeof(PlannedLookup));
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, kWarps * 32, shared_bytes, launch.plan.dependent_launch, 1,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output);
}

template <int kRank1, int kRank2, int kQ3>
cudaError_t launch_tiling(const TiledLaunch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (launch.plan.core_type) {
    case ElementType::kFloat32:
      error = launch_prepare<ThreeCorePacking<kRank1, kRank2, kQ3, float>>(launch);
      break;
    case ElementType::kFloat16:
      error = launch_prepare<ThreeCorePacking<kRank1, kRank2, kQ3, __half>>(launch);
      break;
    case ElementType::kBFloat16:
      error = launch_prepare<ThreeCorePacking<kRank1, kRank2, kQ3, __nv_bfloat16>>(launch);
      break;
    default:
      break;
  }
  if (error != cudaSuccess) return error;
  if (launch.plan.three_products) {
    return launch.plan.tiling.exact ? launch_contract<kRank1, kRank2, kQ3, true, true>(launch)
                                    : launch_contract<kRank1, kRank2, kQ3, true, false>(launch);
  }
  return launch.plan.tiling.exact ? launch_contract<kRank1, kRank2, kQ3, false, true>(launch)
                                  : launch_contract<kRank1, kRank2, kQ3, false, false>(launch);
}

}  // namespace flowtt::cuda
