// The planning launch of the backward pass: each block takes a granule of sorted lookups, orders
// them by prefix, and writes down the tiles that the other launch works on.

#pragma once

#include "dependent_launch.cuh"
#include "tiled_backward_plan.cuh"
#include "tiled_clearing.cuh"

namespace flowtt::cuda {

static_assert(kPlanThreads == kPrepareThreads, "of ClearedVectors");

// In shared memory.
struct PlanningShared {
  OrderScratch<kPlanThreads> order;
  GradientPlanScratch plan;
  Segments segments;
  EntryChunk granule;
};

// The grid: `planning` blocks, a granule of at most so many lookups each, then those that clear.
// steps: null, or becomes one more.
__global__ void __launch_bounds__(kPlanThreads, 4)
    tiled_backward_planning_kernel(const __grid_constant__ TiledGroup group,
                                   const __grid_constant__ BagBatch batch,
                                   const __grid_constant__ TiledRange range,
                                   const __grid_constant__ TiledWorkspace workspace,
                                   const __grid_constant__ BackwardWork work, int32_t most,
                                   int32_t planning, ClearedVectors cleared, int64_t* steps) {
  __shared__ PlanningShared shared;
  allow_dependent_launch();
  const int32_t number = static_cast<int32_t>(blockIdx.x);
  if (number >= planning) {
    wait_for_previous_kernel();
    cleared.clear(number - planning, static_cast<int32_t>(gridDim.x) - planning);
    return;
  }
  clear_order(shared.order);
  load_segments(shared.segments, group, batch, range);
  // Offsets out of order can make features overlap; the preparation reports them.
  if (shared.segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  if (threadIdx.x < 32) {
    find_entry_chunk(shared.granule, shared.segments, group.count, most, number);
  }
  __syncthreads();
  const EntryChunk granule = shared.granule;
  wait_for_previous_kernel();
  if (number == 0 && threadIdx.x == 0 && steps != nullptr) ++*steps;
  if (granule.count == 0) return;
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const bool exists = i < granule.count;
  const int32_t place = granule.first + min(i, granule.count - 1);
  const uint4 entry = reinterpret_cast<const uint4*>(workspace.entries)[place];
  const float factor = workspace.factors != nullptr ? workspace.factors[place] : 1.0f;
  const uint32_t sorted =
      order_entry(shared.order, group.features[granule.f], entry.x, entry.y, exists);
  if (exists) {
    shared.plan.sorted[sorted] = {entry.x, entry.y, entry.w & ~kLoneLookup, factor};
    shared.plan.outer[sorted] = entry.x;
  }
  __syncthreads();
  const int32_t entries = plan_entries(work, shared.plan, granule.first, granule.count);
  plan_tiles(work, shared.plan, static_cast<uint32_t>(granule.f), granule.first, entries);
}

}  // namespace flowtt::cuda
