// Which lookups read which slice of a core: the lookups of a range, numbered by their slices, for
// sums that are formed slice by slice.

#pragma once

#include "chain.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {

constexpr int kSliceThreads = 256;

// A lookup is its slice's number, then its own in the range.
constexpr int kLookupBits = 18;
constexpr int32_t kMaxLookupsPerRange = 1 << kLookupBits;

// Numbers of the slices of one core, over the distinct tables of a launch; `end` stands for lookups
// without a slice, so that they are sorted behind all others.
struct SliceNumbers {
  int64_t first[kFeaturesPerLaunch];  // of each feature's table
  int64_t end;
};

// Whose a lookup is.
struct LookupOwner {
  int64_t sample;   // row of the output
  int32_t feature;  // in the group, or kNobody
};
constexpr int32_t kNobody = -1;

// Consecutive lookups [first, first + count) of a call.
struct LookupRange {
  int64_t first;
  int32_t count;
  LookupOwner* owners;
};

// The bags of a launch; without pooling all lookups of a feature are one, as only offsets between
// features count. The features are neighbours in the call.
class OffsetSearch {
 public:
  __device__ __forceinline__ OffsetSearch(const FeatureGroup& group, const BagBatch& batch)
      : batch_(batch),
        first_bag_(group.features[0].feature * batch.batch_size),
        step_(batch.pooling_mode == PoolingMode::kNone ? batch.batch_size : 1),
        count_(group.count * batch.batch_size / step_) {}

  __device__ __forceinline__ int64_t count() const { return count_; }
  __device__ __forceinline__ int64_t first_bag(int64_t i) const { return first_bag_ + i * step_; }
  __device__ __forceinline__ BagRange range(int64_t i) const {
    return load_bags(batch_, first_bag(i), first_bag(i + 1));
  }
  __device__ __forceinline__ int32_t feature(int64_t i) const {
    return static_cast<int32_t>(i * step_ / batch_.batch_size);
  }

  // The one that has a position; -1: none.
  __device__ __forceinline__ int64_t find(int64_t position) const {
    if (position < offset(0) || position >= offset(count_)) return -1;
    int64_t low = 0;
    int64_t high = count_ - 1;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      if (offset(middle) <= position) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  __device__ __forceinline__ int64_t offset(int64_t i) const {
    return load_index(batch_.offsets, batch_.offsets_are_int64, first_bag(i));
  }

  const BagBatch& batch_;
  int64_t first_bag_;
  int64_t step_;
  int64_t count_;
};

__device__ __forceinline__ int64_t first_item() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t item_stride() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

__global__ void __launch_bounds__(kSliceThreads)
    check_offsets_kernel(const __grid_constant__ FeatureGroup group,
                         const __grid_constant__ BagBatch batch) {
  const OffsetSearch bags(group, batch);
  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  for (int64_t i = first_item(); i < bags.count(); i += item_stride()) {
    const BagRange range = bags.range(i);
    if (is_range_of_bags(batch, range, bags.first_bag(i), bags.first_bag(i + 1))) continue;
    const int32_t f = bags.feature(i);
    if (pools) {
      print_bad_bag(group.features[f], i - f * batch.batch_size, range, batch.nnz);
    } else {
      print_bad_feature(group.features[f], range, batch.nnz);
    }
    __trap();
  }
}

// Writes range.owners, and checks the ids.
__global__ void __launch_bounds__(kSliceThreads)
    find_owners_kernel(const __grid_constant__ FeatureGroup group,
                       const __grid_constant__ BagBatch batch, LookupRange range) {
  const OffsetSearch bags(group, batch);
  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  for (int64_t i = first_item(); i < range.count; i += item_stride()) {
    const int64_t position = range.first + i;
    const int64_t bag = bags.find(position);
    if (bag < 0) {
      range.owners[i] = {0, kNobody};
      continue;
    }
    const int32_t f = bags.feature(bag);
    const TTFeature& feature = group.features[f];
    const int64_t row_id = load_index(batch.indices, batch.indices_are_int64, position);
    if (row_id < 0 || row_id >= feature.num_embeddings) {
      print_bad_index(feature, position, row_id);
      __trap();
    }
    range.owners[i] = {pools ? bag - f * batch.batch_size : position, f};
  }
}

// lookups[i] becomes lookup i with its slice of core k; touched slices are marked.
__global__ void __launch_bounds__(kSliceThreads)
    number_slices_kernel(const __grid_constant__ FeatureGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ SliceNumbers numbers, LookupRange range, int k,
                         uint64_t* lookups) {
  for (int64_t i = first_item(); i < range.count; i += item_stride()) {
    int64_t slice = numbers.end;
    const int32_t f = range.owners[i].feature;
    if (f != kNobody && k < group.features[f].num_cores) {
      const TTFeature& feature = group.features[f];
      const int64_t digit = locate_slice(
          feature, load_index(batch.indices, batch.indices_are_int64, range.first + i), k);
      slice = numbers.first[f] + digit;
      // Lookups of a slice write the same 1.
      if (feature.touched[k] != nullptr) feature.touched[k][digit] = 1;
    }
    lookups[i] = static_cast<uint64_t>(slice) << kLookupBits | static_cast<uint64_t>(i);
  }
}

}  // namespace flowtt::cuda
