// The one file that includes CUB, which takes long to compile.

#include "stable_sort.h"

#define CCCL_DISABLE_NVTX  // ranges for profilers, by a library that is looked for at run time

#include <cub/device/device_radix_sort.cuh>

namespace flowtt::cuda {

cudaError_t plan_stable_sort(int32_t count, KeyBits bits, size_t* workspace_bytes) {
  *workspace_bytes = 0;
  return cub::DeviceRadixSort::SortKeys(
      nullptr, *workspace_bytes, static_cast<const uint64_t*>(nullptr),
      static_cast<uint64_t*>(nullptr), count, bits.begin, bits.end);
}

cudaError_t launch_stable_sort(const uint64_t* keys, uint64_t* sorted, int32_t count, KeyBits bits,
                               void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortKeys(workspace, workspace_bytes, keys, sorted, count, bits.begin,
                                        bits.end, stream);
}

}  // namespace flowtt::cuda
