// Loads of core slices by the general kernels, in instructions that CUDA C++ has no name for.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flowtt::cuda {

// kBytes from `source`, or zeros unless `is_there`. A predicated load: the compiler would branch
// around each.
template <int kBytes, typename Words>
__device__ __forceinline__ void load_if(Words& words, const void* source, bool is_there) {
  const int there = is_there;
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "mov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
        : "l"(source), "r"(there));
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n\t}"
        : "=&r"(words.x), "=&r"(words.y)
        : "l"(source), "r"(there));
  } else if constexpr (kBytes == 4) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t"
        "@p ld.global.nc.b32 %0, [%1];\n\t}"
        : "=&r"(words)
        : "l"(source), "r"(there));
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\tmov.b16 %0, 0;\n\t"
        "@p ld.global.nc.b16 %0, [%1];\n\t}"
        : "=&h"(words)
        : "l"(source), "r"(there));
  }
}

// Makes the compiler forget how an address was computed, so that it keeps no others in registers.
template <typename T>
__device__ __forceinline__ void forget(const T*& address) {
  asm volatile("" : "+l"(address));
}

}  // namespace flowtt::cuda
