// The first and the last launch of the preparation, which are the same for all tables.

#include <algorithm>

#include "tiled_counting.cuh"
#include "tiled_kernel_launch.cuh"
#include "tiled_scatter.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxClearingPieces = 128;

}  // namespace

int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors) {
  // Few enough chunks that the blocks that count fit on the device beside those that clear.
  const int64_t most = int64_t{multiprocessors} * 3 / 4;
  int32_t shift = kMinChunkShift;
  while (shift < kMaxChunkShift && lookups > most << shift) ++shift;
  return shift;
}

int32_t max_chunks(const TiledLaunch& launch) {
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return 0;
  const int64_t chunk = int64_t{1} << launch.range.chunk_shift;
  // No chunk has lookups of two features.
  return static_cast<int32_t>((lookups + chunk - 1) / chunk + launch.plan.group.count - 1);
}

cudaError_t launch_count(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  const TiledRange& range = launch.range;
  const TiledWorkspace& workspace = launch.workspace;
  // The two lie one after the other.
  const uint32_t* const end = workspace.piece_arrivals != nullptr
                                  ? workspace.piece_arrivals + plan.lookups_per_range / kPoolPiece
                                  : workspace.control + kControlWords;
  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * plan.group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps,
      kPrepareWarps, kMaxBagsPerPiece);
  ClearingPieces pieces{};
  pieces.pieces_per_feature = static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  pieces.count = plan.group.count * pieces.pieces_per_feature;
  pieces.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  pieces.clears_sums = launch.clears_sums;
  const int32_t counting = max_chunks(launch);
  return launch_kernel(tiled_count_kernel, int64_t{counting} + 1 + pieces.count, kPrepareThreads, 0,
                       plan.dependent_launch, launch.stream, plan.group, launch.batch, range,
                       workspace, launch.output, pieces, counting,
                       reinterpret_cast<uint4*>(workspace.control),
                       static_cast<int32_t>((end - workspace.control + 3) / 4));
}

cudaError_t launch_scatter(const TiledLaunch& launch) {
  const TiledRange& range = launch.range;
  const int32_t chunks = max_chunks(launch);
  if (chunks == 0) return cudaSuccess;
  // Parts of chunks for as many blocks as the device runs at the same time.
  const int64_t most = int64_t{launch.plan.multiprocessors} * 5 / 2;
  int32_t parts_shift = 0;
  while (parts_shift < range.chunk_shift - kMinChunkShift &&
         int64_t{chunks} << (parts_shift + 1) <= most) {
    ++parts_shift;
  }
  const size_t shared_bytes = ScatterScratch::bytes(range.chunk_shift - parts_shift);
  const cudaError_t error =
      cudaFuncSetAttribute(tiled_scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_scatter_kernel, int64_t{chunks} << parts_shift, kPrepareThreads,
                       shared_bytes, launch.plan.dependent_launch, launch.stream, launch.plan.group,
                       launch.batch, range, launch.workspace, parts_shift);
}

}  // namespace flowtt::cuda
