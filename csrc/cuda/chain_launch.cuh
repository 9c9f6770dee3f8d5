// Launching a chain kernel as plan_chain (chain_plan.cu) laid it out.

#pragma once

#include <cuda_runtime.h>

#include "launchers.h"

namespace flowtt::cuda {

constexpr size_t kSharedBytesWithoutRequest = 48 << 10;

// kernel(args..., ChainScratch).
template <typename... Params, typename... Args>
cudaError_t launch_chain_kernel(void (*kernel)(Params...), const ChainPlan& plan,
                                void* global_scratch, cudaStream_t stream, const Args&... args) {
  // Above 48 KB a kernel gets dynamic shared memory only on request. The attribute belongs to the
  // kernel on the current device; setting it again costs little and needs no state to be kept.
  if (plan.shared_bytes > kSharedBytesWithoutRequest) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(plan.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  const ChainScratch scratch{global_scratch, plan.elements_per_block, plan.row_elements};
  const dim3 grid(plan.blocks_per_feature, plan.features);
  kernel<<<grid, plan.block_threads, plan.shared_bytes, stream>>>(args..., scratch);
  return cudaGetLastError();
}

}  // namespace flowtt::cuda
