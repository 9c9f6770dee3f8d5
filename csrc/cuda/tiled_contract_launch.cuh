// How the contraction is launched.

#pragma once

#include <algorithm>

#include "tiled_contract.cuh"

namespace flowtt::cuda {

struct ContractLaunch {
  const TiledGroup& group;
  const BagBatch& batch;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  int32_t multiprocessors;
  bool dependent_launch;  // the device has programmatic dependent launch
  cudaStream_t stream;
};

#ifndef WARPS
#define WARPS 16
#endif
template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact>
cudaError_t launch_contract(const ContractLaunch& launch) {
  constexpr int kWarps = WARPS;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return cudaSuccess;
  constexpr int64_t kFewest = 8;  // lookups that are worth a block
  const int64_t blocks = std::min<int64_t>({launch.multiprocessors, kMaxQueues,
                                            (lookups + kFewest - 1) / kFewest});
  constexpr auto kernel =
      tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, true, kWarps>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts>;
  constexpr size_t kSharedBytes = kWarps * sizeof(WarpStorage<Chain>);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kWarps * 32);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = launch.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = launch.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, launch.group, launch.batch, launch.range,
                            launch.workspace, launch.output);
}

}  // namespace flowtt::cuda
