// Backward: core gradients, the chain recomputed per lookup.
//
// The per-sample weight enters only where a gradient leaves the block. U_{k-1} (chain_gradient.cuh)
// overwrites P_{k-1}, which nothing reads again.

#include "chain_gradient.cuh"
#include "chain_launch.cuh"
#include "grad_row.cuh"

namespace flowtt::cuda {
namespace {

template <typename acc_t>
__device__ __forceinline__ acc_t* gradient_slice(const TTFeature& feature, const RowSlices& slices,
                                                 int k) {
  return static_cast<acc_t*>(feature.core_gradients[k]) +
         slices.digit[k] * feature.levels[k].slice_numel;
}

// Walks from the last core to the first. `prefix` is P_{d-1}. Begins and ends with a barrier.
template <typename core_t, typename acc_t>
__device__ __forceinline__ void backpropagate_row(const TTFeature& feature, const RowSlices& slices,
                                                  const acc_t* grad_row, acc_t* prefix,
                                                  acc_t weight) {
  Upstream<acc_t> upstream{grad_row, 1};
  __syncthreads();
#pragma unroll
  for (int k = kMaxCores - 1; k > 0; --k) {
    if (k >= feature.num_cores) continue;
    const ChainLevel& level = feature.levels[k];
    const core_t* slice =
        static_cast<const core_t*>(feature.cores[k]) + slices.digit[k] * level.slice_numel;
    acc_t* const gradient = gradient_slice<acc_t>(feature, slices, k);
    for_each_gradient(prefix, upstream, level,
                      [&](int32_t e, acc_t sum) { atomicAdd(gradient + e, weight * sum); });
    __syncthreads();
    replace_by_gradient(prefix, upstream, slice, level);
    __syncthreads();
    upstream = {prefix, feature.levels[k - 1].stride};
    if (k > 1) prefix -= feature.levels[k - 2].prefix_elements;
  }
  acc_t* const gradient = gradient_slice<acc_t>(feature, slices, 0);
  for_each_first_gradient(upstream, feature.levels[0],
                          [&](int32_t e, acc_t sum) { atomicAdd(gradient + e, weight * sum); });
  __syncthreads();
}

// Every lookup of a slice writes the same 1, so the race between blocks is harmless.
__device__ __forceinline__ void mark_touched(const TTFeature& feature, const RowSlices& slices) {
#pragma unroll
  for (int k = 0; k < kMaxCores; ++k) {
    if (k < feature.num_cores && feature.touched[k] != nullptr && threadIdx.x == k) {
      feature.touched[k][slices.digit[k]] = 1;
    }
  }
}

template <typename core_t, ScratchPlace kPlace>
__global__ void __launch_bounds__(kMaxBlockThreads,
                                  kChainThreadsPerMultiprocessor / kMaxBlockThreads)
    tt_embedding_bag_backward_kernel(const __grid_constant__ FeatureGroup group,
                                     const __grid_constant__ BagBatch batch,
                                     const __grid_constant__ StridedMatrix grad_output,
                                     const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t, kPlace>(chain_scratch);

  for_each_lookup(group, batch, grad_output, scratch,
                  [&](const TTFeature& feature, int64_t row_id, int64_t position) {
                    const RowSlices slices = locate_slices(feature, row_id);
                    mark_touched(feature, slices);
                    acc_t* prefix = expand_prefixes<core_t>(feature, row_id, scratch.prefixes);
                    backpropagate_row<core_t>(feature, slices, scratch.row, prefix,
                                              load_sample_weight<acc_t>(batch, position));
                  });
}

}  // namespace

cudaError_t launch_tt_embedding_bag_backward(ElementType core_type, const FeatureGroup& group,
                                             const BagBatch& batch,
                                             const StridedMatrix& grad_output,
                                             const ChainPlan& plan, void* global_scratch,
                                             cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    const auto kernel = plan.global_bytes == 0
                            ? tt_embedding_bag_backward_kernel<core_t, ScratchPlace::kShared>
                            : tt_embedding_bag_backward_kernel<core_t, ScratchPlace::kGlobal>;
    return launch_chain_kernel(kernel, plan, global_scratch, stream, group, batch, grad_output);
  });
}

}  // namespace flowtt::cuda
