// The wide kernels for ranks up to 64.

#include "wide_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_wide_64(const TiledLaunch& launch) { return launch_wide<2>(launch); }

}  // namespace flowtt::cuda
