// One tiling's kernels and how they are launched. Each tiling is compiled in a file of its own.

#pragma once

#include "tiled_contract_launch.cuh"
#include "tiled_map_launch.cuh"
#include "tiled_tilings.h"

namespace flowtt::cuda {

// Sorts lookups, and folds them if the plan says so, or maps their ids.
template <typename Packing>
cudaError_t launch_prepare_rows(const TiledLaunch& launch) {
  if (launch.plan.maps_ids()) return launch_id_map<Packing>(launch);
  const cudaError_t error = launch_prepare<Packing>(launch);
  return error == cudaSuccess && launch.plan.folds ? launch_tiled_fold(launch) : error;
}

template <int kRank1, int kRank2, int kQ3>
cudaError_t launch_tiling(const TiledLaunch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (launch.plan.core_type) {
    case ElementType::kFloat32:
      error = launch_prepare_rows<ThreeCorePacking<kRank1, kRank2, kQ3, float>>(launch);
      break;
    case ElementType::kFloat16:
      error = launch_prepare_rows<ThreeCorePacking<kRank1, kRank2, kQ3, __half>>(launch);
      break;
    case ElementType::kBFloat16:
      error = launch_prepare_rows<ThreeCorePacking<kRank1, kRank2, kQ3, __nv_bfloat16>>(launch);
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
