// Stands in for csrc/cuda/stable_sort.cu.

#include "stable_sort.h"

#include <algorithm>

namespace flowtt::cuda {

cudaError_t plan_stable_sort(int32_t count, KeyBits /*bits*/, size_t* workspace_bytes) {
  *workspace_bytes = count * sizeof(uint64_t);
  return cudaSuccess;
}

// Uses the workspace, as CUB does, so that one that is too small is found.
cudaError_t launch_stable_sort(const uint64_t* keys, uint64_t* sorted, int32_t count, KeyBits bits,
                               void* workspace, size_t workspace_bytes, cudaStream_t /*stream*/) {
  if (workspace_bytes < count * sizeof(uint64_t)) return cudaErrorInvalidValue;
  const uint64_t mask = (uint64_t{1} << (bits.end - bits.begin)) - 1;
  const auto key = [&](uint64_t value) { return value >> bits.begin & mask; };
  auto* const copy = static_cast<uint64_t*>(workspace);
  std::copy(keys, keys + count, copy);
  std::stable_sort(copy, copy + count,
                   [&](uint64_t left, uint64_t right) { return key(left) < key(right); });
  std::copy(copy, copy + count, sorted);
  return cudaSuccess;
}

}  // namespace flowtt::cuda
