// How the wide kernels are launched. Each depth of the ranks is compiled in a file of its own.

#pragma once

#include <algorithm>

#include "device_attributes.h"
#include "tiled_kernel_launch.cuh"
#include "wide_contract.cuh"
#include "wide_tilings.h"

namespace flowtt::cuda {

// The last tile of stacked rows may read past the slices of core 1.
constexpr int32_t kArenaSlack = 4096;

template <int kSteps, bool kThree>
cudaError_t launch_wide_contract(const TiledLaunch& launch) {
  constexpr int kBlocks = WideProducts<kSteps, kThree>::kBlocks;
  constexpr auto kernel = wide_contract_kernel<kSteps, kThree>;
  const int64_t lookups = launch.lookups();
  if (lookups == 0) return cudaSuccess;
  int block_bytes = 0;
  int multiprocessor_bytes = 0;
  int reserved_bytes = 0;
  cudaError_t error = read_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &block_bytes);
  if (error == cudaSuccess) {
    error = read_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, &multiprocessor_bytes);
  }
  if (error == cudaSuccess) {
    error = read_attribute(cudaDevAttrReservedSharedMemoryPerBlock, &reserved_bytes);
  }
  if (error != cudaSuccess) return error;
  const int32_t available = std::min(block_bytes, multiprocessor_bytes / kBlocks - reserved_bytes) -
                            kWideSharedBytes - kArenaSlack;
  // No more than any feature has a use for: the rest stays with the L1 cache.
  int32_t arena_bytes = 0;
  for (int32_t f = 0; f < launch.plan.group.count; ++f) {
    const WideShape shape(launch.plan.group.features[f]);
    const int32_t prefixes = std::min(kMaxTilePrefixes, kMaxStackedRows >> shape.q1_shift);
    arena_bytes = std::max(arena_bytes, prefixes * shape.prefix_bytes(kThree ? 2 : 1));
  }
  arena_bytes = std::min(arena_bytes, available / 128 * 128);
  const size_t dynamic_bytes = static_cast<size_t>(kWideSharedBytes + arena_bytes + kArenaSlack);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(dynamic_bytes));
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(
      std::min<int64_t>(int64_t{kBlocks} * launch.plan.multiprocessors, kQueueWords),
      (lookups + kGranule - 1) / kGranule);
  return launch_kernel(kernel, blocks, kWideWarps * 32, dynamic_bytes, launch.plan.dependent_launch,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output, arena_bytes);
}

template <int kSteps>
cudaError_t launch_wide(const TiledLaunch& launch) {
  cudaError_t error = launch_suffix_pairs(launch);
  if (error == cudaSuccess) error = launch_wide_prepare<false>(launch);
  if (error != cudaSuccess) return error;
  return launch.plan.three_products ? launch_wide_contract<kSteps, true>(launch)
                                    : launch_wide_contract<kSteps, false>(launch);
}

}  // namespace flowtt::cuda
