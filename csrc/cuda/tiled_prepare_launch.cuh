// How the preparation is launched: lookups are partitioned while cores are packed, then gathered
// in order or folded.

#pragma once

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {

// The sums of the range, if they can be cleared as a whole; otherwise the next launch clears those
// that rows are added to.
inline ClearedVectors whole_sums(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  // Where most bags have one lookup, few sums need it.
  if (!launch.clears_sums || plan.row_slots == 0) return {nullptr, 0};
  const int64_t samples = launch.range.end_sample - launch.range.first_sample;
  const int64_t stride = launch.output.row_stride;
  float* sums = launch.workspace.sums;
  if (sums == nullptr) {
    int64_t columns = 0;
    for (int32_t f = 0; f < plan.group.count; ++f) {
      columns += plan.group.features[f].embedding_dim;
    }
    // Other launches may have written the other columns.
    if (columns != stride) return {nullptr, 0};
    sums = static_cast<float*>(launch.output.data) + launch.range.first_sample * stride;
  }
  if (reinterpret_cast<uintptr_t>(sums) % 16 != 0 || samples * stride % 4 != 0) return {nullptr, 0};
  return {reinterpret_cast<uint4*>(sums), samples * stride / 4};
}

// Enough warps to keep the memory busy that is cleared.
inline constexpr int64_t kMaxClearingPieces = 1024;

inline ClearingPieces divide_clearing(const TiledLaunch& launch, bool clears_sums) {
  const int32_t features = launch.plan.group.count;
  const int64_t samples = launch.range.end_sample - launch.range.first_sample;
  const int64_t bags =
      clears_sums ? std::clamp<int64_t>(samples * features / kMaxClearingPieces, 1, 32) : 32;
  ClearingPieces pieces{};
  pieces.pieces_per_feature = static_cast<int32_t>((samples + bags - 1) / bags);
  pieces.count = features * pieces.pieces_per_feature;
  pieces.bags_per_piece = static_cast<int32_t>(bags);
  pieces.clears_sums = clears_sums;
  return pieces;
}

// Of two blocks, so that the contraction's split of shared memory has room for them.
inline constexpr size_t kMaxSharedBytes = size_t{96} << 10;

// Of a block, beside its packing.
inline constexpr int64_t kMaxClearedVectors = 4096;

// sums: what else is cleared.
template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch, const ClearedVectors& sums) {
  const TiledPlan& plan = launch.plan;
  const TiledWorkspace& workspace = launch.workspace;
  const TiledGroup& group = plan.group;
  const int32_t chunks = max_chunks(plan, launch.lookups());
  OtherWork work{};
  work.packing_pieces = launch.packs_cores ? group.pack_blocks : 0;
  // What lies between the two is cleared too.
  const uint32_t* const end = workspace.piece_arrivals != nullptr
                                  ? workspace.piece_arrivals + plan.lookups_per_range / kPoolPiece
                                  : workspace.control + kControlWords;
  work.counters = {reinterpret_cast<uint4*>(workspace.control), (end - workspace.control + 3) / 4};
  work.sums = sums;
  work.bags = divide_clearing(launch, launch.clears_sums && work.sums.count == 0);
  // As many blocks as are of use and fit beside those that partition.
  const int32_t multiprocessors = plan.multiprocessors;
  const int64_t wanted = std::max<int64_t>({work.packing_pieces + 1, work.sums.count / 2048,
                                            work.bags.count / (int64_t{2} * kPrepareWarps)});
  const int32_t others = static_cast<int32_t>(
      std::min<int64_t>(wanted, std::max(kPrepareBlocksPerMultiprocessor * multiprocessors - chunks,
                                         (multiprocessors + 1) / 2)));
  // Where much is cleared, all blocks do it.
  work.first_clearing_block = work.sums.count > int64_t{others} * kMaxClearedVectors ? 0 : chunks;
  const size_t shared_bytes = std::max(PartitionScratch::bytes(launch.range.chunk_shift),
                                       sizeof(typename Packing::Scratch));
  const auto kernel = tiled_prepare_kernel<Packing>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  error = launch_kernel(kernel, chunks + others, kPrepareThreads, shared_bytes,
                        plan.dependent_launch, launch.stream, group, launch.batch, launch.range,
                        workspace, launch.output, work, chunks);
  if (error != cudaSuccess) return error;
  return plan.gathers ? cudaSuccess : launch_sort(launch);
}

template <typename Packing>
cudaError_t launch_prepare(const TiledLaunch& launch) {
  return launch_prepare<Packing>(launch, whole_sums(launch));
}

}  // namespace flowtt::cuda
