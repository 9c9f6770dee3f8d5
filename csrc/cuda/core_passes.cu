// What happens to the accumulated core gradients after the backward kernel, if no optimizer steps:
// a cast into the gradient tensors. blockIdx.y is the core, blocks of a core stride over its
// elements.

#include <algorithm>

#include "chain.cuh"
#include "launchers.h"

namespace flowtt::cuda {
namespace {

constexpr int kCastThreads = 256;
constexpr int64_t kMaxBlocksPerCore = 1024;

template <typename core_t>
__global__ void __launch_bounds__(kCastThreads)
    cast_core_gradients_kernel(const __grid_constant__ CoreGroup group) {
  using acc_t = accumulator_t<core_t>;
  const CoreTask& task = group.tasks[blockIdx.y];
  const int64_t numel = task.num_slices * task.slice_numel;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < numel;
       e += stride) {
    static_cast<core_t*>(task.values)[e] =
        from_accumulator<core_t>(static_cast<const acc_t*>(task.gradient)[e]);
  }
}

}  // namespace

cudaError_t launch_cast_core_gradients(ElementType core_type, const CoreGroup& group,
                                       cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  int64_t blocks = 1;
  for (int i = 0; i < group.count; ++i) {
    const int64_t numel = group.tasks[i].num_slices * group.tasks[i].slice_numel;
    blocks = std::max(blocks, (numel + kCastThreads - 1) / kCastThreads);
  }
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMaxBlocksPerCore)),
                  static_cast<unsigned>(group.count));
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    cast_core_gradients_kernel<core_t><<<grid, kCastThreads, 0, stream>>>(group);
    return cudaGetLastError();
  });
}

}  // namespace flowtt::cuda
