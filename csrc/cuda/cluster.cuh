// Thread-block clusters: barriers, and the shared memory of the cluster's other blocks. Devices
// before compute capability 9.0 have none; there a cluster is one block.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flowtt::cuda {

inline constexpr int kMaxClusterBlocks = 16;

__device__ __forceinline__ uint32_t cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ uint32_t cluster_blocks() {
#if __CUDA_ARCH__ >= 900
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}

// Called by all threads, after a __syncthreads. What the block's threads wrote before that, every
// thread of the cluster sees that has waited; other work may lie between arriving and waiting. The
// first warp publishes the writes of all: the others need not wait for theirs to be visible.
__device__ __forceinline__ void arrive_at_cluster(bool publishes = true) {
#if __CUDA_ARCH__ >= 900
  if (publishes && threadIdx.x < 32) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// atomicAdd of one lane to its block's shared memory. Of an atomicAdd to an address that all lanes
// share the compiler makes a sum over the warp.
__device__ __forceinline__ uint32_t add_to_shared(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(word))), "r"(value)
               : "memory");
  return before;
}

// A word at the same place in the shared memory of block `rank`, which has to be running.
class RemoteWord {
 public:
  __device__ __forceinline__ RemoteWord(const uint32_t* word, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(word));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address_) : "r"(own), "r"(rank));
#else
    address_ = static_cast<uint32_t>(__cvta_generic_to_shared(word));
#endif
  }

  __device__ __forceinline__ uint32_t load() const {
    uint32_t value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_) : "memory");
#else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address_) : "memory");
#endif
    return value;
  }

  __device__ __forceinline__ void store(uint32_t value) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_), "r"(value) : "memory");
#else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address_), "r"(value) : "memory");
#endif
  }

 private:
  uint32_t address_;
};

}  // namespace flowtt::cuda
