// The tiled kernels for ranks up to 16 and q3 up to 8.

#include "tiled_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_tiling_16_8(const TiledLaunch& launch) {
  return launch_tiling<16, 16, 8>(launch);
}

}  // namespace flowtt::cuda
