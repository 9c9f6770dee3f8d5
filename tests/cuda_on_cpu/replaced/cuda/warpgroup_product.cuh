// Stands in for csrc/cuda/warpgroup_product.cuh.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "tensor_core.cuh"

namespace flowtt::cuda {

inline constexpr uint32_t kGroupLineBytes = 128;
inline constexpr uint32_t kGroupStepBytes = 32;
inline constexpr uint32_t kGroupAlignment = 1024;

constexpr uint32_t group_line_place(uint32_t line, uint32_t vector) {
  return line * kGroupLineBytes + (vector ^ line % 8) * 16;
}

inline void start_group_products() {}
inline void finish_group_products() {}
inline void publish_group_operand() {}

// Each warp on its own: what the four have in common is in shared memory. The device permutes by
// the address: its bits 4 to 6 are combined with bits 7 to 9.
inline uint32_t group_operand(const float* first) { return shared_address(first) / 16; }

template <int kTiles>
void group_multiply_add(bool adds, float (&c)[kTiles][4], const float (&a)[4], uint32_t operand,
                        uint32_t offset) {
  const uint32_t step = operand * 16 + offset;
  // A step of a line at whose start the permutation starts.
  if (step % kGroupAlignment >= kGroupLineBytes || step % kGroupStepBytes != 0) {
    cuda_on_cpu::fail("an operand that is not aligned");
  }
  const auto truncated = [](float value) {
    return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
  };
  const ProductOperands<2> own{
      {{truncated(a[0]), truncated(a[2])}, {truncated(a[1]), truncated(a[3])}}, {}};
  const cuda_on_cpu::Exchange& all =
      cuda_on_cpu::exchange(cuda_on_cpu::Operation::kProduct, kAllLanes, &own, sizeof(own));
  const uint32_t lane = cuda_on_cpu::current->lane;
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    for (uint32_t i = 0; i < 4; ++i) {
      if (!adds) c[tile][i] = 0.0f;
      const uint32_t line = 8 * tile + lane % 4 * 2 + i % 2;
      for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        const auto* left =
            reinterpret_cast<const ProductOperands<2>*>(all.slots[lane / 4 * 4 + quarter])
                ->a[i / 2];
        for (uint32_t k = 0; k < 2; ++k) {
          uint32_t address = step + line * kGroupLineBytes + k * 16;
          address ^= (address >> 7 & 7) << 4;
          c[tile][i] += left[k] * truncated(shared_word<float>(address + quarter * 4));
        }
      }
    }
  }
}

}  // namespace flowtt::cuda
