// Stands in for csrc/cuda/cluster.cuh.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flowtt::cuda {

inline constexpr int kMaxClusterBlocks = 16;

inline uint32_t cluster_rank() { return cuda_on_cpu::current->block->rank; }
inline uint32_t cluster_blocks() {
  return static_cast<uint32_t>(cuda_on_cpu::current->block->cluster->blocks.size());
}

inline void arrive_at_cluster(bool /*publishes*/ = true) {
  cuda_on_cpu::Fiber& fiber = *cuda_on_cpu::current;
  fiber.cluster_arrival = fiber.block->cluster->barrier.arrive();
}
inline void wait_for_cluster() {
  const cuda_on_cpu::Fiber& fiber = *cuda_on_cpu::current;
  fiber.block->cluster->barrier.wait(fiber.cluster_arrival);
}

inline uint32_t add_to_shared(uint32_t* word, uint32_t value) {
  cuda_on_cpu::shared_address(word);  // checks that it is one
  return atomicAdd(word, value);
}

class RemoteWord {
 public:
  RemoteWord(const uint32_t* word, uint32_t rank)
      : address_(cuda_on_cpu::shared_address(word)), rank_(rank) {}

  uint32_t load() const { return *place(); }
  void store(uint32_t value) const { *place() = value; }

 private:
  uint32_t* place() const {
    const auto& blocks = cuda_on_cpu::current->block->cluster->blocks;
    if (rank_ >= blocks.size()) cuda_on_cpu::fail("block %u of a cluster of fewer", rank_);
    const cuda_on_cpu::Block& block = *blocks[rank_];
    if (block.barrier.members == 0) cuda_on_cpu::fail("shared memory of a block that has ended");
    return static_cast<uint32_t*>(cuda_on_cpu::shared_pointer(block, address_, sizeof(uint32_t)));
  }

  uint32_t address_;
  uint32_t rank_;
};

}  // namespace flowtt::cuda
