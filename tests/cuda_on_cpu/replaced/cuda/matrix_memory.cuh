// Stands in for csrc/cuda/matrix_memory.cuh.

#pragma once

#include "tensor_core.cuh"

namespace flowtt::cuda {

// ldmatrix.x4: lane l gets words l % 4 of row l / 4 of each matrix.
inline void load_matrices(uint32_t (&a)[4], uint32_t row_address) {
  const uint4 row = load_shared_vector(row_address);
  const cuda_on_cpu::Exchange& rows =
      cuda_on_cpu::exchange(cuda_on_cpu::Operation::kMatrices, kAllLanes, &row, sizeof(row));
  const int lane = cuda_on_cpu::current->lane;
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(&a[matrix], rows.slots[8 * matrix + lane / 4] + 4 * (lane % 4), sizeof(uint32_t));
  }
}

inline void copy_async(uint32_t target, const void* source) { copy_later(target, source, 16); }
inline void copy_async_8(uint32_t target, const void* source) { copy_later(target, source, 8); }
inline void copy_async_4(uint32_t target, const void* source) { copy_later(target, source, 4); }
inline void wait_for_copies() { wait_for_own_copies(); }

inline void store_shared_pair(uint32_t address, uint2 value) {
  shared_word<uint2>(address) = value;
}

struct PartialBarrier {
  uint64_t state;

  void start(int threads) { cuda_on_cpu::current->block->named_barrier.members = threads; }
  void wait() {
    cuda_on_cpu::Barrier& barrier = cuda_on_cpu::current->block->named_barrier;
    barrier.wait(barrier.arrive());
  }
};

}  // namespace flowtt::cuda
