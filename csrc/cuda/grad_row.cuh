// The lookups of a launch together with the gradients of their rows, for the kernels that follow
// the output backwards.

#pragma once

#include "bag_loop.cuh"

namespace flowtt::cuda {

// row[j] = grad_output[sample, column of the feature + j], divided by the bag's length for mean
// pooling: the gradient with respect to the unweighted row of each lookup. The caller has a barrier
// before the first read.
template <typename acc_t>
__device__ __forceinline__ void load_grad_row(const BagBatch& batch, const TTFeature& feature,
                                              const StridedMatrix& grad_output, int64_t sample,
                                              BagRange range, acc_t* row) {
  const acc_t divisor = batch.pooling_mode == PoolingMode::kMean ? acc_t(range.length()) : acc_t(1);
  const int64_t row_offset = sample * grad_output.row_stride;
  for (int32_t j = threadIdx.x; j < feature.embedding_dim; j += blockDim.x) {
    const int64_t column = feature.output_column + j;
    row[j] = load_element<acc_t>(grad_output.data, grad_output.type,
                                 row_offset + column * grad_output.column_stride) /
             divisor;
  }
}

// Calls work(feature, row_id, position) for every lookup of this block, with the gradient of its
// row in scratch.row. The barriers are the caller's: `work` must have one before it reads the row,
// and end with one.
template <typename acc_t, typename Work>
__device__ __forceinline__ void for_each_lookup(const FeatureGroup& group, const BagBatch& batch,
                                                const StridedMatrix& grad_output,
                                                const BlockScratch<acc_t>& scratch, Work&& work) {
  for_each_bag(group, batch, [&](const TTFeature& feature, int64_t sample, BagRange range) {
    if (range.length() == 0) return;
    load_grad_row(batch, feature, grad_output, sample, range, scratch.row);
    for_each_row_id(feature, batch, range,
                    [&](int64_t row_id, int64_t position) { work(feature, row_id, position); });
  });
}

}  // namespace flowtt::cuda
