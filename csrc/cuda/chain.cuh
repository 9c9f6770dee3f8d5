// The tensor-train chain of one row, worked by one thread block.
//
// row(i) = G_1[i_1] G_2[i_2] ... G_d[i_d]. The prefix product P_k, of shape (q_1 ... q_k) x r_k,
// follows from P_{k-1} by one row-major matrix product,
//
//     P_k as (Q_{k-1} x q_k r_k)  =  P_{k-1} (Q_{k-1} x r_{k-1})  @  G_k[i_k] (r_{k-1} x q_k r_k),
//
// with Q_{k-1} = q_1 ... q_{k-1}, so no level ever needs a transposition. P_1 ... P_{d-1} lie one
// after the other in the block's scratch; P_d is the row itself and is never stored.

#pragma once

#include "float_types.cuh"

namespace flowtt::cuda {

constexpr int kWarpSize = 32;
constexpr int kMaxBlockThreads = 256;

// Slots at the head of the scratch for sums over the block.
constexpr int kReductionSlots = kMaxBlockThreads / kWarpSize;

// A block's scratch: reduction slots, one row of D values, then the prefix products. The places do
// not depend on the feature, so a thread still at work on one bag never sees its row overwritten by
// a faster thread's prefixes of the next.
template <typename acc_t>
struct BlockScratch {
  acc_t* reduction;
  acc_t* row;
  acc_t* prefixes;
};

template <typename acc_t>
__device__ __forceinline__ BlockScratch<acc_t> block_scratch(const ChainScratch& scratch) {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  acc_t* base = scratch.global == nullptr
                    ? reinterpret_cast<acc_t*>(dynamic_shared_memory)
                    : static_cast<acc_t*>(scratch.global) + blockIdx.x * scratch.elements_per_block;
  return {base, base + kReductionSlots, base + kReductionSlots + scratch.row_elements};
}

// One level of a chain as the product (rows x inner) @ (inner x columns): core k's slice is
// (inner x columns), columns = q_k r_k. 32 bits are enough: plan_chain refuses larger levels.
struct Level {
  int32_t inner;
  int32_t q;
  int32_t columns;
};

__device__ __forceinline__ Level level(const TTFeature& feature, int k) {
  const int32_t q = static_cast<int32_t>(feature.shape.q[k]);
  return {static_cast<int32_t>(feature.shape.r[k]), q,
          q * static_cast<int32_t>(feature.shape.r[k + 1])};
}

__device__ __forceinline__ int32_t row_elements(const TTFeature& feature) {
  return static_cast<int32_t>(feature.shape.embedding_dim);
}

// Where the slices of one row start. The loops over cores are unrolled with an early exit, so that
// the array is only ever indexed by constants and stays in registers.
struct RowSlices {
  int64_t digit[kMaxCores];

  __device__ __forceinline__ int64_t offset(const TTFeature& feature, int k) const {
    return digit[k] * feature.shape.slice_numel(k);
  }
};

// Mixed-radix digits of a row id, i_1 most significant.
__device__ __forceinline__ RowSlices locate_slices(const TTFeature& feature, int64_t row_id) {
  RowSlices slices;
#pragma unroll
  for (int k = kMaxCores - 1; k >= 0; --k) {
    slices.digit[k] = 0;
    if (k < feature.shape.num_cores) {
      slices.digit[k] = row_id % feature.shape.p[k];
      row_id /= feature.shape.p[k];
    }
  }
  return slices;
}

template <typename core_t>
__device__ __forceinline__ const core_t* slice(const TTFeature& feature, const RowSlices& slices,
                                               int k) {
  return static_cast<const core_t*>(feature.cores[k]) + slices.offset(feature, k);
}

// One element of left (rows x inner) @ right (inner x columns), `right` in global memory.
template <typename core_t, typename acc_t>
__device__ __forceinline__ acc_t product_element(const acc_t* left, const core_t* right,
                                                 int32_t row, int32_t column, int32_t inner,
                                                 int32_t columns) {
  acc_t sum = 0;
  for (int32_t a = 0; a < inner; ++a) {
    sum += left[row * inner + a] * to_accumulator<acc_t>(right[a * columns + column]);
  }
  return sum;
}

// Fills P_1 ... P_{d-1} and returns P_{d-1}. Ends with a barrier. The caller puts a barrier
// between its last read of the prefixes and the next call.
template <typename core_t, typename acc_t>
__device__ __forceinline__ const acc_t* expand_prefixes(const TTFeature& feature,
                                                        const RowSlices& slices, acc_t* prefixes) {
  const core_t* first = slice<core_t>(feature, slices, 0);
  const int32_t first_numel = level(feature, 0).columns;
  for (int32_t e = threadIdx.x; e < first_numel; e += blockDim.x) {
    prefixes[e] = to_accumulator<acc_t>(first[e]);
  }
  __syncthreads();

  const acc_t* previous = prefixes;
  int32_t rows = level(feature, 0).q;
#pragma unroll
  for (int k = 1; k < kMaxCores - 1; ++k) {
    if (k >= feature.shape.num_cores - 1) break;
    const auto [inner, q, columns] = level(feature, k);
    const core_t* right = slice<core_t>(feature, slices, k);
    acc_t* product = const_cast<acc_t*>(previous) + rows * inner;
    for (int32_t e = threadIdx.x; e < rows * columns; e += blockDim.x) {
      product[e] = product_element(previous, right, e / columns, e % columns, inner, columns);
    }
    __syncthreads();
    previous = product;
    rows *= q;
  }
  return previous;
}

// Calls consume(column, value) for every element of the row, given P_{d-1}.
template <typename core_t, typename acc_t, typename Consume>
__device__ __forceinline__ void for_each_row_element(const TTFeature& feature,
                                                     const RowSlices& slices, const acc_t* prefix,
                                                     Consume&& consume) {
#pragma unroll
  for (int k = 1; k < kMaxCores; ++k) {
    if (k != feature.shape.num_cores - 1) continue;
    const auto [inner, q, columns] = level(feature, k);
    const core_t* right = slice<core_t>(feature, slices, k);
    for (int32_t e = threadIdx.x; e < row_elements(feature); e += blockDim.x) {
      consume(e, product_element(prefix, right, e / columns, e % columns, inner, columns));
    }
  }
}

// Sum over the block, valid in thread 0. Begins and ends with the threads in any order; the caller
// needs a barrier before the slots are used again.
template <typename acc_t>
__device__ __forceinline__ acc_t block_sum(acc_t value, acc_t* slots) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % kWarpSize == 0) slots[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  acc_t sum = 0;
  if (threadIdx.x == 0) {
    for (unsigned warp = 0; warp < blockDim.x / kWarpSize; ++warp) sum += slots[warp];
  }
  return sum;
}

}  // namespace flowtt::cuda
