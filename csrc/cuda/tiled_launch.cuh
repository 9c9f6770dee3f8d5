// One tiling's kernels and how they are launched. Each tiling is compiled in a file of its own.

#pragma once

#include "tiled_contract_launch.cuh"
#include "tiled_group_launch.cuh"
#include "tiled_prepare_launch.cuh"
#include "tiled_tilings.h"

namespace flowtt::cuda {

// Lookups of bags of several are grouped and folded, others are sorted.
template <typename Packing>
cudaError_t prepare_lookups(const TiledLaunch& launch) {
  return launch.plan.folds ? launch_grouping<Packing>(launch) : launch_prepare<Packing>(launch);
}

template <int kRank1, int kRank2, int kQ3>
cudaError_t launch_tiling(const TiledLaunch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (launch.plan.core_type) {
    case ElementType::kFloat32:
      error = prepare_lookups<ThreeCorePacking<kRank1, kRank2, kQ3, float>>(launch);
      break;
    case ElementType::kFloat16:
      error = prepare_lookups<ThreeCorePacking<kRank1, kRank2, kQ3, __half>>(launch);
      break;
    case ElementType::kBFloat16:
      error = prepare_lookups<ThreeCorePacking<kRank1, kRank2, kQ3, __nv_bfloat16>>(launch);
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
