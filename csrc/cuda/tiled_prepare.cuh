// The first launch of the tiled forward path: three kinds of blocks that do not wait for each other
// group lookups, clear rows that will be added to, and pack cores.

#pragma once

#include "tiled_forward.h"
#include "tiled_grouping.cuh"
#include "tiled_packing.cuh"

namespace flowtt::cuda {

constexpr int kPrepareWarps = kPrepareThreads / 32;

// Blocks [0, grouping) group, the next `clearing` clear, the rest pack.
struct PrepareBlocks {
  int32_t grouping;
  int32_t clearing;
  int32_t bags_per_block;  // that a clearing block looks at, a multiple of kPrepareWarps
};

inline __device__ __noinline__ void trap_on_bad_bag(const TiledFeature& feature, int64_t sample,
                                                    int64_t begin, int64_t end, int64_t nnz) {
  printf(
      "flowtt: offsets of feature %d (table %d), bag %lld: [%lld, %lld) is not a range of the "
      "%lld indices; offsets must start at 0, not decrease, and end at the number of indices\n",
      feature.feature, feature.table, static_cast<long long>(sample), static_cast<long long>(begin),
      static_cast<long long>(end), static_cast<long long>(nnz));
  __trap();
}

// Checks the offsets of some bags, at most 32 a warp, and writes zeros to the rows of those that do
// not have exactly one lookup: their rows are sums.
__device__ __forceinline__ void clear_bags(const TiledGroup& group, const BagBatch& batch,
                                           const TiledRange& range, const TiledWorkspace& workspace,
                                           const PooledOutput& output, int32_t bags_per_block,
                                           int32_t block) {
  const int64_t samples = range.end_sample - range.first_sample;
  const int32_t blocks_per_feature =
      static_cast<int32_t>((samples + bags_per_block - 1) / bags_per_block);
  const int32_t bags_per_warp = bags_per_block / kPrepareWarps;
  const TiledFeature& feature = group.features[block / blocks_per_feature];
  const int lane = threadIdx.x % 32;
  const int64_t warp_sample = range.first_sample +
                              static_cast<int64_t>(block % blocks_per_feature) * bags_per_block +
                              threadIdx.x / 32 * bags_per_warp;
  const int64_t sample = warp_sample + lane;
  bool is_sum = false;
  if (lane < bags_per_warp && sample < range.end_sample) {
    const int64_t bag = feature.feature * batch.batch_size + sample;
    const int64_t begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
    const int64_t last_bag = batch.num_features * batch.batch_size - 1;
    if (begin < 0 || begin > end || end > batch.nnz || (bag == 0 && begin != 0) ||
        (bag == last_bag && end != batch.nnz)) {
      trap_on_bad_bag(feature, sample, begin, end, batch.nnz);
    }
    is_sum = end - begin != 1;
  }
  for (uint32_t rows = __ballot_sync(kAllLanes, is_sum); rows != 0; rows &= rows - 1) {
    const int64_t row = warp_sample + __ffs(rows) - 1;
    if (workspace.sums != nullptr) {
      float* sum = workspace.sums + (row - range.first_sample) * output.row_stride;
      for (int j = lane; j < feature.embedding_dim; j += 32) sum[feature.output_column + j] = 0.0f;
    } else {
      const int64_t first = row * output.row_stride + feature.output_column;
      for (int j = lane; j < feature.embedding_dim; j += 32) {
        store_element<float>(output.data, output.type, first + j, 0.0f);
      }
    }
  }
}

// Core 2 has one or two slices a block, the small slices of cores 1 and 3 one a warp.
template <int kRank1, int kRank2>
constexpr int kSecondSlicesPerBlock = kPrepareThreads / (kMaxTiledQ * (kRank2 / 8) * 32);

template <int kRank1, int kRank2, int kQ3, typename core_t>
__device__ __forceinline__ void pack_cores(const TiledGroup& group, const TiledWorkspace& workspace,
                                           float* warp_maxima, int32_t block) {
  constexpr int kSlices = kSecondSlicesPerBlock<kRank1, kRank2>;
  constexpr int kTeam = kPrepareThreads / kSlices;
  int32_t f = 0;
  while (f + 1 < group.count && group.features[f + 1].first_pack_block <= block) ++f;
  const TiledFeature& feature = group.features[f];
  const int32_t within = block - feature.first_pack_block;
  const int32_t second_blocks = (feature.p[1] + kSlices - 1) / kSlices;
  if (within < second_blocks) {
    const int team = threadIdx.x / kTeam;
    // A team without a slice of its own repeats the last one, to meet the others at the barrier.
    pack_slice<kTeam, 1, kRank1, kRank2, kQ3, core_t>(
        feature, workspace, min(within * kSlices + team, feature.p[1] - 1), threadIdx.x % kTeam,
        warp_maxima + team * (kTeam / 32));
    return;
  }
  const int32_t small = (within - second_blocks) * kPrepareWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (small < feature.p[0]) {
    pack_slice<32, 0, kRank1, kRank2, kQ3, core_t>(feature, workspace, small, lane, nullptr);
  } else if (small < feature.p[0] + feature.p[2]) {
    pack_slice<32, 2, kRank1, kRank2, kQ3, core_t>(feature, workspace, small - feature.p[0], lane,
                                                   nullptr);
  }
}

template <int kRank1, int kRank2, int kQ3, int kItems, typename core_t>
__global__ void __launch_bounds__(kPrepareThreads, kItems <= 4 ? 3 : 1)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output, PrepareBlocks blocks) {
  __shared__ Segments segments;
  __shared__ GroupingScratch scratch;
  __shared__ float warp_maxima[kPrepareWarps];
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < blocks.grouping) {
    load_segments(segments, group, batch, range);
    group_chunk<kItems>(scratch, segments, group, batch, range, workspace, block);
  } else if (block < blocks.grouping + blocks.clearing) {
    clear_bags(group, batch, range, workspace, output, blocks.bags_per_block,
               block - blocks.grouping);
  } else {
    pack_cores<kRank1, kRank2, kQ3, core_t>(group, workspace, warp_maxima,
                                            block - blocks.grouping - blocks.clearing);
  }
}

}  // namespace flowtt::cuda
