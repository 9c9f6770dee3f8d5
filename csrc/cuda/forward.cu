// Forward: pooled rows of the bags, the whole chain and the pooling in one kernel.

#include "chain.cuh"
#include "chain_launch.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {
namespace {

// Persistent blocks, one bag at a time. Thread t owns columns t, t + blockDim.x, ... of the row.
template <typename core_t>
__global__ void __launch_bounds__(kMaxBlockThreads)
    tt_embedding_bag_kernel(const __grid_constant__ FeatureGroup group,
                            const __grid_constant__ BagBatch batch,
                            const __grid_constant__ PooledOutput output,
                            const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t>(chain_scratch);
  acc_t* const pooled = scratch.row;

  const int64_t num_bags = group.count * batch.batch_size;
  for (int64_t bag = blockIdx.x; bag < num_bags; bag += gridDim.x) {
    const TTFeature& feature = group.features[bag / batch.batch_size];
    const int64_t sample = bag % batch.batch_size;
    const BagRange range = load_bag(batch, feature, sample);
    for (int32_t j = threadIdx.x; j < row_elements(feature); j += blockDim.x) pooled[j] = 0;

    for (int64_t position = range.begin; position < range.end; ++position) {
      const RowSlices slices = locate_slices(feature, load_row_id(batch, feature, position));
      const acc_t weight = load_sample_weight<acc_t>(batch, position);
      const acc_t* prefix = expand_prefixes<core_t>(feature, slices, scratch.prefixes);
      for_each_row_element<core_t>(feature, slices, prefix,
                                   [&](int32_t j, acc_t value) { pooled[j] += weight * value; });
      __syncthreads();
    }

    const acc_t divisor = batch.pooling_mode == PoolingMode::kMean && range.length() > 0
                              ? acc_t(range.length())
                              : acc_t(1);
    const int64_t row_offset = sample * output.row_stride + feature.output_column;
    for (int32_t j = threadIdx.x; j < row_elements(feature); j += blockDim.x) {
      store_element(output.data, output.type, row_offset + j, pooled[j] / divisor);
    }
  }
}

}  // namespace

cudaError_t launch_tt_embedding_bag(ElementType core_type, const FeatureGroup& group,
                                    const BagBatch& batch, const PooledOutput& output,
                                    const ChainPlan& plan, void* global_scratch,
                                    cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    return launch_chain_kernel(tt_embedding_bag_kernel<core_t>, plan, global_scratch, stream, group,
                               batch, output);
  });
}

}  // namespace flowtt::cuda
