// The second launch of the preparation, which is the same for all tables.

#include "tiled_sort.h"

#include <algorithm>

#include "tiled_folding.cuh"
#include "tiled_prepare_launch.cuh"
#include "tiled_sorting.cuh"

namespace flowtt::cuda {
namespace {

// A granule is as many lookups as a block has threads.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_granules(void (*kernel)(Parameters...), int threads, const TiledLaunch& launch,
                            const ClearingPieces& pieces, const Arguments&... arguments) {
  const int64_t lookups = launch.lookups();
  // No granule has lookups of two features.
  const int32_t granules =
      static_cast<int32_t>(lookups > 0 ? (lookups - 1) / threads + launch.plan.group.count : 0);
  const int32_t warps = threads / 32;
  const int32_t noting =
      launch.workspace.piece_bags != nullptr
          ? std::min((pieces.count + warps - 1) / warps, launch.plan.multiprocessors)
          : 0;
  if (granules + noting == 0) return cudaSuccess;
  const cudaError_t error = share_memory_split(kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, granules + noting, threads, 0, launch.plan.dependent_launch,
                       launch.stream, launch.plan.group, launch.batch, launch.range,
                       launch.workspace, pieces, granules, arguments...);
}

}  // namespace

int32_t choose_chunk_shift(int64_t lookups, int32_t multiprocessors) {
  // Few enough chunks that all blocks fit on the device beside those that pack.
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

void set_prefix_order(TiledFeature* feature) {
  for (int k = 0; k < feature->num_cores; ++k) {
    uint8_t& shift = feature->reciprocal_shifts[k];
    while (int64_t{1} << shift < feature->p[k]) ++shift;
    feature->reciprocals[k] =
        static_cast<uint32_t>((int64_t{1} << (31 + shift)) / feature->p[k] + 1);
  }
  feature->prefix_scale = static_cast<uint32_t>(std::min(
      (int64_t{kBuckets} << 32) / (int64_t{feature->p[0]} * feature->p[1]), int64_t{0xffffffff}));
}

cudaError_t launch_sort(const TiledLaunch& launch) {
  const ClearingPieces pieces = divide_clearing(launch, false);
  if (!launch.plan.folds) {
    return launch_granules(tiled_sort_kernel, kSortThreads, launch, pieces);
  }
  const FoldPass pass{!launch.plan.three_products, launch.plan.buffers_single_rows};
  return launch_granules(tiled_fold_kernel, kFoldThreads, launch, pieces, pass);
}

}  // namespace flowtt::cuda
