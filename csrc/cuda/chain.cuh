// The tensor-train chain of one row, worked by one thread block.
//
// row(i) = G_1[i_1] G_2[i_2] ... G_d[i_d]. The prefix product P_k, of shape (q_1 ... q_k) x r_k,
// follows from P_{k-1} by one row-major matrix product,
//
//     P_k as (Q_{k-1} x q_k r_k)  =  P_{k-1} (Q_{k-1} x r_{k-1})  @  G_k[i_k] (r_{k-1} x q_k r_k),
//
// with Q_{k-1} = q_1 ... q_{k-1}, so no level ever needs a transposition. P_1 ... P_{d-1} lie one
// after the other in the block's scratch, laid out as in chain_layout.h; P_d is the row itself and
// never leaves the registers of its threads. level_product.cuh has the products.

#pragma once

#include "chain_layout.h"
#include "float_types.cuh"
#include "level_product.cuh"

namespace flowtt::cuda {

constexpr int kWarpSize = 32;

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

// Where the scratch lies is fixed at compile time: accesses to shared memory are then known as
// such.
template <typename acc_t, ScratchPlace kPlace>
__device__ __forceinline__ BlockScratch<acc_t> block_scratch(const ChainScratch& scratch) {
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  acc_t* base;
  if constexpr (kPlace == ScratchPlace::kShared) {
    base = reinterpret_cast<acc_t*>(dynamic_shared_memory);
  } else {
    base = static_cast<acc_t*>(scratch.global) +
           (blockIdx.y * static_cast<int64_t>(gridDim.x) + blockIdx.x) * scratch.elements_per_block;
  }
  return {base, base + kReductionSlots, base + kReductionSlots + scratch.row_elements};
}

// The digits of one row's id, i_1 most significant. The loops over cores are unrolled with an early
// exit, so that the array is only ever indexed by constants and stays in registers.
struct RowSlices {
  int64_t digit[kMaxCores];
};

__device__ __forceinline__ RowSlices locate_slices(const TTFeature& feature, int64_t row_id) {
  RowSlices slices;
  uint64_t rest = static_cast<uint64_t>(row_id);
#pragma unroll
  for (int k = 0; k < kMaxCores; ++k) {
    slices.digit[k] = 0;
    if (k < feature.num_cores) {
      const FastDivisor& row_ids = feature.levels[k].row_ids;
      slices.digit[k] = static_cast<int64_t>(divide(rest, row_ids));
      rest -= slices.digit[k] * row_ids.divisor;
    }
  }
  return slices;
}

// Digit k alone, where the compiler does not know k.
__device__ __forceinline__ int64_t locate_slice(const TTFeature& feature, int64_t row_id, int k) {
  uint64_t rest = static_cast<uint64_t>(row_id);
  if (k > 0) {
    const FastDivisor& above = feature.levels[k - 1].row_ids;
    rest -= divide(rest, above) * above.divisor;
  }
  return static_cast<int64_t>(divide(rest, feature.levels[k].row_ids));
}

// Walks down a chain: the next digit of the id, and the slice it selects.
template <typename core_t>
struct SliceCursor {
  const TTFeature& feature;
  uint64_t rest;

  __device__ __forceinline__ const core_t* next(int k) {
    const ChainLevel& level = feature.levels[k];
    const uint64_t digit = divide(rest, level.row_ids);
    rest -= digit * level.row_ids.divisor;
    return static_cast<const core_t*>(feature.cores[k]) + digit * level.slice_numel;
  }
};

// P_1, the first core's slice, on its way to the scratch: mostly one vector a thread, which is
// stored only once the loads of the next level are under way too.
template <typename core_t, typename acc_t>
struct FirstPrefix {
  static constexpr int kVector = kVectorBytes / sizeof(acc_t);
  const ChainLevel& level;
  acc_t* prefix;
  SliceVector<core_t, kVector> words;

  __device__ __forceinline__ int32_t element() const { return threadIdx.x * kVector; }
  __device__ __forceinline__ bool fits() const {
    return level.by_vectors && level.columns <= static_cast<int32_t>(blockDim.x) * kVector;
  }
  __device__ __forceinline__ void load(const core_t* slice) {
    if (fits()) {
      words.load(slice + element(), element() < level.columns);
      return;
    }
#pragma unroll 1
    for (int32_t e = threadIdx.x; e < level.columns; e += blockDim.x) {
      write_prefix(level, prefix,
                   ProductVector<acc_t, 1>{0, e, {to_accumulator<acc_t>(__ldg(slice + e))}});
    }
  }
  __device__ __forceinline__ void store() const {
    if (!fits() || element() >= level.columns) return;
    ProductVector<acc_t, kVector> vector{0, element(), {}};
    words.unpack(vector.values);
    write_prefix(level, prefix, vector);
  }
};

// Forms P_1 ... P_{end-1} (end = d + 1: and the row) and returns the last of them that is in the
// scratch. Elements of the row are handed to `consume` (see level_product); which thread gets which
// elements depends on the feature alone. No barrier at the end, neither for the reader of the
// returned prefix nor for the next call, which writes over it.
template <typename core_t, TileColumns kTiles, typename acc_t, typename Consume>
__device__ __forceinline__ acc_t* expand_chain(const TTFeature& feature, int64_t row_id, int end,
                                               acc_t* prefixes, Consume&& consume) {
  SliceCursor<core_t> slices{feature, static_cast<uint64_t>(row_id)};
  FirstPrefix<core_t, acc_t> first{feature.levels[0], prefixes, {}};
  first.load(slices.next(0));
  acc_t* left = prefixes;
  if (end == 2) first.store();
  // One body for all levels: unrolled, the code would not stay in the instruction cache.
#pragma unroll 1
  for (int k = 1; k < end - 1; ++k) {
    const ChainLevel& level = feature.levels[k];
    const ChainLevel& above = feature.levels[k - 1];
    const bool is_row = k == feature.num_cores - 1;
    acc_t* const prefix = left + above.prefix_elements;
    level_product<kTiles, core_t>(
        level, left, above.stride, slices.next(k),
        [&] {
          if (k == 1) first.store();
        },
        [&](const auto& vector) {
          if (is_row) {
            consume(vector);
          } else {
            write_prefix(level, prefix, vector);
          }
        });
    if (is_row) break;
    left = prefix;
  }
  return left;
}

struct ConsumeNothing {
  template <typename Vector>
  __device__ __forceinline__ void operator()(const Vector&) const {}
};

// P_1 ... P_{d-1} only.
template <typename core_t, typename acc_t>
__device__ __forceinline__ acc_t* expand_prefixes(const TTFeature& feature, int64_t row_id,
                                                  acc_t* prefixes) {
  return expand_chain<core_t, TileColumns::kVectorOrOne>(feature, row_id, feature.num_cores,
                                                         prefixes, ConsumeNothing{});
}

// The row, element by element.
template <typename core_t, TileColumns kTiles, typename acc_t, typename Consume>
__device__ __forceinline__ void expand_row(const TTFeature& feature, int64_t row_id,
                                           acc_t* prefixes, Consume&& consume) {
  expand_chain<core_t, kTiles>(feature, row_id, feature.num_cores + 1, prefixes, consume);
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
