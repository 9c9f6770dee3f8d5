// The preparation of tables of two cores.

#include "wide_prepare.cuh"

namespace flowtt::cuda {

template cudaError_t launch_wide_prepare<true>(const TiledLaunch& launch);

}  // namespace flowtt::cuda
