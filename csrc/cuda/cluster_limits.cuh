// What the host asks a device about clusters.

#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>

#include "cluster.cuh"

namespace flowtt::cuda {

// How many clusters of 2^i blocks of a kernel a device runs at the same time.
struct ClusterLimits {
  static constexpr int kSizes = 5;
  static_assert(1 << (kSizes - 1) == kMaxClusterBlocks);
  int clusters[kSizes];
};

// The blocks of that kernel.
struct ClusterBlock {
  int threads;
  int per_multiprocessor;
  size_t shared_bytes;
};

template <auto kernel>
cudaError_t ask_cluster_limits(int device, const ClusterBlock& block, ClusterLimits* limits) {
  int major = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(block.shared_bytes));
  if (error != cudaSuccess) return error;
  *limits = {};
  limits->clusters[0] = block.per_multiprocessor * multiprocessors;
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
    config.blockDim = dim3(static_cast<unsigned>(block.threads));
    config.dynamicSmemBytes = block.shared_bytes;
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
cudaError_t find_cluster_limits(const ClusterBlock& block, ClusterLimits* limits) {
  constexpr int kDevices = 64;
  static std::atomic<bool> is_known[kDevices];
  static ClusterLimits known[kDevices];
  static std::mutex mutex;
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kDevices) return ask_cluster_limits<kernel>(device, block, limits);
  if (!is_known[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex);
    const cudaError_t asked = ask_cluster_limits<kernel>(device, block, &known[device]);
    if (asked != cudaSuccess) return asked;
    is_known[device].store(true, std::memory_order_release);
  }
  *limits = known[device];
  return cudaSuccess;
}

}  // namespace flowtt::cuda
