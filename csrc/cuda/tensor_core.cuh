// Tensor-core and memory instructions of the tiled kernels that CUDA C++ has no name for.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace flowtt::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// c += a (16 x 16) @ b (16 x 8), fp16 operands, fp32 sums.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = a @ b. Its sums start from the zero register: clearing them first would cost four
// instructions a product.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// c += a (16 x 8) @ b (8 x 8), TF32 operands (the last 13 bits are ignored), fp32 sums.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const float (&a)[4], float b0,
                                                  float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// c += a (16 x 4) @ b (4 x 8), TF32 operands, fp32 sums.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const float (&a)[2], float b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(b)));
}

// Two values rounded to fp16, the first in the lower half.
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// What rounding to fp16 left of two values, rounded to fp16 itself.
__device__ __forceinline__ uint32_t residual_pair(float first, float second, uint32_t rounded) {
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&rounded));
  return round_pair(first - high.x, second - high.y);
}

// kWords consecutive words, in one load.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const void* source) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    const uint4 loaded = __ldg(static_cast<const uint4*>(source));
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else {
    const uint2 loaded = __ldg(static_cast<const uint2*>(source));
    words[0] = loaded.x, words[1] = loaded.y;
  }
}

// Shared memory by 32-bit addresses.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_vector(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_vector(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Asks for the line of `source` in the L1 cache, without waiting and without a register for it.
// `unused`: four bytes of shared memory that nobody reads, other ones for each lane.
__device__ __forceinline__ void touch(uint32_t unused, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(unused), "l"(source));
}

// What touch asked for has arrived; to be called before the shared memory is given back.
__device__ __forceinline__ void wait_for_touched() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Device memory by 64-bit addresses.
__device__ __forceinline__ uint4 load_global_vector(uint64_t address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_global_vector(uint64_t address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// The value itself, in a register: a result of an instruction that the compiler cannot repeat. It
// would rather compute addresses again at each use, 30 instructions a row. By whole warps.
template <typename T>
__device__ __forceinline__ T hold(T value) {
  return __shfl_sync(kAllLanes, value, threadIdx.x % 32);
}

// A value that all lanes have, as one of which the compiler knows that: what depends on it needs no
// preparations for lanes that part, four instructions a branch or shuffle. By whole warps.
template <typename T>
__device__ __forceinline__ T same_in_warp(T value) {
  return __shfl_sync(kAllLanes, value, 0);
}

// Adds two values to consecutive words, aligned to both.
__device__ __forceinline__ void add_pair(float* target, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(value.x), "f"(value.y)
               : "memory");
#else
  atomicAdd(target, value.x);
  atomicAdd(target + 1, value.y);
#endif
}

// Adds four values to consecutive words, aligned to all of them.
__device__ __forceinline__ void add_vector(float* target, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#else
  add_pair(target, make_float2(value.x, value.y));
  add_pair(target + 2, make_float2(value.z, value.w));
#endif
}

// Orders what other blocks read after it, or wrote before it.
__device__ __forceinline__ uint64_t load_acquire(const unsigned long long* source) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(unsigned long long* target, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

// Programmatic dependent launch: the next kernel of the stream may start, and waits for this one.
__device__ __forceinline__ void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flowtt::cuda
