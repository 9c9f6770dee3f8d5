// Launches whose kernel may start before the one ahead has ended.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flowtt::cuda {

// dependent: whether the device has programmatic dependent launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads,
                          size_t shared_bytes, bool dependent, cudaStream_t stream,
                          const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads,
                          size_t shared_bytes, bool dependent, cudaStream_t stream,
                          const Arguments&... arguments) {
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes,
                       dependent, stream, arguments...);
}

}  // namespace flowtt::cuda
