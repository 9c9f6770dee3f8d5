// Backward: core gradients, the chain recomputed per lookup.
//
// With U_k the gradient of P_k (U_d is the bag's gradient row), read as the (Q_{k-1} x q_k r_k)
// matrix of chain.cuh,
//
//     grad G_k[i_k] += w * P_{k-1}^T U_k          U_{k-1} = U_k G_k[i_k]^T
//
// for k = d ... 2, and grad G_1[i_1] += w * U_1. The per-sample weight w enters only where a
// gradient leaves the block. U_{k-1} overwrites P_{k-1}, which nothing reads again.

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

// U_k, (rows x columns) of a level: in the layout of P_k, or a contiguous row for the last core.
template <typename acc_t>
struct Upstream {
  const acc_t* data;
  int32_t stride;  // from one of its Q_k rows of `rank` elements to the next

  // Where element (0, column) lies.
  __device__ __forceinline__ int32_t offset(const ChainLevel& level, int32_t column) const {
    return column + divide(static_cast<uint32_t>(column), level.by_rank) * (stride - level.rank);
  }
};

// Adds w * prefix^T @ upstream, prefix (rows x inner), upstream (rows x columns), into `gradient`.
template <typename acc_t>
__device__ __forceinline__ void accumulate_core_gradient(acc_t* gradient, const acc_t* prefix,
                                                         const Upstream<acc_t>& upstream,
                                                         acc_t weight, const ChainLevel& level) {
  const int32_t prefix_row = prefix_stride<acc_t>(level.inner);
  const int32_t upstream_row = level.q * upstream.stride;
  for (int32_t e = threadIdx.x; e < level.slice_numel; e += blockDim.x) {
    const int32_t a = e / level.columns;
    const acc_t* left = prefix + a;
    const acc_t* right = upstream.data + upstream.offset(level, e - a * level.columns);
    acc_t sum = 0;
    for (int32_t m = 0; m < level.rows; ++m) sum += left[m * prefix_row] * right[m * upstream_row];
    atomicAdd(gradient + e, weight * sum);
  }
}

// prefix = upstream @ right^T, right (inner x columns) in global memory.
template <typename core_t, typename acc_t>
__device__ __forceinline__ void replace_by_gradient(acc_t* prefix, const Upstream<acc_t>& upstream,
                                                    const core_t* right, const ChainLevel& level) {
  const int32_t prefix_row = prefix_stride<acc_t>(level.inner);
  for (int32_t e = threadIdx.x; e < level.rows * level.inner; e += blockDim.x) {
    const int32_t m = e / level.inner;
    const int32_t a = e - m * level.inner;
    const core_t* slice_row = right + a * level.columns;
    const acc_t* upstream_row = upstream.data + m * level.q * upstream.stride;
    acc_t sum = 0;
    for (int32_t j = 0; j < level.q; ++j) {
      for (int32_t s = 0; s < level.rank; ++s) {
        sum += upstream_row[j * upstream.stride + s] *
               to_accumulator<acc_t>(slice_row[j * level.rank + s]);
      }
    }
    prefix[m * prefix_row + a] = sum;
  }
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
    accumulate_core_gradient(gradient_slice<acc_t>(feature, slices, k), prefix, upstream, weight,
                             level);
    __syncthreads();
    replace_by_gradient(prefix, upstream, slice, level);
    __syncthreads();
    upstream = {prefix, feature.levels[k - 1].stride};
    if (k > 1) prefix -= feature.levels[k - 2].prefix_elements;
  }
  const ChainLevel& first = feature.levels[0];
  acc_t* gradient = gradient_slice<acc_t>(feature, slices, 0);
  for (int32_t e = threadIdx.x; e < first.columns; e += blockDim.x) {
    atomicAdd(gradient + e, weight * upstream.data[upstream.offset(first, e)]);
  }
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
