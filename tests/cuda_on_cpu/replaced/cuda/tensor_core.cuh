// Stands in for csrc/cuda/tensor_core.cuh.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace flowtt::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

inline float lower_half(uint32_t pair) { return __half2float({static_cast<uint16_t>(pair)}); }
inline float upper_half(uint32_t pair) { return lower_half(pair >> 16); }

// What a lane has of the operands of a product.
template <int kElements>
struct ProductOperands {
  float a[2][kElements];  // [upper or lower row][element]
  float b[kElements];
};

// Adds the products that the lane has the sums of.
template <int kElements>
void add_products(float (&c)[4], const ProductOperands<kElements>& own) {
  using Operands = ProductOperands<kElements>;
  const cuda_on_cpu::Exchange& all =
      cuda_on_cpu::exchange(cuda_on_cpu::Operation::kProduct, kAllLanes, &own, sizeof(own));
  const int lane = cuda_on_cpu::current->lane;
  for (int i = 0; i < 4; ++i) {
    const int column = lane % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (int quarter = 0; quarter < 4; ++quarter) {
      const auto* left =
          reinterpret_cast<const Operands*>(all.slots[lane / 4 * 4 + quarter])->a[i / 2];
      const auto* right = reinterpret_cast<const Operands*>(all.slots[column * 4 + quarter])->b;
      for (int k = 0; k < kElements; ++k) sum += left[k] * right[k];
    }
    c[i] += sum;
  }
}

// mma.m16n8k16: lane l holds of rows l / 4 and l / 4 + 8 of a, and of column l / 4 of b, the
// elements 2 (l % 4), + 1, + 8 and + 9; of the sums, columns 2 (l % 4) and + 1 of these rows.
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  ProductOperands<4> own;
  for (int row = 0; row < 2; ++row) {
    for (int eight = 0; eight < 2; ++eight) {
      own.a[row][2 * eight] = lower_half(a[row + 2 * eight]);
      own.a[row][2 * eight + 1] = upper_half(a[row + 2 * eight]);
    }
  }
  own.b[0] = lower_half(b0), own.b[1] = upper_half(b0);
  own.b[2] = lower_half(b1), own.b[3] = upper_half(b1);
  add_products(c, own);
}

inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  multiply_add(c, a, b0, b1);
}

inline float truncated(float value) {
  return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
}

// mma.m16n8k8: lane l holds of rows l / 4 and l / 4 + 8 of a, and of column l / 4 of b, the
// elements l % 4 and + 4, of which the last 13 bits are ignored; of the sums, as above.
inline void multiply_add_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  const ProductOperands<2> own{
      {{truncated(a[0]), truncated(a[2])}, {truncated(a[1]), truncated(a[3])}},
      {truncated(b0), truncated(b1)}};
  add_products(c, own);
}

// mma.m16n8k4: the same, of elements l % 4 alone.
inline void multiply_add_tf32(float (&c)[4], const float (&a)[2], float b) {
  const ProductOperands<1> own{{{truncated(a[0])}, {truncated(a[1])}}, {truncated(b)}};
  add_products(c, own);
}

inline uint32_t round_pair(float first, float second) {
  return __float2half_rn(first).bits | uint32_t{__float2half_rn(second).bits} << 16;
}

inline uint32_t residual_pair(float first, float second, uint32_t rounded) {
  return round_pair(first - lower_half(rounded), second - upper_half(rounded));
}

template <int kWords>
void load_words(uint32_t (&words)[kWords], const void* source) {
  struct alignas(4 * kWords) Vector {
    uint32_t words[kWords];
  };
  const Vector loaded = __ldg(static_cast<const Vector*>(source));
  std::memcpy(words, &loaded, sizeof(loaded));
}

inline uint32_t shared_address(const void* pointer) { return cuda_on_cpu::shared_address(pointer); }

template <typename T>
T& shared_word(uint32_t address) {
  return *static_cast<T*>(
      cuda_on_cpu::shared_pointer(*cuda_on_cpu::current->block, address, sizeof(T)));
}
inline uint32_t load_shared_word(uint32_t address) { return shared_word<uint32_t>(address); }
inline uint2 load_shared_pair(uint32_t address) { return shared_word<uint2>(address); }
inline uint4 load_shared_vector(uint32_t address) { return shared_word<uint4>(address); }
inline void store_shared_vector(uint32_t address, uint4 v) { shared_word<uint4>(address) = v; }

inline uint4 load_global_vector(uint64_t address) {
  return __ldg(reinterpret_cast<const uint4*>(address));
}
inline void store_global_vector(uint64_t address, uint4 v) {
  __stcs(reinterpret_cast<uint4*>(address), v);
}

// The kernels call it by whole warps: lanes that do not are found here.
template <typename T>
T hold(T value) {
  return __shfl_sync(kAllLanes, value, threadIdx.x % 32);
}

template <typename T>
T same_in_warp(T value) {
  return __shfl_sync(kAllLanes, value, 0);
}

inline void add_pair(float* target, float2 value) {
  if (reinterpret_cast<uintptr_t>(target) % 8 != 0) cuda_on_cpu::fail("a pair at an odd word");
  atomicAdd(target, value.x);
  atomicAdd(target + 1, value.y);
}

inline void add_vector(float* target, float4 value) {
  if (reinterpret_cast<uintptr_t>(target) % 16 != 0) cuda_on_cpu::fail("a vector at another word");
  atomicAdd(target, value.x);
  atomicAdd(target + 1, value.y);
  atomicAdd(target + 2, value.z);
  atomicAdd(target + 3, value.w);
}

inline uint64_t load_acquire(const unsigned long long* source) {
  cuda_on_cpu::give_way();
  return *source;
}
inline void store_release(unsigned long long* target, uint64_t value) {
  if (cuda_on_cpu::toss()) cuda_on_cpu::give_way();
  *target = value;
}

// Copies arrive as late as they may, or in a random order some of them at once.
inline void copy_later(uint32_t target, const void* source, size_t bytes) {
  void* place = cuda_on_cpu::shared_pointer(*cuda_on_cpu::current->block, target, bytes);
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0) cuda_on_cpu::fail("a misaligned copy");
  if (cuda_on_cpu::toss()) {
    std::memcpy(place, source, bytes);
  } else {
    cuda_on_cpu::current->copies.push_back({place, source, bytes});
  }
}
inline void wait_for_own_copies() {
  for (const cuda_on_cpu::PendingCopy& copy : cuda_on_cpu::current->copies) {
    std::memcpy(copy.target, copy.source, copy.bytes);
  }
  cuda_on_cpu::current->copies.clear();
}

inline void touch(uint32_t unused, const void* source) { copy_later(unused, source, 4); }
inline void wait_for_touched() { wait_for_own_copies(); }

// A kernel starts when the one before it has ended.
inline void allow_dependent_launch() {}
inline void wait_for_previous_kernel() {}

}  // namespace flowtt::cuda
