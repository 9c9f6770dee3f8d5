// Launch of the folding kernel.

#include "tiled_folding.cuh"
#include "tiled_kernel_launch.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

cudaError_t launch_tiled_fold(const TiledLaunch& launch) {
  const int64_t lookups = launch.lookups();
  if (lookups == 0) return cudaSuccess;
  // A feature's last chunk may be short.
  const int64_t blocks = (lookups - 1) / kFoldThreads + 1 + launch.plan.group.count - 1;
  const cudaError_t error = share_memory_split(tiled_fold_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_fold_kernel, blocks, kFoldThreads, 0, launch.plan.dependent_launch,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, whole_sums(launch), !launch.plan.three_products);
}

}  // namespace flowtt::cuda
