// Gradients of one core, slice by slice, without atomics: every sum has one order.
//
// The lookups of a range, sorted by slice, are cut into pieces of one length, a block's work each.
//
//     slices    a a a a b b │ b b b b b b │ b c c d d d │ d d - -
//     pieces         0             1             2           3
//
// A piece adds to the gradient of a slice whose first lookup it has; what it begins with of a slice
// that is carried over from the piece before (b in 1 and 2, d in 3) it sums in a place of its own.
// These sums are added to the gradient afterwards, in the order of the pieces. So every element has
// one writer at a time, whatever runs first.

#pragma once

#include "chain_gradient.cuh"
#include "grad_row.cuh"
#include "slice_lookups.cuh"

namespace flowtt::cuda {

constexpr int64_t kNotCarried = -1;

// `acc_t` accumulators of `sums` belong to a piece, from piece * sum_elements on.
struct SlicePieces {
  const uint64_t* lookups;  // sorted by slice
  int32_t lookup_count;
  int32_t length;
  int32_t count;
  void* sums;
  int64_t sum_elements;

  __device__ __forceinline__ int64_t slice(int32_t i) const {
    return static_cast<int64_t>(lookups[i] >> kLookupBits);
  }
  __device__ __forceinline__ int32_t lookup(int32_t i) const {
    return static_cast<int32_t>(lookups[i] & (kMaxLookupsPerRange - 1));
  }
  __device__ __forceinline__ int32_t begin(int32_t piece) const { return piece * length; }
  __device__ __forceinline__ int32_t end(int32_t piece) const {
    return min(begin(piece) + length, lookup_count);
  }
  // The slice that a piece begins with, if the piece before it ends with it.
  __device__ __forceinline__ int64_t carried(int32_t piece) const {
    if (piece == 0) return kNotCarried;
    const int64_t first = slice(begin(piece));
    return first == slice(begin(piece) - 1) ? first : kNotCarried;
  }
  template <typename acc_t>
  __device__ __forceinline__ acc_t* sum(int32_t piece) const {
    return static_cast<acc_t*>(sums) + piece * sum_elements;
  }
};

template <typename acc_t>
__device__ __forceinline__ acc_t* gradient_of_slice(const TTFeature& feature, int k,
                                                    int64_t digit) {
  return static_cast<acc_t*>(feature.core_gradients[k]) + digit * feature.levels[k].slice_numel;
}

// What a warp has to know of 32 lookups, one in each lane.
template <typename acc_t>
struct LookupLanes {
  int64_t slice;
  int64_t row_id;
  LookupOwner owner;
  int64_t bag_length;  // of mean pooling
  acc_t weight;

  // Lookup i of those that are sorted, the slice that stands for none from `end` on.
  static __device__ __forceinline__ LookupLanes
  load(const FeatureGroup& group, const BagBatch& batch, const SliceNumbers& numbers,
       const LookupRange& range, const SlicePieces& pieces, int32_t i, int32_t end) {
    LookupLanes lane{numbers.end, 0, {0, kNobody}, 1, acc_t(1)};
    if (i >= end || pieces.slice(i) == numbers.end) return lane;
    const int32_t lookup = pieces.lookup(i);
    const int64_t position = range.first + lookup;
    lane.slice = pieces.slice(i);
    lane.row_id = load_index(batch.indices, batch.indices_are_int64, position);
    lane.owner = range.owners[lookup];
    lane.weight = load_sample_weight<acc_t>(batch, position);
    if (batch.pooling_mode == PoolingMode::kMean) {
      const TTFeature& feature = group.features[lane.owner.feature];
      const int64_t bag = feature.feature * batch.batch_size + lane.owner.sample;
      lane.bag_length = load_bags(batch, bag, bag + 1).length();
    }
    return lane;
  }

  // Lane i's, in all lanes.
  __device__ __forceinline__ LookupLanes of(int i) const {
    constexpr unsigned kWarp = 0xffffffffu;
    return {__shfl_sync(kWarp, slice, i),
            __shfl_sync(kWarp, row_id, i),
            {__shfl_sync(kWarp, owner.sample, i), __shfl_sync(kWarp, owner.feature, i)},
            __shfl_sync(kWarp, bag_length, i),
            __shfl_sync(kWarp, weight, i)};
  }
};

// Calls consume(element, gradient without the weight) for the slice of core k that a lookup reads.
// grad_row is complete; ends with the threads in any order.
template <typename core_t, typename acc_t, typename Consume>
__device__ __forceinline__ void differentiate_slice(const TTFeature& feature, int64_t row_id, int k,
                                                    const acc_t* grad_row, acc_t* prefixes,
                                                    Consume&& consume) {
  // P_k is needed of the left side, of the right one U_{k+1}, which takes P_{k+1}'s place.
  const acc_t* prefix = prefixes;
  if (k > 0) {
    prefix = expand_chain<core_t, TileColumns::kVectorOrOne>(feature, row_id, k + 1, prefixes,
                                                             ConsumeNothing{});
  }
  acc_t* place = prefixes;
  for (int j = 0; j + 2 < feature.num_cores; ++j) place += feature.levels[j].prefix_elements;
  Upstream<acc_t> upstream{grad_row, 1};
#pragma unroll 1
  for (int j = feature.num_cores - 1; j > k; --j) {
    const ChainLevel& level = feature.levels[j];
    const core_t* slice = static_cast<const core_t*>(feature.cores[j]) +
                          locate_slice(feature, row_id, j) * level.slice_numel;
    replace_by_gradient(place, upstream, slice, level);
    __syncthreads();
    upstream = {place, feature.levels[j - 1].stride};
    if (j > 1) place -= feature.levels[j - 2].prefix_elements;
  }
  if (k == 0) {
    for_each_first_gradient(upstream, feature.levels[0], consume);
  } else {
    if (k == feature.num_cores - 1) __syncthreads();  // no other since the prefix
    for_each_gradient(prefix, upstream, feature.levels[k], consume);
  }
}

template <typename core_t, ScratchPlace kPlace>
__global__ void __launch_bounds__(kMaxBlockThreads,
                                  kChainThreadsPerMultiprocessor / kMaxBlockThreads)
    slice_gradients_kernel(const __grid_constant__ FeatureGroup group,
                           const __grid_constant__ BagBatch batch,
                           const __grid_constant__ StridedMatrix grad_output,
                           const __grid_constant__ SliceNumbers numbers,
                           const __grid_constant__ LookupRange range,
                           const __grid_constant__ SlicePieces pieces, int k,
                           const __grid_constant__ ChainScratch chain_scratch) {
  using acc_t = accumulator_t<core_t>;
  const BlockScratch<acc_t> scratch = block_scratch<acc_t, kPlace>(chain_scratch);
  for (int32_t piece = blockIdx.x; piece < pieces.count; piece += gridDim.x) {
    const int64_t carried = pieces.carried(piece);
    const int32_t begin = pieces.begin(piece);
    const int32_t end = pieces.end(piece);
    for (int32_t first = begin; first < end; first += kWarpSize) {
      const auto lanes = LookupLanes<acc_t>::load(group, batch, numbers, range, pieces,
                                                  first + threadIdx.x % kWarpSize, end);
      for (int32_t i = first; i < min(first + kWarpSize, end); ++i) {
        const LookupLanes<acc_t> lookup = lanes.of(i - first);
        if (lookup.slice == numbers.end) break;
        const TTFeature& feature = group.features[lookup.owner.feature];
        load_grad_row(batch, feature, grad_output, lookup.owner.sample,
                      BagRange{0, lookup.bag_length}, scratch.row);
        __syncthreads();
        const bool is_carried = lookup.slice == carried;
        const bool is_first = is_carried && i == begin;
        acc_t* const sums =
            is_carried ? pieces.sum<acc_t>(piece)
                       : gradient_of_slice<acc_t>(
                             feature, k, lookup.slice - numbers.first[lookup.owner.feature]);
        differentiate_slice<core_t>(feature, lookup.row_id, k, scratch.row, scratch.prefixes,
                                    [&](int32_t e, acc_t gradient) {
                                      const acc_t before = is_first ? acc_t(0) : sums[e];
                                      sums[e] = before + lookup.weight * gradient;
                                    });
        __syncthreads();
      }
    }
  }
}

// Adds the pieces' sums to the gradients. Blocks of one blockIdx.x share the elements of a slice.
template <typename acc_t>
__global__ void __launch_bounds__(kSliceThreads)
    carried_sums_kernel(const __grid_constant__ FeatureGroup group,
                        const __grid_constant__ SliceNumbers numbers,
                        const __grid_constant__ LookupRange range,
                        const __grid_constant__ SlicePieces pieces, int k) {
  for (int32_t piece = 1 + blockIdx.x; piece < pieces.count; piece += gridDim.x) {
    const int64_t slice = pieces.carried(piece);
    // The first that a slice is carried into adds all of them.
    if (slice == kNotCarried || slice == numbers.end || slice == pieces.carried(piece - 1)) {
      continue;
    }
    int32_t end = piece + 1;
    for (int32_t beyond = pieces.count; end < beyond;) {
      const int32_t middle = end + (beyond - end) / 2;
      if (pieces.slice(pieces.begin(middle)) == slice) {
        end = middle + 1;
      } else {
        beyond = middle;
      }
    }
    const int32_t f = range.owners[pieces.lookup(pieces.begin(piece))].feature;
    const TTFeature& feature = group.features[f];
    acc_t* const gradient = gradient_of_slice<acc_t>(feature, k, slice - numbers.first[f]);
    for (int64_t e = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
         e < feature.levels[k].slice_numel; e += static_cast<int64_t>(gridDim.y) * blockDim.x) {
      acc_t sum = gradient[e];
#pragma unroll 8
      for (int32_t carried = piece; carried < end; ++carried) sum += pieces.sum<acc_t>(carried)[e];
      gradient[e] = sum;
    }
  }
}

}  // namespace flowtt::cuda
