// Forward: pooled rows of the bags, the whole chain and the pooling in one kernel.

#include <algorithm>

#include "bag_loop.cuh"
#include "chain_launch.cuh"

namespace flowtt::cuda {
namespace {

// Adds a row to the sum of its bag. A thread gets the same elements of every row of a bag, so the
// sum needs no barrier.
template <typename acc_t>
struct RowPooling {
  acc_t* sums;
  int32_t columns;  // of the last core
  acc_t weight;
  bool is_first;

  template <int kColumns>
  __device__ __forceinline__ void operator()(const ProductVector<acc_t, kColumns>& vector) const {
    acc_t* const place = sums + vector.row * columns + vector.column;
    acc_t values[kColumns] = {};
    if (!is_first) load_accumulators(values, place);
#pragma unroll
    for (int v = 0; v < kColumns; ++v) values[v] += weight * vector.values[v];
    store_accumulators(place, values);
  }
};

// Writes a bag's row of the output.
template <typename acc_t>
__device__ __forceinline__ void store_row(const PooledOutput& output, int64_t offset,
                                          const acc_t* sums, acc_t scale, int32_t embedding_dim) {
  constexpr int kVector = kVectorBytes / sizeof(acc_t);
  const int32_t whole = embedding_dim - embedding_dim % kVector;
  for (int32_t j = threadIdx.x * kVector; j < whole; j += blockDim.x * kVector) {
    acc_t values[kVector];
    load_accumulators(values, sums + j);
#pragma unroll
    for (int v = 0; v < kVector; ++v) values[v] *= scale;
    store_elements(output.data, output.type, offset + j, values);
  }
  for (int32_t j = whole + threadIdx.x; j < embedding_dim; j += blockDim.x) {
    store_element(output.data, output.type, offset + j, scale * sums[j]);
  }
}

// Persistent blocks, one bag at a time.
template <typename core_t, typename Group, ScratchPlace kPlace, TileColumns kTiles>
__global__ void __launch_bounds__(kMaxBlockThreads,
                                  kChainThreadsPerMultiprocessor / kMaxBlockThreads)
    tt_embedding_bag_kernel(const __grid_constant__ Group group,
                            const __grid_constant__ BagBatch batch,
                            const __grid_constant__ PooledOutput output,
                            const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t, kPlace>(chain_scratch);
  for_each_bag(group, batch, [&](const TTFeature& feature, int64_t sample, BagRange range) {
    const int64_t output_offset = sample * output.row_stride + feature.output_column;
    if (range.length() == 0) {
      for (int32_t j = threadIdx.x; j < feature.embedding_dim; j += blockDim.x) {
        store_element(output.data, output.type, output_offset + j, acc_t(0));
      }
      return;
    }
    for_each_row_id(feature, batch, range, [&](int64_t row_id, int64_t position) {
      const RowPooling<acc_t> pooling{scratch.row, feature.levels[feature.num_cores - 1].columns,
                                      load_sample_weight<acc_t>(batch, position),
                                      position == range.begin};
      expand_row<core_t, kTiles>(feature, row_id, scratch.prefixes, pooling);
      __syncthreads();
    });
    const bool averages = batch.pooling_mode == PoolingMode::kMean;
    store_row(output, output_offset, scratch.row,
              averages ? acc_t(1) / acc_t(range.length()) : acc_t(1), feature.embedding_dim);
  });
}

}  // namespace

cudaError_t launch_tt_embedding_bag(ElementType core_type, const FeatureGroup& group,
                                    const BagBatch& batch, const PooledOutput& output,
                                    const ChainPlan& plan, void* global_scratch,
                                    cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    const auto launch = [&](const auto& features, auto kernel) {
      return launch_chain_kernel(kernel, plan, global_scratch, stream, features, batch, output);
    };
    constexpr TileColumns kTiles = TileColumns::kVectorOrOne;
    if (plan.global_bytes > 0) {
      return launch(group,
                    tt_embedding_bag_kernel<core_t, FeatureGroup, ScratchPlace::kGlobal, kTiles>);
    }
    if (group.count > kFeaturesPerSmallLaunch) {
      return launch(group,
                    tt_embedding_bag_kernel<core_t, FeatureGroup, ScratchPlace::kShared, kTiles>);
    }
    SmallFeatureGroup small{};
    small.count = group.count;
    std::copy_n(group.features, group.count, small.features);
    return launch(
        small,
        plan.is_small_batch
            ? tt_embedding_bag_kernel<core_t, SmallFeatureGroup, ScratchPlace::kShared,
                                      TileColumns::kOne>
            : tt_embedding_bag_kernel<core_t, SmallFeatureGroup, ScratchPlace::kShared, kTiles>);
  });
}

}  // namespace flowtt::cuda
