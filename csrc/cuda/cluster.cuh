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

// The same after writes to the shared memory of other blocks: every thread publishes its own.
__device__ __forceinline__ void arrive_after_remote_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

// Where the same place of the shared memory of block `rank` is for this one.
__device__ __forceinline__ uint32_t remote_address(const void* place, uint32_t rank) {
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  return address;
#else
  return own;
#endif
}

// A word at the same place in the shared memory of block `rank`, which has to be running.
class RemoteWord {
 public:
  __device__ __forceinline__ RemoteWord(const uint32_t* word, uint32_t rank)
      : address_(remote_address(word, rank)) {}

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

  // Returns the word before.
  __device__ __forceinline__ uint32_t add(uint32_t value) const {
    uint32_t before;
#if __CUDA_ARCH__ >= 900
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address_), "r"(value)
                 : "memory");
#else
    asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address_), "r"(value)
                 : "memory");
#endif
    return before;
  }

 private:
  uint32_t address_;
};

// 16 bytes there.
class RemoteVector {
 public:
  __device__ __forceinline__ RemoteVector(const uint4* vector, uint32_t rank)
      : address_(remote_address(vector, rank)) {}

  __device__ __forceinline__ uint4 load() const {
    uint4 v;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address_)
                 : "memory");
#else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address_)
                 : "memory");
#endif
    return v;
  }

  __device__ __forceinline__ void store(uint4 v) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address_), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
#else
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address_), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
#endif
  }

 private:
  uint32_t address_;
};

}  // namespace flowtt::cuda
