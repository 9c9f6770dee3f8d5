// The tiled kernels for ranks up to 32 and q3 up to 8.

#include "tiled_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_tiling_32_8(const TiledLaunch& launch) {
  return launch_tiling<32, 32, 8>(launch);
}

}  // namespace flowtt::cuda
