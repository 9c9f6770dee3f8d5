// Backward: core gradients, the chain recomputed per lookup.
//
// With U_k the gradient of P_k (U_d is the bag's gradient row), read as the (Q_{k-1} x q_k r_k)
// matrix of chain.cuh,
//
//     grad G_k[i_k] += w * P_{k-1}^T U_k          U_{k-1} = U_k G_k[i_k]^T
//
// for k = d ... 2, and grad G_1[i_1] += w * U_1. The per-sample weight w enters only where a
// gradient leaves the block. U_{k-1} overwrites P_{k-1}, which nothing reads again.

#include "chain.cuh"
#include "chain_launch.cuh"
#include "grad_row.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {
namespace {

template <typename acc_t>
__device__ __forceinline__ acc_t* gradient_slice(const TTFeature& feature, const RowSlices& slices,
                                                 int k) {
  return static_cast<acc_t*>(feature.core_gradients[k]) + slices.offset(feature, k);
}

// Adds w * prefix^T @ upstream, prefix (rows x inner), upstream (rows x columns), into `gradient`.
template <typename acc_t>
__device__ __forceinline__ void accumulate_core_gradient(acc_t* gradient, const acc_t* prefix,
                                                         const acc_t* upstream, acc_t weight,
                                                         int32_t rows, int32_t inner,
                                                         int32_t columns) {
  for (int32_t e = threadIdx.x; e < inner * columns; e += blockDim.x) {
    const int32_t a = e / columns;
    const int32_t c = e % columns;
    acc_t sum = 0;
    for (int32_t m = 0; m < rows; ++m) sum += prefix[m * inner + a] * upstream[m * columns + c];
    atomicAdd(gradient + e, weight * sum);
  }
}

// prefix = upstream @ right^T, right (inner x columns) in global memory.
template <typename core_t, typename acc_t>
__device__ __forceinline__ void replace_by_gradient(acc_t* prefix, const acc_t* upstream,
                                                    const core_t* right, int32_t rows,
                                                    int32_t inner, int32_t columns) {
  for (int32_t e = threadIdx.x; e < rows * inner; e += blockDim.x) {
    const int32_t m = e / inner;
    const int32_t a = e % inner;
    acc_t sum = 0;
    for (int32_t c = 0; c < columns; ++c) {
      sum += upstream[m * columns + c] * to_accumulator<acc_t>(right[a * columns + c]);
    }
    prefix[e] = sum;
  }
}

// Walks from the last core to the first. `prefix` is P_{d-1}. Ends with a barrier.
template <typename core_t, typename acc_t>
__device__ __forceinline__ void backpropagate_row(const TTFeature& feature, const RowSlices& slices,
                                                  const acc_t* grad_row, acc_t* prefix,
                                                  acc_t weight) {
  const acc_t* upstream = grad_row;
  int32_t rows = row_elements(feature);
#pragma unroll
  for (int k = kMaxCores - 1; k > 0; --k) {
    if (k >= feature.shape.num_cores) continue;
    const auto [inner, q, columns] = level(feature, k);
    rows /= q;
    accumulate_core_gradient(gradient_slice<acc_t>(feature, slices, k), prefix, upstream, weight,
                             rows, inner, columns);
    __syncthreads();
    replace_by_gradient(prefix, upstream, slice<core_t>(feature, slices, k), rows, inner, columns);
    __syncthreads();
    upstream = prefix;
    if (k > 1) {
      const Level below = level(feature, k - 1);
      prefix -= rows / below.q * below.inner;
    }
  }
  acc_t* gradient = gradient_slice<acc_t>(feature, slices, 0);
  for (int32_t e = threadIdx.x; e < level(feature, 0).columns; e += blockDim.x) {
    atomicAdd(gradient + e, weight * upstream[e]);
  }
  __syncthreads();
}

// Every lookup of a slice writes the same 1, so the race between blocks is harmless.
__device__ __forceinline__ void mark_touched(const TTFeature& feature, const RowSlices& slices) {
#pragma unroll
  for (int k = 0; k < kMaxCores; ++k) {
    if (k < feature.shape.num_cores && feature.touched[k] != nullptr && threadIdx.x == k) {
      feature.touched[k][slices.digit[k]] = 1;
    }
  }
}

template <typename core_t>
__global__ void __launch_bounds__(kMaxBlockThreads)
    tt_embedding_bag_backward_kernel(const __grid_constant__ FeatureGroup group,
                                     const __grid_constant__ BagBatch batch,
                                     const __grid_constant__ StridedMatrix grad_output,
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
      const acc_t weight = load_sample_weight<acc_t>(batch, position);
      mark_touched(feature, slices);
      const acc_t* prefix = expand_prefixes<core_t>(feature, slices, scratch.prefixes);
      backpropagate_row<core_t>(feature, slices, scratch.row, const_cast<acc_t*>(prefix), weight);
    }
  }
}

}  // namespace

cudaError_t launch_tt_embedding_bag_backward(ElementType core_type, const FeatureGroup& group,
                                             const BagBatch& batch,
                                             const StridedMatrix& grad_output,
                                             const ChainPlan& plan, void* global_scratch,
                                             cudaStream_t stream) {
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    return launch_chain_kernel(tt_embedding_bag_backward_kernel<core_t>, plan, global_scratch,
                               stream, group, batch, grad_output);
  });
}

}  // namespace flowtt::cuda
