// Where a warp keeps the prefix products of its tile between the stages of the chain: in shared
// memory, or with mechanism `fusion` disabled in a scratch in device memory. Offsets are in bytes.

#pragma once

#include "tensor_core.cuh"

namespace flowtt::cuda {

struct SharedTile {
  uint32_t address;

  __device__ __forceinline__ SharedTile at(uint32_t offset) const { return {address + offset}; }
  __device__ __forceinline__ uint4 load(uint32_t offset) const {
    return load_shared_vector(address + offset);
  }
  __device__ __forceinline__ void store(uint32_t offset, uint4 v) const {
    store_shared_vector(address + offset, v);
  }
};

struct ScratchTile {
  uint64_t address;

  __device__ __forceinline__ ScratchTile at(uint32_t offset) const { return {address + offset}; }
  __device__ __forceinline__ uint4 load(uint32_t offset) const {
    return load_global_vector(address + offset);
  }
  __device__ __forceinline__ void store(uint32_t offset, uint4 v) const {
    store_global_vector(address + offset, v);
  }
};

}  // namespace flowtt::cuda
