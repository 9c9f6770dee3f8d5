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
template <auto kernel>
cudaError_t find_max_cluster(size_t shared_bytes, int* blocks) {
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

// Blocks of a cluster, and clusters a run.
struct SortingShape {
  int cluster;
  int parts;
};

// Small clusters for small features; the more SMs the fewer features there are.
inline SortingShape choose_sorting(int64_t lookups, int64_t features, int max_cluster,
                                   int64_t multiprocessors) {
  constexpr int64_t kLookupsPerBlock = 1024;
  const int64_t average = (lookups + features - 1) / features;
  SortingShape shape{1, 1};
  while (shape.cluster < max_cluster && average > shape.cluster * kLookupsPerBlock) {
    shape.cluster *= 2;
  }
  while (shape.cluster > 1 && shape.cluster * features > multiprocessors &&
         average <= int64_t{shape.cluster} / 2 * kMaxChunk) {
    shape.cluster /= 2;
  }
  const int64_t run = int64_t{shape.cluster} * kMaxChunk;
  const int64_t clusters = (average + run - 1) / run * features;
  while (shape.parts < kMaxBinParts &&
         2 * shape.parts * shape.cluster * clusters <= multiprocessors &&
         average > 2 * shape.parts * shape.cluster * int64_t{kPrepareThreads} / 2) {
    shape.parts *= 2;
  }
  return shape;
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  constexpr auto kernel = tiled_prepare_kernel<Packing>;
  constexpr size_t kSharedBytes = sizeof(PrepareScratch<Packing>);
  int max_cluster = 1;
  const cudaError_t error = find_max_cluster<kernel>(kSharedBytes, &max_cluster);
  if (error != cudaSuccess) return error;
  const TiledGroup& group = launch.plan.group;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  const SortingShape shape =
      choose_sorting(lookups, launch.batch.num_features, max_cluster, launch.plan.multiprocessors);
  const int cluster = shape.cluster;
  TiledRange range = launch.range;
  range.run_lookups = cluster * kMaxChunk;
  const int64_t runs =
      lookups == 0 ? 0 : (lookups + range.run_lookups - 1) / range.run_lookups + group.count - 1;

  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kPrepareThreads);
  PrepareBlocks blocks{};
  blocks.sorting = static_cast<int32_t>(runs * shape.parts * cluster);
  while (1 << blocks.parts_shift < shape.parts) ++blocks.parts_shift;
  blocks.clearing_pieces =
      static_cast<int32_t>(group.count * ((samples + bags_per_piece - 1) / bags_per_piece));
  blocks.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  blocks.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  blocks.clears_sums = launch.clears_sums;
  const int64_t pieces = int64_t{blocks.clearing_pieces} + blocks.packing_pieces;
  // Most sorting blocks of a call with several features have nothing to sort and leave at once, so
  // the others may count on half of the device whatever the number of sorting blocks.
  const int64_t free_blocks = std::max<int64_t>(
      kPrepareBlocksPerMultiprocessor * launch.plan.multiprocessors - blocks.sorting,
      launch.plan.multiprocessors);
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
