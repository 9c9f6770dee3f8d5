// What the host asks of the current device.

#pragma once

#include <cuda_runtime_api.h>

namespace flowtt::cuda {

inline cudaError_t read_attribute(cudaDeviceAttr attribute, int* value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(value, attribute, device);
}

// Whether it has programmatic dependent launch.
inline cudaError_t read_dependent_launch(bool* has_it) {
  int major = 0;
  const cudaError_t error = read_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  *has_it = major >= 9;
  return error;
}

}  // namespace flowtt::cuda
