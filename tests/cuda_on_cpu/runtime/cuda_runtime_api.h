// Stands in for the CUDA runtime's header: what the host code of the kernels calls.

#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "grid.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrReservedSharedMemoryPerBlock,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeClusterSchedulingPolicyPreference,
};
enum cudaClusterSchedulingPolicy { cudaClusterSchedulingPolicySpread };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
    cudaClusterSchedulingPolicy clusterSchedulingPolicyPreference;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace cuda_on_cpu {

inline cudaError_t last_error = cudaSuccess;

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), to its end.
template <typename... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t /*stream*/, int cluster = 1) {
  return [=](const auto&... arguments) {
    const std::tuple<std::remove_const_t<Parameters>...> values(arguments...);
    const bool finished =
        run_grid(grid, block, shared_bytes, cluster, [&] { std::apply(kernel, values); });
    last_error = finished ? cudaSuccess : cudaErrorLaunchFailure;
    return last_error;
  };
}

inline int cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return static_cast<int>(config.attrs[i].val.clusterDim.x);
    }
  }
  return 1;
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaError";
}
inline const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// The product remembers by device how large its clusters may be.
inline cudaError_t cudaGetDevice(int* number) {
  *number = cuda_on_cpu::device.capability_major >= 9 ? cuda_on_cpu::device.max_cluster : 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = cuda_on_cpu::device.multiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = cuda_on_cpu::device.capability_major;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 << 10;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1 << 10;
      break;
  }
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, cudaLaunchConfig_t* config) {
  *clusters = cuda_on_cpu::cluster_of(*config) <= cuda_on_cpu::device.max_cluster ? 2 : 0;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  return cuda_on_cpu::launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                             config->stream, cuda_on_cpu::cluster_of(*config))(arguments...);
}
