// The wide kernels for ranks up to 32.

#include "wide_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_wide_32(const TiledLaunch& launch) { return launch_wide<1>(launch); }

}  // namespace flowtt::cuda
