// The granules of lookups that the blocks of the backward pass take, and what a block has in shared
// memory.

#pragma once

#include "tiled_backward.h"
#include "tiled_backward_plan.cuh"

namespace flowtt::cuda {

// What a block has in dynamic shared memory.
template <int kRank>
struct BackwardShared {
  union {
    BackwardTile<kRank> tile;
    struct {
      OrderScratch<kBackwardThreads> order;
      GradientPlanScratch plan;
    } planning;
  };
  GradientPlan plan;
  Segments segments;
  EntryChunk granule;
};

// Parameters of the kernel beside those of the sort.
struct BackwardPass {
  StridedMatrix grad_output;
  int32_t granules;
  int32_t granule;  // lookups of one, at most
  GradientTargets targets[kTiledFeaturesPerLaunch];
};

// More than the 4 KB of a forward launch; the general kernels need the larger limit too.
static_assert(sizeof(TiledGroup) + sizeof(BagBatch) + sizeof(TiledRange) + sizeof(TiledWorkspace) +
                  sizeof(BackwardPass) <=
              8192);

// Plans granule `number`: its feature, or -1 if it has no lookups. Called by all threads; starts
// and ends with a barrier.
template <typename Shared>
__device__ __forceinline__ int32_t plan_granule(Shared& shared, const TiledGroup& group,
                                                const TiledWorkspace& workspace,
                                                const BackwardPass& pass, int32_t number) {
  auto& scratch = shared.planning;
  __syncthreads();
  clear_order(scratch.order);
  if (threadIdx.x < 32) {
    find_entry_chunk(shared.granule, shared.segments, group.count, pass.granule, number);
  }
  __syncthreads();
  const EntryChunk granule = shared.granule;
  if (granule.count == 0) return -1;
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const bool exists = i < granule.count;
  const int32_t place = granule.first + min(i, granule.count - 1);
  const uint4 entry = reinterpret_cast<const uint4*>(workspace.entries)[place];
  const float factor = workspace.factors != nullptr ? workspace.factors[place] : 1.0f;
  const uint32_t sorted =
      order_entry(scratch.order, group.features[granule.f], entry.x, entry.y, exists);
  if (exists) {
    scratch.plan.sorted[sorted] = {entry.x, entry.y, entry.w & ~kLoneLookup, factor};
  }
  __syncthreads();
  const int32_t entries = plan_entries(shared.plan, scratch.plan, granule.count);
  plan_tiles(shared.plan, scratch.plan, entries);
  return granule.f;
}

}  // namespace flowtt::cuda
