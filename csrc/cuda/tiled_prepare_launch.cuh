// How the preparation is launched: lookups are counted, places are found for them, and they are
// written to their places, beside which cores are packed.

#pragma once

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_scatter.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

inline constexpr int64_t kMaxClearingPieces = 64;

template <typename Packing>
cudaError_t launch_scatter(const TiledLaunch& launch, const ClearedVectors& cleared) {
  const TiledRange& range = launch.range;
  const TiledGroup& group = launch.plan.group;
  const int64_t samples = launch.samples();
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kMaxBagsPerPiece);
  ClearingPieces pieces{};
  pieces.pieces_per_feature = static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  pieces.count = group.count * pieces.pieces_per_feature;
  pieces.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  pieces.clears_sums = launch.clears_sums && whole_sums(launch).count == 0;
  const int32_t chunks = max_chunks(launch.plan, launch.lookups());
  const int32_t multiprocessors = launch.plan.multiprocessors;
  // As many other blocks as fit beside those that scatter.
  const int32_t others = std::max(2 * multiprocessors - chunks, multiprocessors);
  const int32_t packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  const int32_t packing = std::min(packing_pieces, others);
  const int32_t clearing = std::min(pieces.count, std::max(others - packing, multiprocessors / 2));
  const auto kernel = tiled_scatter_kernel<Packing>;
  const size_t shared_bytes = std::max(ScatterScratch::bytes(range.bins, range.chunk_shift),
                                       sizeof(typename Packing::Scratch));
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error == cudaSuccess) error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, chunks + packing + std::max(clearing, 1), kPrepareThreads,
                       shared_bytes, launch.plan.dependent_launch, launch.stream, group,
                       launch.batch, range, launch.workspace, launch.output, pieces, cleared,
                       chunks, packing, packing_pieces);
}

// cleared: what is to be zeros after it, beside counters.
template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch, const ClearedVectors& cleared) {
  cudaError_t error = launch_count(launch);
  if (error == cudaSuccess) error = launch_starts(launch);
  if (error != cudaSuccess) return error;
  return launch_scatter<Packing>(launch, cleared);
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  if (launch.samples() == 0) return launch_scatter<Packing>(launch, {nullptr, 0});
  // Folding has time to clear them.
  return launch_prepare<Packing>(
      launch, launch.plan.folds ? ClearedVectors{nullptr, 0} : whole_sums(launch));
}

}  // namespace flowtt::cuda
