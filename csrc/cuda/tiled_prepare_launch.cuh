// How the preparation is launched: clusters for the sorting blocks, and as many other blocks as fit
// beside them at the same time.

#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

constexpr int64_t kMaxClearingPieces = 64;

// How many clusters of 2^i blocks of the preparation a device runs at the same time.
struct ClusterLimits {
  static constexpr int kSizes = 5;
  static_assert(1 << (kSizes - 1) == kMaxClusterBlocks);
  int clusters[kSizes];
};

template <auto kernel>
cudaError_t ask_cluster_limits(int device, size_t shared_bytes, ClusterLimits* limits) {
  int major = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  *limits = {};
  limits->clusters[0] = kPrepareBlocksPerMultiprocessor * multiprocessors;
  if (major < 9) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  for (int i = 1; i < ClusterLimits::kSizes; ++i) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1u << i;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << i);
    config.blockDim = dim3(kPrepareThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&limits->clusters[i], kernel, &config) != cudaSuccess) {
      cudaGetLastError();
      limits->clusters[i] = 0;
    }
  }
  return cudaSuccess;
}

// As asked the first time on each device.
template <auto kernel>
cudaError_t find_cluster_limits(size_t shared_bytes, ClusterLimits* limits) {
  constexpr int kDevices = 64;
  static std::atomic<bool> is_known[kDevices];
  static ClusterLimits known[kDevices];
  static std::mutex mutex;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kDevices) return ask_cluster_limits<kernel>(device, shared_bytes, limits);
  if (!is_known[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const cudaError_t asked = ask_cluster_limits<kernel>(device, shared_bytes, &known[device]);
    if (asked != cudaSuccess) return asked;
    is_known[device].store(true, std::memory_order_release);
  }
  *limits = known[device];
  return cudaSuccess;
}

// Clusters of 2^cluster_shift blocks, 2^parts_shift of them for each run.
struct SortingShape {
  int cluster_shift;
  int parts_shift;
};

// Clusters as large as an average feature needs, smaller ones if there are many features, and as
// many clusters a run as leave room for the blocks that do the rest.
inline SortingShape choose_sorting(int64_t lookups, int64_t features, const ClusterLimits& limits) {
  constexpr int64_t kLookupsPerBlock = 1024;
  constexpr int64_t kTakenPerBlock = 5 * kPrepareThreads / 2;
  const int64_t average = (lookups + features - 1) / features;
  SortingShape shape{0, 0};
  while (shape.cluster_shift + 1 < ClusterLimits::kSizes &&
         limits.clusters[shape.cluster_shift + 1] >= 2 &&
         average > kLookupsPerBlock << shape.cluster_shift) {
    ++shape.cluster_shift;
  }
  // More than two thirds of the places would leave too few for the rest.
  const auto fits = [&](int cluster_shift, int64_t clusters) {
    return 3 * clusters <= 2 * limits.clusters[cluster_shift];
  };
  while (shape.cluster_shift > 0 && !fits(shape.cluster_shift, features) &&
         average <= (kMaxChunk << shape.cluster_shift) / 2) {
    --shape.cluster_shift;
  }
  const int64_t run = kMaxChunk << shape.cluster_shift;
  const int64_t runs = (average + run - 1) / run;
  const int64_t chunk = (average / std::max<int64_t>(runs, 1)) >> shape.cluster_shift;
  while (1 << shape.parts_shift < kMaxBinParts &&
         fits(shape.cluster_shift, runs * features << (shape.parts_shift + 1)) &&
         chunk > kTakenPerBlock << shape.parts_shift) {
    ++shape.parts_shift;
  }
  return shape;
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  constexpr auto kernel = tiled_prepare_kernel<Packing>;
  constexpr size_t kSharedBytes = sizeof(PrepareScratch<Packing>);
  ClusterLimits limits;
  const cudaError_t error = find_cluster_limits<kernel>(kSharedBytes, &limits);
  if (error != cudaSuccess) return error;
  const TiledGroup& group = launch.plan.group;
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  const SortingShape shape = choose_sorting(lookups, launch.batch.num_features, limits);
  TiledRange range = launch.range;
  range.run_lookups = kMaxChunk << shape.cluster_shift;
  const int64_t runs =
      lookups == 0 ? 0 : (lookups + range.run_lookups - 1) / range.run_lookups + group.count - 1;
  const int64_t clusters = runs << shape.parts_shift;

  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kMaxBagsPerPiece);
  PrepareBlocks blocks{};
  blocks.sorting = static_cast<int32_t>(clusters << shape.cluster_shift);
  blocks.parts_shift = shape.parts_shift;
  blocks.pieces_per_feature = static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  blocks.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  blocks.clearing_pieces = group.count * blocks.pieces_per_feature;
  blocks.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  blocks.clears_sums = launch.clears_sums;
  const int64_t pieces = int64_t{blocks.clearing_pieces} + blocks.packing_pieces;
  // As many other clusters as fit beside those that sort. Most clusters of a call with several
  // features have nothing to sort and leave at once: count what an average feature needs. At least
  // one, which also clears the control words.
  const int64_t average = lookups / launch.batch.num_features;
  const int64_t busy = (group.count * (average / range.run_lookups + 1)) << shape.parts_shift;
  const int64_t fitting = limits.clusters[shape.cluster_shift];
  const int64_t free_clusters =
      std::max<int64_t>({fitting - std::min(busy, clusters), fitting / 3, 1});
  const int64_t others =
      std::clamp<int64_t>(((pieces - 1) >> shape.cluster_shift) + 1, 1, free_clusters);
  return launch_kernel(kernel, (clusters + others) << shape.cluster_shift, kPrepareThreads,
                       kSharedBytes, launch.plan.dependent_launch, 1 << shape.cluster_shift,
                       launch.stream, group, launch.batch, range, launch.workspace, launch.output,
                       blocks);
}

}  // namespace flowtt::cuda
