// How the preparation is launched: after the two launches of tiled_sort.cu one that does the rest.

#pragma once

#include <algorithm>

#include "tiled_chunk_sizes.h"
#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

constexpr int64_t kMaxClearingPieces = 64;

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  constexpr auto kernel = tiled_prepare_kernel<Packing>;
  cudaError_t error = launch_sort(launch);
  if (error != cudaSuccess) return error;
  const TiledRange& range = launch.range;
  const TiledGroup& group = launch.plan.group;
  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kMaxBagsPerPiece);
  PrepareBlocks blocks{};
  blocks.scattering = max_chunks(launch);
  blocks.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  blocks.clearing.pieces_per_feature =
      static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  blocks.clearing.count = group.count * blocks.clearing.pieces_per_feature;
  blocks.clearing.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  blocks.clearing.clears_sums = launch.clears_sums;
  // As many other blocks as fit beside those that scatter.
  const int32_t multiprocessors = launch.plan.multiprocessors;
  const int32_t others =
      std::min(blocks.packing_pieces + blocks.clearing.count,
               std::max(kPrepareBlocksPerMultiprocessor * multiprocessors - blocks.scattering,
                        (multiprocessors + 1) / 2));
  const size_t shared_bytes =
      std::max(ScatterScratch::bytes(range.chunk_shift), sizeof(typename Packing::Scratch));
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks.scattering + others, kPrepareThreads, shared_bytes,
                       launch.plan.dependent_launch, launch.stream, group, launch.batch, range,
                       launch.workspace, launch.output, blocks);
}

}  // namespace flowtt::cuda
