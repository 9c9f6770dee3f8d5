// The first and the last launch of the preparation, which are the same for all tables.

#include <algorithm>

#include "tiled_counting.cuh"
#include "tiled_group.h"
#include "tiled_kernel_launch.cuh"
#include "tiled_scatter.cuh"
#include "tiled_sort.h"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxClearingPieces = 64;

}  // namespace

ClearedVectors whole_sums(const TiledLaunch& launch) {
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
  if (reinterpret_cast<uintptr_t>(sums) % 16 != 0 || samples * stride % 4 != 0) {
    return {nullptr, 0};
  }
  return {reinterpret_cast<uint4*>(sums), samples * stride / 4};
}

int32_t set_sort_order(int32_t most_bins, TiledFeature* feature) {
  for (int k = 0; k < feature->num_cores; ++k) {
    uint8_t& shift = feature->reciprocal_shifts[k];
    shift = 0;
    while (int64_t{1} << shift < feature->p[k]) ++shift;
    feature->reciprocals[k] =
        static_cast<uint32_t>((int64_t{1} << (31 + shift)) / feature->p[k] + 1);
  }
  int shift = 0;
  while ((feature->p[1] - 1) >> shift >= most_bins) ++shift;
  const int32_t groups = ((feature->p[1] - 1) >> shift) + 1;
  feature->bin_shift = static_cast<uint16_t>(shift);
  feature->bin_split = static_cast<uint16_t>(std::min(feature->p[0], most_bins / groups));
  feature->minor_scale = static_cast<uint32_t>(
      std::min((int64_t{feature->bin_split} << 32) / feature->p[0], int64_t{0xffffffff}));
  const int32_t bins = groups * feature->bin_split;
  return (bins + kSummedBins - 1) / kSummedBins * kSummedBins;
}

void set_bag_length(const BagBatch& batch, TiledRange* range) {
  const int64_t bags = batch.num_features * batch.batch_size;
  if (batch.nnz == 0 || batch.nnz % bags != 0 || batch.nnz >= int64_t{1} << 31) return;
  range->bag_length = static_cast<uint32_t>(batch.nnz / bags);
  range->bag_reciprocal = bag_reciprocal(range->bag_length);
}

int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors) {
  // Few enough chunks that the blocks of the last launch fit on the device beside those that pack.
  const int64_t most = int64_t{multiprocessors} * 3 / 4;
  int32_t shift = kMinChunkShift;
  while (shift < kMaxChunkShift && lookups > most << shift) ++shift;
  return shift;
}

int32_t max_chunks(const TiledPlan& plan, int64_t lookups) {
  if (lookups == 0) return 0;
  const int64_t chunk = int64_t{1} << plan.chunk_shift;
  // No chunk has lookups of two features.
  return static_cast<int32_t>((lookups + chunk - 1) / chunk + plan.group.count - 1);
}

ClearedVectors used_counters(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  const TiledWorkspace& workspace = launch.workspace;
  // What lies between the first and the last is cleared too.
  const uint32_t* end = workspace.control + kControlWords;
  if (workspace.piece_arrivals != nullptr) {
    end = workspace.piece_arrivals + plan.lookups_per_range / kPoolPiece;
  }
  if (workspace.bin_counts != nullptr) {
    end = workspace.bin_counts + bin_counters(plan);
  }
  return {reinterpret_cast<uint4*>(workspace.control), (end - workspace.control + 3) / 4};
}

ClearingPieces clearing_pieces(const TiledLaunch& launch, const ClearedVectors& cleared) {
  const int64_t samples = launch.range.end_sample - launch.range.first_sample;
  const int32_t features = launch.plan.group.count;
  const int64_t bags_per_piece =
      std::clamp<int64_t>(samples * features / kMaxClearingPieces / kPrepareWarps * kPrepareWarps,
                          kPrepareWarps, kMaxBagsPerPiece);
  ClearingPieces pieces{};
  pieces.pieces_per_feature = static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  pieces.count = features * pieces.pieces_per_feature;
  pieces.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  pieces.clears_sums = launch.clears_sums && cleared.count == 0;
  return pieces;
}

cudaError_t launch_count(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  const TiledWorkspace& workspace = launch.workspace;
  const ClearedVectors counters = used_counters(launch);
  const int32_t chunks = max_chunks(plan, launch.lookups());
  const cudaError_t error = share_memory_split(tiled_count_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_count_kernel, chunks + 1, kPrepareThreads, 0, plan.dependent_launch,
                       launch.stream, plan.group, launch.batch, launch.range, workspace, chunks,
                       counters);
}

cudaError_t launch_scatter(const TiledLaunch& launch, const ClearedVectors& cleared) {
  const TiledRange& range = launch.range;
  const TiledGroup& group = launch.plan.group;
  const ClearingPieces pieces = clearing_pieces(launch, cleared);
  const int32_t chunks = max_chunks(launch.plan, launch.lookups());
  const int32_t multiprocessors = launch.plan.multiprocessors;
  // As many other blocks as fit beside those that scatter.
  const int32_t others =
      std::min(pieces.count, std::max(2 * multiprocessors - chunks, (multiprocessors + 1) / 2));
  const size_t shared_bytes = ScatterScratch::bytes(range.bins, range.chunk_shift);
  cudaError_t error =
      cudaFuncSetAttribute(tiled_scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error == cudaSuccess) error = share_memory_split(tiled_scatter_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_scatter_kernel, chunks + others, kPrepareThreads, shared_bytes,
                       launch.plan.dependent_launch, launch.stream, group, launch.batch, range,
                       launch.workspace, launch.output, pieces, cleared, chunks);
}

}  // namespace flowtt::cuda
