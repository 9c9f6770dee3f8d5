// The preparation of tables for the wide kernels.

#include "wide_prepare.cuh"

namespace flowtt::cuda {

template cudaError_t launch_wide_prepare<false>(const TiledLaunch& launch);

}  // namespace flowtt::cuda
