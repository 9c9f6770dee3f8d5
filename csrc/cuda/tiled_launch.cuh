// One tiling's kernels and how they are launched. Each tiling is compiled in a file of its own.

#pragma once

#include <algorithm>

#include "tiled_contract.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

struct TiledLaunch {
  const TiledPlan& plan;
  const BagBatch& batch;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  bool packs_cores;  // in the first launch of a call
  int32_t multiprocessors;
  bool dependent_launch;  // the device has programmatic dependent launch
  cudaStream_t stream;
};

constexpr int64_t kClearingBlocks = 128;

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads,
                          size_t shared_bytes, bool dependent, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <int kRank1, int kRank2, int kQ3, int kItems, typename core_t>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  const int64_t samples = launch.range.end_sample - launch.range.first_sample;
  // Rows are cleared by the first range of lookups that may add to them.
  const bool clears = launch.range.first_lookup == 0;
  const int64_t bags_per_block = std::clamp<int64_t>(
      samples * launch.plan.group.count / kClearingBlocks / kPrepareWarps * kPrepareWarps,
      kPrepareWarps, kPrepareThreads);
  const PrepareBlocks blocks{
      launch.range.max_chunks,
      clears ? static_cast<int32_t>(launch.plan.group.count *
                                    ((samples + bags_per_block - 1) / bags_per_block))
             : 0,
      static_cast<int32_t>(bags_per_block)};
  const int64_t packing = launch.packs_cores ? launch.plan.group.pack_blocks : 0;
  const int64_t total = blocks.grouping + blocks.clearing + packing;
  if (total == 0) return cudaSuccess;
  return launch_kernel(tiled_prepare_kernel<kRank1, kRank2, kQ3, kItems, core_t>, total,
                       kPrepareThreads, 0, false, launch.stream, launch.plan.group, launch.batch,
                       launch.range, launch.workspace, launch.output, blocks);
}

template <int kRank1, int kRank2, int kQ3, typename core_t>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  return launch.range.chunk_lookups <= kSmallChunk
             ? launch_prepare<kRank1, kRank2, kQ3, kSmallChunk / kPrepareThreads, core_t>(launch)
             : launch_prepare<kRank1, kRank2, kQ3, kLargeChunk / kPrepareThreads, core_t>(launch);
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact>
cudaError_t launch_contract(const TiledLaunch& launch) {
  // What the registers allow: a slice of core 2 takes 64 of a thread's for ranks of 32, 16 for
  // ranks of 16, and twice as many in two parts.
  constexpr int kWarps = kThreeProducts && kRank1 > 16 ? 8 : 16;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return cudaSuccess;
  // Fewer lookups a warp than a tile holds would leave tiles unfilled.
  const int64_t blocks = std::min<int64_t>(
      launch.multiprocessors, (lookups + kWarps * kTileLookups - 1) / (kWarps * kTileLookups));
  constexpr auto kernel =
      tiled_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact, kWarps>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts>;
  const size_t shared_bytes = kWarps * (kTileLookups * Chain::kPaddedRow * sizeof(float) +
                                        (32 + kTileLookups) * sizeof(PlannedLookup)) +
                              launch.range.starts_stride * sizeof(int32_t);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, kWarps * 32, shared_bytes, launch.dependent_launch,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, launch.output);
}

template <int kRank1, int kRank2, int kQ3>
cudaError_t launch_tiling(const TiledLaunch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  switch (launch.plan.core_type) {
    case ElementType::kFloat32:
      error = launch_prepare<kRank1, kRank2, kQ3, float>(launch);
      break;
    case ElementType::kFloat16:
      error = launch_prepare<kRank1, kRank2, kQ3, __half>(launch);
      break;
    case ElementType::kBFloat16:
      error = launch_prepare<kRank1, kRank2, kQ3, __nv_bfloat16>(launch);
      break;
    default:
      break;
  }
  if (error != cudaSuccess) return error;
  if (launch.plan.three_products) {
    return launch.plan.tiling.exact ? launch_contract<kRank1, kRank2, kQ3, true, true>(launch)
                                    : launch_contract<kRank1, kRank2, kQ3, true, false>(launch);
  }
  return launch.plan.tiling.exact ? launch_contract<kRank1, kRank2, kQ3, false, true>(launch)
                                  : launch_contract<kRank1, kRank2, kQ3, false, false>(launch);
}

}  // namespace flowtt::cuda
