// Gradient with respect to the per-sample weights: <grad of the bag, row> per lookup.

#include "chain.cuh"
#include "chain_launch.cuh"
#include "grad_row.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {
namespace {

template <typename core_t>
__global__ void __launch_bounds__(kMaxBlockThreads)
    tt_embedding_bag_weights_grad_kernel(const __grid_constant__ FeatureGroup group,
                                         const __grid_constant__ BagBatch batch,
                                         const __grid_constant__ StridedMatrix grad_output,
                                         void* weights_grad,
                                         const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t>(chain_scratch);

  const int64_t num_bags = group.count * batch.batch_size;
  for (int64_t bag = blockIdx.x; bag < num_bags; bag += gridDim.x) {
    const TTFeature& feature = group.features[bag / batch.batch_size];
    const int64_t sample = bag % batch.batch_size;
    const BagRange range = load_bag(batch, feature, sample);
    if (range.length() == 0) continue;
    load_grad_row(batch, feature, grad_output, sample, range, scratch.row);

    for (int64_t position = range.begin; position < range.end; ++position) {
      const RowSlices slices = locate_slices(feature, load_row_id(batch, feature, position));
      const acc_t* prefix = expand_prefixes<core_t>(feature, slices, scratch.prefixes);
      acc_t partial = 0;
      for_each_row_element<core_t>(feature, slices, prefix, [&](int32_t j, acc_t value) {
        partial += scratch.row[j] * value;
      });
      const acc_t sum = block_sum(partial, scratch.reduction);
      if (threadIdx.x == 0) static_cast<acc_t*>(weights_grad)[position] = sum;
      __syncthreads();
    }
  }
}

}  // namespace

cudaError_t launch_tt_embedding_bag_weights_grad(ElementType core_type, const FeatureGroup& group,
                                                 const BagBatch& batch,
                                                 const StridedMatrix& grad_output,
                                                 void* weights_grad, const ChainPlan& plan,
                                                 void* global_scratch, cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    return launch_chain_kernel(tt_embedding_bag_weights_grad_kernel<core_t>, plan, global_scratch,
                               stream, group, batch, grad_output, weights_grad);
  });
}

}  // namespace flowtt::cuda
