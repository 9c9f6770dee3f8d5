// The tiled kernels for ranks up to 16 and q3 up to 4.

#include "tiled_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_tiling_16_4(const TiledLaunch& launch) {
  return launch_tiling<16, 16, 4>(launch);
}

}  // namespace flowtt::cuda
