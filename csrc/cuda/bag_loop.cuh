// The bags of a launch, shared out over its blocks.

#pragma once

#include "chain.cuh"
#include "lookup_checks.cuh"

namespace flowtt::cuda {

// Calls work(feature, sample, range) for the bags of this block; `sample` is the row of the output.
// Blocks of one blockIdx.y share the bags of a feature. Without pooling each lookup is a bag, and
// the offsets only tell the features apart.
template <typename Group, typename Work>
__device__ __forceinline__ void for_each_bag(const Group& group, const BagBatch& batch,
                                             Work&& work) {
  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  for (int f = blockIdx.y; f < group.count; f += gridDim.y) {
    const TTFeature& feature = group.features[f];
    const int64_t first_bag = feature.feature * batch.batch_size;
    BagRange samples{0, batch.batch_size};
    if (!pools) {
      samples = load_bags(batch, first_bag, first_bag + batch.batch_size);
      if (!is_range_of_bags(batch, samples, first_bag, first_bag + batch.batch_size)) {
        trap_on_bad_feature(feature, samples, batch.nnz);
      }
    }
    const auto load_range = [&](int64_t sample) {
      if (!pools || sample >= samples.end) return BagRange{sample, sample + 1};
      return load_bags(batch, first_bag + sample, first_bag + sample + 1);
    };
    BagRange next = load_range(samples.begin + blockIdx.x);
    for (int64_t sample = samples.begin + blockIdx.x; sample < samples.end; sample += gridDim.x) {
      const BagRange range = next;
      next = load_range(sample + gridDim.x);  // on its way while this bag is worked on
      if (pools && !is_range_of_bags(batch, range, first_bag + sample, first_bag + sample + 1)) {
        trap_on_bad_bag(feature, sample, range, batch.nnz);
      }
      work(feature, sample, range);
    }
  }
}

// Calls work(row_id, position) for the lookups of a bag. The next id is on its way while a row is
// worked on.
template <typename Work>
__device__ __forceinline__ void for_each_row_id(const TTFeature& feature, const BagBatch& batch,
                                                BagRange range, Work&& work) {
  const auto load_id = [&](int64_t position) {
    return position < range.end ? load_index(batch.indices, batch.indices_are_int64, position) : 0;
  };
  int64_t next = load_id(range.begin);
  for (int64_t position = range.begin; position < range.end; ++position) {
    const int64_t row_id = next;
    next = load_id(position + 1);
    if (row_id < 0 || row_id >= feature.num_embeddings) {
      trap_on_bad_index(feature, position, row_id);
    }
    work(row_id, position);
  }
}

}  // namespace flowtt::cuda
