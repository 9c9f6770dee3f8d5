// How the preparation is launched: clusters for the sorting blocks, and as many other blocks as fit
// beside them at the same time.

#pragma once

#include <algorithm>
#include <atomic>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

constexpr int64_t kPrepareBlocksPerMultiprocessor = 2;
constexpr int64_t kMaxClearingPieces = 128;

// The largest cluster of this kernel that the current device runs, found once for each device.
template <typename Kernel>
cudaError_t find_max_cluster(Kernel kernel, size_t shared_bytes, int* blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int> found[kDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kDevices && found[device] != 0) {
    *blocks = found[device];
    return cudaSuccess;
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  int major = 0;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  *blocks = 1;
  if (major >= 9) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
    for (int size = kMaxClusterBlocks; size > 1; size /= 2) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(size);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(size));
      config.blockDim = dim3(kPrepareThreads);
      config.dynamicSmemBytes = shared_bytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess &&
          clusters >= 2) {
        *blocks = size;
        break;
      }
      cudaGetLastError();
    }
  }
  if (device < kDevices) found[device] = *blocks;
  return cudaSuccess;
}

// Blocks a cluster: enough for an average feature, unless all features together would fill more
// than the device.
inline int choose_cluster(int64_t lookups, int64_t features, int max_cluster,
                          int64_t multiprocessors) {
  constexpr int64_t kLookupsPerBlock = 1024;
  const int64_t average = (lookups + features - 1) / features;
  int cluster = 1;
  while (cluster < max_cluster && average > cluster * kLookupsPerBlock) cluster *= 2;
  while (cluster > 1 && cluster * features > multiprocessors &&
         average <= int64_t{cluster} / 2 * kSortedPerBlock) {
    cluster /= 2;
  }
  return cluster;
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  constexpr auto kernel = tiled_prepare_kernel<Packing>;
  constexpr size_t kSharedBytes = sizeof(PrepareScratch<Packing>);
  int max_cluster = 1;
  const cudaError_t error = find_max_cluster(kernel, kSharedBytes, &max_cluster);
  if (error != cudaSuccess) return error;
  const TiledGroup& group = launch.plan.group;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  const int cluster =
      choose_cluster(lookups, launch.batch.num_features, max_cluster, launch.plan.multiprocessors);
  TiledRange range = launch.range;
  range.run_lookups = cluster * kSortedPerBlock;
  const int64_t clusters =
      lookups == 0 ? 0 : (lookups + range.run_lookups - 1) / range.run_lookups + group.count - 1;

  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kPrepareThreads);
  PrepareBlocks blocks{};
  blocks.sorting = static_cast<int32_t>(clusters * cluster);
  blocks.clearing_pieces =
      static_cast<int32_t>(group.count * ((samples + bags_per_piece - 1) / bags_per_piece));
  blocks.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  blocks.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  blocks.clears_sums = launch.clears_sums;
  const int64_t pieces = int64_t{blocks.clearing_pieces} + blocks.packing_pieces;
  const int64_t free_blocks =
      kPrepareBlocksPerMultiprocessor * launch.plan.multiprocessors - blocks.sorting;
  // Whole clusters; at least one, which also clears the control words.
  const int64_t others =
      (std::clamp<int64_t>(pieces, 1, std::max<int64_t>(free_blocks / cluster, 1) * cluster) +
       cluster - 1) /
      cluster * cluster;
  return launch_kernel(kernel, blocks.sorting + others, kPrepareThreads, kSharedBytes,
                       launch.plan.dependent_launch, cluster, launch.stream, group, launch.batch,
                       range, launch.workspace, launch.output, blocks);
}

}  // namespace flowtt::cuda
