// The wide kernels for ranks up to 96.

#include "wide_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_wide_96(const TiledLaunch& launch) { return launch_wide<3>(launch); }

}  // namespace flowtt::cuda
