// Gradient with respect to the per-sample weights: <grad of the bag, row> per lookup.

#include "chain_launch.cuh"
#include "grad_row.cuh"

namespace flowtt::cuda {
namespace {

template <typename acc_t>
struct RowDotProduct {
  int32_t columns;  // of the last core
  const acc_t* grad_row;
  acc_t& sum;

  template <int kColumns>
  __device__ __forceinline__ void operator()(const ProductVector<acc_t, kColumns>& vector) const {
    acc_t gradients[kColumns];
    load_accumulators(gradients, grad_row + vector.row * columns + vector.column);
#pragma unroll
    for (int v = 0; v < kColumns; ++v) sum += gradients[v] * vector.values[v];
  }
};

template <typename core_t, ScratchPlace kPlace>
__global__ void __launch_bounds__(kMaxBlockThreads,
                                  kChainThreadsPerMultiprocessor / kMaxBlockThreads)
    tt_embedding_bag_weights_grad_kernel(const __grid_constant__ FeatureGroup group,
                                         const __grid_constant__ BagBatch batch,
                                         const __grid_constant__ StridedMatrix grad_output,
                                         void* weights_grad,
                                         const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t, kPlace>(chain_scratch);

  for_each_lookup(group, batch, grad_output, scratch,
                  [&](const TTFeature& feature, int64_t row_id, int64_t position) {
                    acc_t partial = 0;
                    const RowDotProduct<acc_t> dot{feature.levels[feature.num_cores - 1].columns,
                                                   scratch.row, partial};
                    expand_row<core_t, TileColumns::kVectorOrOne>(feature, row_id, scratch.prefixes,
                                                                  dot);
                    const acc_t sum = block_sum(partial, scratch.reduction);
                    if (threadIdx.x == 0) static_cast<acc_t*>(weights_grad)[position] = sum;
                    __syncthreads();
                  });
}

}  // namespace

cudaError_t launch_tt_embedding_bag_weights_grad(ElementType core_type, const FeatureGroup& group,
                                                 const BagBatch& batch,
                                                 const StridedMatrix& grad_output,
                                                 void* weights_grad, const ChainPlan& plan,
                                                 void* global_scratch, cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    const auto kernel = plan.global_bytes == 0
                            ? tt_embedding_bag_weights_grad_kernel<core_t, ScratchPlace::kShared>
                            : tt_embedding_bag_weights_grad_kernel<core_t, ScratchPlace::kGlobal>;
    return launch_chain_kernel(kernel, plan, global_scratch, stream, group, batch, grad_output,
                               weights_grad);
  });
}

}  // namespace flowtt::cuda
