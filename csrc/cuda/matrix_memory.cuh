// Instructions that move matrices between memories.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "tensor_core.cuh"

namespace flowtt::cuda {

// Four 8 x 8 matrices of halves; lane l names row l % 8 of matrix l / 8. The result is operand a of
// multiply_add when the matrices are (upper, lower) rows x (first, second) eight summed elements.
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row_address));
}

// 16 bytes from global to shared memory, past the L1 cache and the registers.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_async_8(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_async_4(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}

// In shared memory: a barrier of some threads of a block, which the others do not wait for.
struct PartialBarrier {
  uint64_t state;

  // By one thread; a barrier of the block must follow.
  __device__ __forceinline__ void start(int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(threads)
                 : "memory");
  }
  // By each of the threads.
  __device__ __forceinline__ void wait() {
    const uint32_t address = shared_address(&state);
    uint64_t phase;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(phase) : "r"(address) : "memory");
    uint32_t is_over;
    do {
      asm volatile(
          "{\n"
          ".reg .pred over;\n"
          "mbarrier.test_wait.shared.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n"
          "}"
          : "=r"(is_over)
          : "r"(address), "l"(phase)
          : "memory");
    } while (is_over == 0);
  }
};

}  // namespace flowtt::cuda
