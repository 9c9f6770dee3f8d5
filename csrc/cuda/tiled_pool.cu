// The launch of the pooling kernel.

#include "tiled_pool.cuh"

#include <algorithm>

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {
namespace {

// Blocks that are worth having for pieces of long bags alone.
constexpr int64_t kMaxPieceBlocks = 512;

// With a part of a warp, at least kLanes lanes, for each bag.
template <typename row_t, int kLanes>
cudaError_t launch_pool(const TiledLaunch& launch, PoolCall& call, int32_t widest) {
  if constexpr (kLanes < 32) {
    if (widest > kLanes * PooledColumns<row_t>::kCount) {
      return launch_pool<row_t, 2 * kLanes>(launch, call, widest);
    }
  }
  constexpr int64_t kBags = kPoolThreads / kLanes;
  const int64_t samples = call.range.end_sample - call.range.first_sample;
  call.blocks_per_feature = static_cast<uint32_t>((samples + kBags - 1) / kBags);
  constexpr int64_t kWarps = kPoolThreads / 32;
  const int64_t piece_blocks =
      std::min((int64_t{call.pieces} + kWarps - 1) / kWarps, kMaxPieceBlocks);
  const int64_t blocks =
      std::max(int64_t{call.blocks_per_feature} * call.feature_count, piece_blocks);
  const auto kernel = tiled_pool_kernel<row_t, kLanes>;
  const cudaError_t error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, kPoolThreads, 0, launch.plan.dependent_launch, launch.stream,
                       call);
}

}  // namespace

cudaError_t launch_tiled_pool(const TiledLaunch& launch) {
  const TiledGroup& group = launch.plan.group;
  PoolCall call{launch.batch, launch.range, launch.workspace, launch.output};
  call.feature_count = static_cast<uint32_t>(group.count);
  call.adds_to_sums = launch.plan.adds_to_sums;
  call.ends_sums = launch.ends_sums;
  call.pools_lone = launch.plan.maps_ids();
  int32_t widest = 1;
  for (int32_t f = 0; f < group.count; ++f) {
    const TiledFeature& feature = group.features[f];
    call.features[f] = {feature.output_column, feature.embedding_dim, feature.feature};
    widest = std::max(widest, feature.embedding_dim);
  }
  if (launch.workspace.piece_bags != nullptr) {
    call.pieces = static_cast<int32_t>(launch.lookups() / kPoolPiece);
  }
  return launch.plan.three_products ? launch_pool<float, 8>(launch, call, widest)
                                    : launch_pool<__half, 4>(launch, call, widest);
}

}  // namespace flowtt::cuda
