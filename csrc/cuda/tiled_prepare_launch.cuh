// How the preparation is launched: lookups are counted, places are found for them, and they are
// written to their places, beside which cores are packed.

#pragma once

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_scatter.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

inline constexpr int64_t kMaxClearingPieces = 64;

// The side work of a launch whose other blocks are so many. cleared: what is to be zeros after it.
inline SideWork plan_side_work(const TiledLaunch& launch, const ClearedVectors& cleared,
                               int32_t others) {
  const TiledRange& range = launch.range;
  const TiledGroup& group = launch.plan.group;
  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kMaxBagsPerPiece);
  SideWork work{};
  work.pieces.pieces_per_feature =
      static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  work.pieces.count = group.count * work.pieces.pieces_per_feature;
  work.pieces.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  work.pieces.clears_sums = launch.clears_sums && cleared.count == 0;
  work.pieces.stores_lone = !launch.plan.maps_ids();
  work.cleared = cleared;
  // As many blocks as fit beside the others.
  const int32_t multiprocessors = launch.plan.multiprocessors;
  const int32_t blocks = std::max(2 * multiprocessors - others, multiprocessors);
  work.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  work.packing = std::min(work.packing_pieces, blocks);
  work.clearing = std::max(
      std::min(work.pieces.count, std::max(blocks - work.packing, multiprocessors / 2)), 1);
  return work;
}

template <typename Packing>
cudaError_t launch_scatter(const TiledLaunch& launch, const ClearedVectors& cleared) {
  const TiledRange& range = launch.range;
  const int32_t chunks = max_chunks(launch.plan, launch.lookups());
  const SideWork work = plan_side_work(launch, cleared, chunks);
  const auto kernel = tiled_scatter_kernel<Packing>;
  const size_t shared_bytes = std::max(ScatterScratch::bytes(range.bins, range.chunk_shift),
                                       sizeof(typename Packing::Scratch));
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error == cudaSuccess) error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, chunks + work.blocks(), kPrepareThreads, shared_bytes,
                       launch.plan.dependent_launch, launch.stream, launch.plan.group, launch.batch,
                       range, launch.workspace, launch.output, work, chunks);
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
  return launch_prepare<Packing>(launch, whole_sums(launch));
}

}  // namespace flowtt::cuda
