// What the launches of the tiled path have in common.

#pragma once

#include "tiled_forward.h"

namespace flowtt::cuda {

// One range of lookups and samples of a call.
struct TiledLaunch {
  const TiledPlan& plan;
  const BagBatch& batch;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  bool packs_cores;  // in the first launch of a call
  bool clears_sums;  // in the first range of lookups that may add to them
  bool ends_sums;    // in the last one
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads,
                          size_t shared_bytes, bool dependent, int cluster, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchAttribute attributes[3] = {};
  int count = 0;
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
    // One block of a cluster a multiprocessor, as long as there are enough.
    attributes[count].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[count++].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace flowtt::cuda
