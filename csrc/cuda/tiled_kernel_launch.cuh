// What the launches of the tiled path have in common.

#pragma once

#include "dependent_launch.cuh"
#include "tiled_forward.h"

namespace flowtt::cuda {

// One range of lookups and samples of a call. A range without samples only packs cores.
struct TiledLaunch {
  const TiledPlan& plan;
  const BagBatch& batch;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  bool packs_cores;  // in the first launch of a call, unless they are kept
  bool clears_sums;  // in the first range of lookups that may add to them
  bool ends_sums;    // in the last one
  cudaStream_t stream;

  int64_t lookups() const { return range.end_lookup - range.first_lookup; }
  int64_t samples() const { return range.end_sample - range.first_sample; }
};

// Shared memory that a multiprocessor sets aside, as a part of what it has: about what the
// contraction makes of it. Where kernels that follow one another ask for different parts, the next
// cannot start on a multiprocessor before the last has left it.
inline constexpr int kSharedMemoryPercent = 44;

template <typename Kernel>
cudaError_t share_memory_split(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              kSharedMemoryPercent);
}

}  // namespace flowtt::cuda
