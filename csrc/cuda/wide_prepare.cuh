// The preparation of the wide and two-core kernels.

#pragma once

#include "tiled_prepare_launch.cuh"
#include "wide_packing.cuh"
#include "wide_tilings.h"

namespace flowtt::cuda {

template <bool kTwoCores>
cudaError_t launch_wide_prepare(const TiledLaunch& launch) {
  switch (launch.plan.core_type) {
    case ElementType::kFloat32:
      return launch_prepare<WidePacking<kTwoCores, float>>(launch);
    case ElementType::kFloat16:
      return launch_prepare<WidePacking<kTwoCores, __half>>(launch);
    case ElementType::kBFloat16:
      return launch_prepare<WidePacking<kTwoCores, __nv_bfloat16>>(launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flowtt::cuda
