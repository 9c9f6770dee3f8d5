// The gradient of one bag, brought into a block's scratch.

#pragma once

#include "chain.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {

// row[j] = grad_output[sample, column of the feature + j], divided by the bag's length for mean
// pooling: the gradient with respect to the unweighted row of each lookup. The barrier before the
// first read is that of expand_prefixes; thread t writes only the elements it also reads in
// for_each_row_element.
template <typename acc_t>
__device__ __forceinline__ void load_grad_row(const BagBatch& batch, const TTFeature& feature,
                                              const StridedMatrix& grad_output, int64_t sample,
                                              BagRange range, acc_t* row) {
  const acc_t divisor = batch.pooling_mode == PoolingMode::kMean ? acc_t(range.length()) : acc_t(1);
  const int64_t row_offset = sample * grad_output.row_stride;
  for (int32_t j = threadIdx.x; j < row_elements(feature); j += blockDim.x) {
    const int64_t column = feature.output_column + j;
    row[j] = load_element<acc_t>(grad_output.data, grad_output.type,
                                 row_offset + column * grad_output.column_stride) /
             divisor;
  }
}

}  // namespace flowtt::cuda
