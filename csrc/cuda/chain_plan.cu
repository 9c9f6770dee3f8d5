// How a chain kernel is launched: block size, grid, and where the intermediates live.

#include <algorithm>

#include "chain.cuh"
#include "launchers.h"

namespace flowtt::cuda {
namespace {

// Blocks beyond what an SM holds only queue, but each one pays for its start.
constexpr int64_t kThreadsPerMultiprocessor = 2048;
constexpr int64_t kMaxBlocksPerMultiprocessor = 32;

// Bound of the global scratch of a launch (one block's need if that alone is more).
constexpr int64_t kMaxGlobalScratchBytes = int64_t{256} << 20;
constexpr int64_t kGlobalBlocksPerMultiprocessor = 2;

struct ChainExtent {
  int64_t prefix_elements;  // all of P_1 ... P_{d-1}
  int64_t widest_level;     // elements of the largest P_k, the row included
};

ChainExtent chain_extent(const TableShape& shape) {
  ChainExtent extent{0, shape.embedding_dim};
  int64_t rows = 1;
  for (int k = 0; k < shape.num_cores - 1; ++k) {
    rows *= shape.q[k];
    const int64_t level = rows * shape.r[k + 1];
    extent.prefix_elements += level;
    extent.widest_level = std::max(extent.widest_level, level);
  }
  return extent;
}

// Smallest power of two of warps that gives every element of the widest level a thread.
int block_threads_for(int64_t widest_level) {
  int threads = kWarpSize;
  while (threads < widest_level && threads < kMaxBlockThreads) threads *= 2;
  return threads;
}

}  // namespace

bool has_32_bit_levels(const TableShape& shape) {
  // Ranks and q are bounded one by one first, so that no product overflows 64 bits.
  if (shape.embedding_dim > kMaxLevelElements) return false;
  for (int k = 0; k < shape.num_cores; ++k) {
    if (shape.r[k] > kMaxLevelElements || shape.q[k] > kMaxLevelElements) return false;
    if (shape.r[k] * shape.q[k] > kMaxLevelElements) return false;
    if (shape.slice_numel(k) > kMaxLevelElements) return false;
  }
  return chain_extent(shape).widest_level <= kMaxLevelElements;
}

cudaError_t plan_chain(ElementType core_type, const FeatureGroup& group, int64_t batch_size,
                       ChainPlan* plan) {
  int device = 0;
  int multiprocessors = 0;
  int max_shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error =
      cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;

  int64_t prefix_elements = 0;
  int64_t row_elements = 0;
  int64_t widest_level = 1;
  for (int i = 0; i < group.count; ++i) {
    const TableShape& shape = group.features[i].shape;
    if (!has_32_bit_levels(shape)) return cudaErrorInvalidValue;
    const ChainExtent extent = chain_extent(shape);
    prefix_elements = std::max(prefix_elements, extent.prefix_elements);
    row_elements = std::max(row_elements, shape.embedding_dim);
    widest_level = std::max(widest_level, extent.widest_level);
  }

  const int64_t element_bytes = core_type == ElementType::kFloat64 ? 8 : 4;
  plan->block_threads = block_threads_for(widest_level);
  plan->row_elements = row_elements;
  plan->elements_per_block = kReductionSlots + row_elements + prefix_elements;
  const int64_t block_bytes = plan->elements_per_block * element_bytes;
  const int64_t num_bags = group.count * batch_size;
  if (block_bytes <= max_shared_bytes) {
    const int64_t resident = std::min<int64_t>(kMaxBlocksPerMultiprocessor,
                                               kThreadsPerMultiprocessor / plan->block_threads);
    plan->grid_blocks = std::min(num_bags, multiprocessors * resident);
    plan->shared_bytes = static_cast<size_t>(block_bytes);
    plan->global_bytes = 0;
  } else {
    const int64_t affordable = std::max<int64_t>(1, kMaxGlobalScratchBytes / block_bytes);
    plan->grid_blocks =
        std::min({num_bags, multiprocessors * kGlobalBlocksPerMultiprocessor, affordable});
    plan->shared_bytes = 0;
    plan->global_bytes = static_cast<size_t>(plan->grid_blocks * block_bytes);
  }
  return cudaSuccess;
}

}  // namespace flowtt::cuda
