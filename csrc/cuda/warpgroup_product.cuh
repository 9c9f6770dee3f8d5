// Products of four warps together, whose right operand lies in shared memory and is read once for
// all of them: wgmma, of devices of compute capability 9.0 alone (sm_90a).

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tensor_core.cuh"

namespace flowtt::cuda {

// A right operand in shared memory: lines of 32 elements, one for each column, aligned to 1,024
// bytes; vectors of four elements of a line are permuted.
inline constexpr uint32_t kGroupLineBytes = 128;
inline constexpr uint32_t kGroupStepBytes = 32;  // of the 8 elements of a line that are one step

// Where vector `vector` of a line is, in bytes.
__device__ __forceinline__ constexpr uint32_t group_line_place(uint32_t line, uint32_t vector) {
  return line * kGroupLineBytes + (vector ^ line % 8) * 16;
}

// Before the first of several products, when registers of theirs have been written.
__device__ __forceinline__ void start_group_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// After the last of them: the sums are there.
__device__ __forceinline__ void finish_group_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// By every thread that has written to a right operand, before a barrier ahead of the products.
__device__ __forceinline__ void publish_group_operand() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Lines that step `step` of the operand at the shared address `first` begins with.
__device__ __forceinline__ uint64_t group_operand(uint32_t first, uint32_t step) {
  constexpr uint64_t kEightLines = uint64_t{8 * kGroupLineBytes / 16} << 32;
  constexpr uint64_t kPermuted = uint64_t{1} << 62;
  return (first + step * kGroupStepBytes) / 16 | uint64_t{1} << 16 | kEightLines | kPermuted;
}

// c (64 x 8 kTiles) += a (64 x 8) @ b (8 x 8 kTiles), TF32 operands (the last 13 bits are ignored),
// fp32 sums. Warp w of the four has rows 16 w to 16 w + 15 of a and c, as in multiply_add_tf32.
// By all four; between the two functions above.
template <int kTiles>
__device__ __forceinline__ void group_multiply_add(float (&c)[kTiles][4], const float (&a)[4],
                                                   uint32_t first, uint32_t step) {
  static_assert(kTiles == 2 || kTiles == 4 || kTiles == 8);
  const uint64_t b = group_operand(first, step);
  const uint32_t a0 = __float_as_uint(a[0]);
  const uint32_t a1 = __float_as_uint(a[1]);
  const uint32_t a2 = __float_as_uint(a[2]);
  const uint32_t a3 = __float_as_uint(a[3]);
  if constexpr (kTiles == 2) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
  } else if constexpr (kTiles == 4) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
          "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
  }
}

}  // namespace flowtt::cuda
