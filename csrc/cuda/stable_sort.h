// Sorting of 64-bit keys by some of their bits, by CUB's radix sort. Like launchers.h, nothing here
// synchronises.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flowtt::cuda {

// What `count` keys are sorted by: bits [begin, end). Keys that agree in them stay in order.
struct KeyBits {
  int begin;
  int end;
};

cudaError_t plan_stable_sort(int32_t count, KeyBits bits, size_t* workspace_bytes);

// `workspace`: aligned to 256 bytes, at least as large as planned for so many keys.
cudaError_t launch_stable_sort(const uint64_t* keys, uint64_t* sorted, int32_t count, KeyBits bits,
                               void* workspace, size_t workspace_bytes, cudaStream_t stream);

}  // namespace flowtt::cuda
