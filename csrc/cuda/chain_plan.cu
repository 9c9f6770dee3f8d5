// How a chain kernel is launched: block size, grid, and where the intermediates live.

#include <algorithm>

#include "chain.cuh"
#include "device_attributes.h"
#include "launchers.h"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxBlocksPerMultiprocessor = 32;

// Shared memory that every block takes beside its own.
constexpr int64_t kReservedSharedBytes = 1024;

// Rounds of blocks: later ones level out what bags of different lengths cost, and without pooling
// features with different numbers of lookups, which the host does not know.
constexpr int64_t kRounds = 4;
constexpr int64_t kRoundsWithoutPooling = 16;

// A batch is small until it has so many threads for each SM.
constexpr int64_t kBusyThreadsPerMultiprocessor = 512;

// Bound of the global scratch of a launch (one block's need if that alone is more).
constexpr int64_t kMaxGlobalScratchBytes = int64_t{256} << 20;
constexpr int64_t kGlobalBlocksPerMultiprocessor = 2;

void set_tile_columns(int tile_columns, ChainLevel* level) {
  level->by_vectors = tile_columns > 1;
  level->column_tiles = level->columns / tile_columns;
  level->by_column_tiles = fast_divisor32(level->column_tiles);
}

// Whether vectors of `vector` elements of the core's slices are aligned.
bool vectors_are_aligned(ElementType core_type, int vector, const void* core, int64_t columns) {
  const int64_t element_bytes = core_type == ElementType::kFloat64   ? 8
                                : core_type == ElementType::kFloat32 ? 4
                                                                     : 2;
  return columns % vector == 0 &&
         reinterpret_cast<uintptr_t>(core) % static_cast<uintptr_t>(vector * element_bytes) == 0;
}

template <typename acc_t>
void describe_levels(ElementType core_type, const TableShape& shape, TTFeature* feature) {
  constexpr int kVector = kVectorBytes / sizeof(acc_t);
  int64_t row_ids = 1;
  for (int k = shape.num_cores - 1; k >= 0; --k) {
    feature->levels[k].row_ids = fast_divisor(row_ids);
    // The last factor is not needed: ids are below the product of all.
    if (k > 0) row_ids *= shape.p[k];
  }
  int64_t rows = 1;
  for (int k = 0; k < shape.num_cores; ++k) {
    ChainLevel& level = feature->levels[k];
    level.rows = static_cast<int32_t>(rows);
    level.inner = static_cast<int32_t>(shape.r[k]);
    level.q = static_cast<int32_t>(shape.q[k]);
    level.rank = static_cast<int32_t>(shape.r[k + 1]);
    level.columns = level.q * level.rank;
    level.slice_numel = level.inner * level.columns;
    rows *= shape.q[k];
    level.stride = prefix_stride<acc_t>(level.rank);
    level.prefix_elements = static_cast<int32_t>(prefix_elements<acc_t, int64_t>(rows, level.rank));
    level.by_rank = fast_divisor32(level.rank);
    // The rows of a prefix product consist of whole vectors, or its elements come one by one.
    const bool rows_fit = k + 1 == shape.num_cores || level.rank % kVector == 0;
    const bool aligned = vectors_are_aligned(core_type, kVector, feature->cores[k], level.columns);
    set_tile_columns(rows_fit && aligned ? kVector : 1, &level);
  }
}

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes_per_block;
  int shared_bytes_per_multiprocessor;
};

cudaError_t current_device_limits(DeviceLimits* limits) {
  cudaError_t error = cudaSuccess;
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = read_attribute(attribute, value);
  };
  read(&limits->multiprocessors, cudaDevAttrMultiProcessorCount);
  read(&limits->shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(&limits->shared_bytes_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return error;
}

// Smallest power of two of warps with at least `wanted` threads.
int whole_warps(int64_t wanted) {
  int threads = kWarpSize;
  while (threads < wanted && threads < kMaxBlockThreads) threads *= 2;
  return threads;
}

struct BlockShape {
  int threads;
  bool is_small_batch;
};

template <typename acc_t>
BlockShape block_shape(ChainKernel kernel, int64_t widest_level, int64_t num_bags,
                       int64_t multiprocessors) {
  // The gradients are sums over elements, one thread each.
  if (kernel == ChainKernel::kGradients) {
    return {whole_warps(widest_level), false};
  }
  // A thread for every tile of level_product. While a batch leaves SMs idle, tiles of one column:
  // more threads a row, and all they need in flight at once.
  constexpr int64_t kVector = kVectorBytes / sizeof(acc_t);
  const int single_columns = whole_warps(widest_level / kTileRows);
  if (num_bags * single_columns <= multiprocessors * kBusyThreadsPerMultiprocessor) {
    return {single_columns, true};
  }
  return {whole_warps(widest_level / kTileRows / kVector), false};
}

template <typename acc_t>
cudaError_t plan_chain(ChainKernel kernel, const BagBatch& batch, FeatureGroup* group,
                       ChainPlan* plan) {
  DeviceLimits limits{};
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;

  int64_t prefix_elements = 0;
  int64_t row_elements = 0;
  int64_t widest_level = 1;
  for (int i = 0; i < group->count; ++i) {
    const TTFeature& feature = group->features[i];
    int64_t elements = 0;
    for (int k = 0; k < feature.num_cores; ++k) {
      const ChainLevel& level = feature.levels[k];
      if (k + 1 < feature.num_cores) elements += level.prefix_elements;
      widest_level = std::max<int64_t>(widest_level, int64_t{level.rows} * level.columns);
    }
    prefix_elements = std::max(prefix_elements, elements);
    row_elements = std::max<int64_t>(row_elements, feature.embedding_dim);
  }

  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  const int64_t bags_of_feature = pools ? batch.batch_size : batch.nnz;
  const BlockShape block =
      block_shape<acc_t>(kernel, widest_level, pools ? group->count * bags_of_feature : batch.nnz,
                         limits.multiprocessors);
  for (int i = 0; i < group->count && block.is_small_batch; ++i) {
    TTFeature& feature = group->features[i];
    for (int k = 1; k < feature.num_cores; ++k) set_tile_columns(1, &feature.levels[k]);
  }
  plan->block_threads = block.threads;
  plan->is_small_batch = block.is_small_batch;
  plan->row_elements = whole_vectors<acc_t>(row_elements);
  plan->elements_per_block = kReductionSlots + plan->row_elements + prefix_elements;
  const int64_t block_bytes = plan->elements_per_block * static_cast<int64_t>(sizeof(acc_t));
  int64_t blocks = 0;
  if (block_bytes <= limits.shared_bytes_per_block) {
    const int64_t resident =
        std::clamp<int64_t>(std::min<int64_t>(kChainThreadsPerMultiprocessor / block.threads,
                                              limits.shared_bytes_per_multiprocessor /
                                                  (block_bytes + kReservedSharedBytes)),
                            1, kMaxBlocksPerMultiprocessor);
    blocks = limits.multiprocessors * resident * (pools ? kRounds : kRoundsWithoutPooling);
    plan->features = group->count;
    plan->shared_bytes = static_cast<size_t>(block_bytes);
  } else {
    blocks = std::clamp<int64_t>(kMaxGlobalScratchBytes / block_bytes, 1,
                                 limits.multiprocessors * kGlobalBlocksPerMultiprocessor);
    plan->features = static_cast<int>(std::min<int64_t>(group->count, blocks));
    plan->shared_bytes = 0;
  }
  plan->blocks_per_feature = std::clamp<int64_t>(blocks / plan->features, 1, bags_of_feature);
  plan->global_bytes =
      plan->shared_bytes > 0
          ? 0
          : static_cast<size_t>(plan->blocks_per_feature * plan->features * block_bytes);
  return cudaSuccess;
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
  int64_t rows = 1;
  int64_t elements = 0;
  for (int k = 0; k < shape.num_cores; ++k) {
    rows *= shape.q[k];
    if (rows * shape.r[k + 1] > kMaxLevelElements) return false;
    if (k + 1 < shape.num_cores) elements += prefix_elements<float, int64_t>(rows, shape.r[k + 1]);
  }
  return elements <= kMaxLevelElements;
}

void describe_chain(ElementType core_type, const TableShape& shape, TTFeature* feature) {
  feature->num_embeddings = shape.num_embeddings;
  feature->num_cores = shape.num_cores;
  feature->embedding_dim = static_cast<int32_t>(shape.embedding_dim);
  if (core_type == ElementType::kFloat64) {
    describe_levels<double>(core_type, shape, feature);
  } else {
    describe_levels<float>(core_type, shape, feature);
  }
}

cudaError_t plan_chain(ElementType core_type, ChainKernel kernel, const BagBatch& batch,
                       FeatureGroup* group, ChainPlan* plan) {
  return core_type == ElementType::kFloat64 ? plan_chain<double>(kernel, batch, group, plan)
                                            : plan_chain<float>(kernel, batch, group, plan);
}

}  // namespace flowtt::cuda
