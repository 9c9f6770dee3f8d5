// The wide kernels for ranks up to 128.

#include "wide_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_wide_128(const TiledLaunch& launch) { return launch_wide<4>(launch); }

}  // namespace flowtt::cuda
