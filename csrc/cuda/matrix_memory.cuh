// Instructions of the wide and two-core kernels that move matrices between memories.

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

// A barrier of the first `threads` threads of a block, which the others do not wait for.
__device__ __forceinline__ void partial_barrier(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

}  // namespace flowtt::cuda
