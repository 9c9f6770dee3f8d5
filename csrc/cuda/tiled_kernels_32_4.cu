// The tiled kernels for ranks up to 32 and q3 up to 4.

#include "tiled_launch.cuh"

namespace flowtt::cuda {

cudaError_t launch_tiling_32_4(const TiledLaunch& launch) {
  return launch_tiling<32, 32, 4>(launch);
}

}  // namespace flowtt::cuda
