// Stands in for the CUDA runtime's header: what device code may use.

#pragma once

#include <bit>
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "warp_operations.h"

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (cuda_on_cpu::current->thread)
#define blockIdx (cuda_on_cpu::current->block->index)
// References, because launch configurations have members of these names.
static const dim3& blockDim = cuda_on_cpu::block_dimensions;
static const dim3& gridDim = cuda_on_cpu::grid_dimensions;

template <typename Left, typename Right>
std::common_type_t<Left, Right> min(Left left, Right right) {
  using Common = std::common_type_t<Left, Right>;
  return static_cast<Common>(right) < static_cast<Common>(left) ? static_cast<Common>(right)
                                                                : static_cast<Common>(left);
}
template <typename Left, typename Right>
std::common_type_t<Left, Right> max(Left left, Right right) {
  using Common = std::common_type_t<Left, Right>;
  return static_cast<Common>(left) < static_cast<Common>(right) ? static_cast<Common>(right)
                                                                : static_cast<Common>(left);
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> shift % 32);
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return value == 0 ? 0 : std::countr_zero<unsigned>(value) + 1; }
inline unsigned __umulhi(unsigned left, unsigned right) {
  return static_cast<unsigned>((uint64_t{left} * right) >> 32);
}
inline uint64_t __umul64hi(uint64_t left, uint64_t right) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(left) * right) >> 64);
}
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }

namespace cuda_on_cpu {

template <typename T>
void check_alignment(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) {
    fail("an access of %zu bytes at a multiple of fewer", sizeof(T));
  }
}

// What an atomic finds, and what it leaves.
template <typename T, typename Change>
T atomically(T* address, Change change) {
  check_alignment(address);
  if (toss()) give_way();
  const T before = *address;
  *address = change(before);
  return before;
}

}  // namespace cuda_on_cpu

template <typename T>
T __ldg(const T* address) {
  cuda_on_cpu::check_alignment(address);
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return __ldg(address);
}
template <typename T>
T __ldcs(const T* address) {
  return __ldg(address);
}
template <typename T>
void __stcs(T* address, T value) {
  cuda_on_cpu::check_alignment(address);
  *address = value;
}
template <typename T>
void __stcg(T* address, T value) {
  __stcs(address, value);
}

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(address, [&](T before) -> T { return before + value; });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(address, [&](T before) -> T { return before | value; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(address, [&](T before) -> T { return min(before, value); });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(address, [&](T before) -> T { return max(before, value); });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(address, [&](T) -> T { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return cuda_on_cpu::atomically(
      address, [&](T before) -> T { return before == expected ? value : before; });
}

inline void __threadfence() {
  if (cuda_on_cpu::toss()) cuda_on_cpu::give_way();
}
inline void __threadfence_block() { __threadfence(); }

inline void __syncthreads() {
  cuda_on_cpu::Barrier& barrier = cuda_on_cpu::current->block->barrier;
  barrier.wait(barrier.arrive());
}

inline int __syncthreads_count(int vote) {
  cuda_on_cpu::Block& block = *cuda_on_cpu::current->block;
  int& votes = block.votes[block.barrier.generation & 1];
  if (block.barrier.arrived == 0) votes = 0;
  votes += vote != 0;
  block.barrier.wait(block.barrier.arrive());
  return votes;
}
inline int __syncthreads_and(int vote) { return __syncthreads_count(vote == 0) == 0; }

[[noreturn]] inline void __trap() { cuda_on_cpu::fail("trap"); }
