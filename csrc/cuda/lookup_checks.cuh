// Bounds checks of the lookups. A bad id or offset must never become an out-of-bounds access, and
// the host cannot look at it without synchronising, so the block that meets it prints one line and
// traps; the program sees a CUDA launch failure at its next synchronisation.
//
// trap_on_... is called by all threads of a block with the same arguments, print_... by one thread.

#pragma once

#include <cstdio>

#include "float_types.cuh"

namespace flowtt::cuda {

struct BagRange {
  int64_t begin;
  int64_t end;
  __device__ int64_t length() const { return end - begin; }
};

inline __device__ __noinline__ void print_bad_bag(const TTFeature& feature, int64_t sample,
                                                  BagRange range, int64_t nnz) {
  printf(
      "flowtt: offsets of feature %d (table %d), bag %lld: [%lld, %lld) is not a range of the "
      "%lld indices; offsets must start at 0, not decrease, and end at the number of indices\n",
      feature.feature, feature.table, static_cast<long long>(sample),
      static_cast<long long>(range.begin), static_cast<long long>(range.end),
      static_cast<long long>(nnz));
}

inline __device__ __noinline__ void print_bad_feature(const TTFeature& feature, BagRange range,
                                                      int64_t nnz) {
  printf(
      "flowtt: offsets of feature %d (table %d): its bags are [%lld, %lld), which is not a range "
      "of the %lld indices; offsets must start at 0, not decrease, and end at the number of "
      "indices\n",
      feature.feature, feature.table, static_cast<long long>(range.begin),
      static_cast<long long>(range.end), static_cast<long long>(nnz));
}

inline __device__ __noinline__ void print_bad_index(const TTFeature& feature, int64_t position,
                                                    int64_t index) {
  printf(
      "flowtt: index out of range: feature %d (table %d), indices[%lld] = %lld, expected "
      "0 <= index < num_embeddings = %lld\n",
      feature.feature, feature.table, static_cast<long long>(position),
      static_cast<long long>(index), static_cast<long long>(feature.num_embeddings));
}

// The barriers keep the other threads from trapping before the first one has printed.
inline __device__ __noinline__ void trap_on_bad_bag(const TTFeature& feature, int64_t sample,
                                                    BagRange range, int64_t nnz) {
  if (threadIdx.x == 0) print_bad_bag(feature, sample, range, nnz);
  __syncthreads();
  __trap();
}

inline __device__ __noinline__ void trap_on_bad_feature(const TTFeature& feature, BagRange range,
                                                        int64_t nnz) {
  if (threadIdx.x == 0) print_bad_feature(feature, range, nnz);
  __syncthreads();
  __trap();
}

inline __device__ __noinline__ void trap_on_bad_index(const TTFeature& feature, int64_t position,
                                                      int64_t index) {
  if (threadIdx.x == 0) print_bad_index(feature, position, index);
  __syncthreads();
  __trap();
}

// Whether bags [first_bag, end_bag) of the call may have this range.
__device__ __forceinline__ bool is_range_of_bags(const BagBatch& batch, BagRange range,
                                                 int64_t first_bag, int64_t end_bag) {
  const bool ordered = 0 <= range.begin && range.begin <= range.end && range.end <= batch.nnz;
  return ordered && (first_bag > 0 || range.begin == 0) &&
         (end_bag < batch.num_features * batch.batch_size || range.end == batch.nnz);
}

__device__ __forceinline__ BagRange load_bags(const BagBatch& batch, int64_t first_bag,
                                              int64_t end_bag) {
  return {load_index(batch.offsets, batch.offsets_are_int64, first_bag),
          load_index(batch.offsets, batch.offsets_are_int64, end_bag)};
}

template <typename acc_t>
__device__ __forceinline__ acc_t load_sample_weight(const BagBatch& batch, int64_t position) {
  return batch.per_sample_weights == nullptr
             ? acc_t(1)
             : static_cast<const acc_t*>(batch.per_sample_weights)[position];
}

}  // namespace flowtt::cuda
