// The gradients of the chain of one row, worked by one thread block.
//
// With U_k the gradient of P_k (U_d is the bag's gradient row), read as the (Q_{k-1} x q_k r_k)
// matrix of chain.cuh,
//
//     grad G_k[i_k] += w * P_{k-1}^T U_k          U_{k-1} = U_k G_k[i_k]^T
//
// for k = d ... 2, and grad G_1[i_1] += w * U_1, with the per-sample weight w.

#pragma once

#include "chain.cuh"

namespace flowtt::cuda {

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

// Calls consume(element of the slice, its gradient without the weight), with the elements of
// prefix^T @ upstream, prefix (rows x inner), upstream (rows x columns). An element always comes to
// the same thread.
template <typename acc_t, typename Consume>
__device__ __forceinline__ void for_each_gradient(const acc_t* prefix,
                                                  const Upstream<acc_t>& upstream,
                                                  const ChainLevel& level, Consume&& consume) {
  const int32_t prefix_row = prefix_stride<acc_t>(level.inner);
  const int32_t upstream_row = level.q * upstream.stride;
  for (int32_t e = threadIdx.x; e < level.slice_numel; e += blockDim.x) {
    const int32_t a = e / level.columns;
    const acc_t* left = prefix + a;
    const acc_t* right = upstream.data + upstream.offset(level, e - a * level.columns);
    acc_t sum = 0;
    for (int32_t m = 0; m < level.rows; ++m) sum += left[m * prefix_row] * right[m * upstream_row];
    consume(e, sum);
  }
}

// The same for the first core, whose slice is P_1.
template <typename acc_t, typename Consume>
__device__ __forceinline__ void for_each_first_gradient(const Upstream<acc_t>& upstream,
                                                        const ChainLevel& first,
                                                        Consume&& consume) {
  for (int32_t e = threadIdx.x; e < first.columns; e += blockDim.x) {
    consume(e, upstream.data[upstream.offset(first, e)]);
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

}  // namespace flowtt::cuda
