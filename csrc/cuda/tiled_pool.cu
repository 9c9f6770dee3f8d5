// The launch of the pooling kernel.

#include "tiled_pool.cuh"

#include <algorithm>

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {
namespace {

// Few, since most calls have no long bags.
constexpr int64_t kMaxPieceBlocks = 16;

}  // namespace

cudaError_t launch_tiled_pool(const TiledLaunch& launch) {
  const TiledGroup& group = launch.plan.group;
  int32_t widest = 1;
  for (int32_t f = 0; f < group.count; ++f) {
    widest = std::max(widest, group.features[f].embedding_dim);
  }
  PoolPass pass{};
  pass.lanes_shift = kMinLanesShift;
  while (pass.lanes_shift < 5 && (kPoolColumns << pass.lanes_shift) < widest) ++pass.lanes_shift;
  pass.adds_to_sums = launch.plan.adds_to_sums;
  pass.ends_sums = launch.ends_sums;
  constexpr int64_t kWarps = kPoolThreads / 32;
  const int64_t pieces = launch.workspace.piece_bags == nullptr
                             ? 0
                             : (launch.range.end_lookup - launch.range.first_lookup) / kPoolPiece;
  pass.piece_blocks =
      static_cast<int32_t>(std::min<int64_t>((pieces + kWarps - 1) / kWarps, kMaxPieceBlocks));
  const int64_t bags = (launch.range.end_sample - launch.range.first_sample) * group.count;
  const int64_t bags_per_block = kWarps * (32 >> pass.lanes_shift);
  const int64_t blocks = pass.piece_blocks + (bags + bags_per_block - 1) / bags_per_block;
  return launch_kernel(
      launch.plan.three_products ? tiled_pool_kernel<float> : tiled_pool_kernel<__half>, blocks,
      kPoolThreads, 0, launch.plan.dependent_launch, launch.stream, group, launch.batch,
      launch.range, launch.workspace, launch.output, pass);
}

}  // namespace flowtt::cuda
