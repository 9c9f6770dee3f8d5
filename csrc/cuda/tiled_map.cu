// Which calls have a map of ids, and those of its launches that are the same for all tables.

#include "tiled_map.h"

#include <algorithm>

#include "tiled_clearing.cuh"
#include "tiled_map_rows.cuh"
#include "tiled_sort.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

// Clearing a map and counting its bits takes time, however few of them are set: on an H200 as long
// as sorting where there are so many bytes for each lookup.
constexpr int64_t kMaxMapBytesPerLookup = 48;
constexpr int64_t kMaxMapBytes = int64_t{40} << 20;
constexpr int64_t kPartBytes = kPartWords * sizeof(uint32_t);
// Places in the map are 32 bits.
constexpr int64_t kMaxMappedIds = int64_t{1} << 31;
// Enough blocks for all multiprocessors, then fewer with more lookups each.
constexpr int64_t kManyMappedLookups = int64_t{1} << 18;

// Clears the map and the counters of later kernels.
__global__ void __launch_bounds__(kPrepareThreads)
    tiled_map_clear_kernel(ClearedVectors map, ClearedVectors counters) {
  wait_for_previous_kernel();
  // Only now, as in tiled_count_kernel.
  allow_dependent_launch();
  map.clear(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
  counters.clear(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
}

}  // namespace

void plan_id_map(TiledPlan* plan) {
  plan->map_parts = 0;
  // A training step keeps the order of its lookups, which a map does not give.
  if (!plan->folds || plan->wants_order ||
      (plan->disabled & (kGroupingDisabled | kFoldingDisabled)) != 0) {
    return;
  }
  int64_t parts = 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    TiledFeature& feature = plan->group.features[f];
    const int64_t prefixes = int64_t{feature.p[0]} * feature.p[1];
    if (prefixes > kMaxMappedIds / feature.p[2]) return;
    feature.first_part = static_cast<uint32_t>(parts);
    parts += round_up(ceil_div(prefixes * feature.p[2], kIdsPerPart), kPartsPerTile);
    if (parts * kPartBytes >
        std::min(kMaxMapBytes, kMaxMapBytesPerLookup * plan->lookups_per_range)) {
      return;
    }
  }
  plan->map_parts = parts;
}

int32_t choose_map_chunk_shift(int64_t lookups) {
  return lookups > kManyMappedLookups ? kMaxMapChunkShift : kMinChunkShift;
}

MapBytes map_bytes(const TiledPlan& plan) {
  const int64_t chunks = max_chunks(plan, plan.lookups_per_range);
  return {plan.map_parts * kPartBytes,
          plan.map_parts / kPartsPerTile * static_cast<int64_t>(sizeof(TileRanks)),
          (chunks << plan.chunk_shift) / 8};
}

cudaError_t launch_map_clear(const TiledLaunch& launch) {
  const ClearedVectors map{launch.workspace.id_map, launch.plan.map_parts * 2};
  const cudaError_t error = share_memory_split(tiled_map_clear_kernel);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_map_clear_kernel, 4 * launch.plan.multiprocessors, kPrepareThreads, 0,
                       launch.plan.dependent_launch, launch.stream, map, counters_of(launch));
}

cudaError_t launch_map_rows(const TiledLaunch& launch) {
  const TiledPlan& plan = launch.plan;
  if (launch.lookups() == 0) return cudaSuccess;
  cudaError_t error = share_memory_split(tiled_map_rank_kernel);
  if (error == cudaSuccess) error = share_memory_split(tiled_map_find_kernel);
  if (error != cudaSuccess) return error;
  error = launch_kernel(tiled_map_rank_kernel, plan.map_parts / kPartsPerTile, kRankThreads, 0,
                        plan.dependent_launch, launch.stream, plan.group, launch.workspace);
  if (error != cudaSuccess) return error;
  return launch_kernel(tiled_map_find_kernel, max_chunks(plan, launch.lookups()), kPrepareThreads,
                       0, plan.dependent_launch, launch.stream, plan.group, launch.batch,
                       launch.range, launch.workspace, !plan.three_products);
}

}  // namespace flowtt::cuda
