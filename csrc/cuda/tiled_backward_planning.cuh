// The planning launch of the backward pass: each block takes a granule of sorted lookups, orders
// them by prefix, and writes down the tiles that the other launch works on. Blocks look at entries
// of the next granule, so that nothing may be written in the place of entries.

#pragma once

#include "dependent_launch.cuh"
#include "tiled_backward_plan.cuh"
#include "tiled_clearing.cuh"

namespace flowtt::cuda {

// In shared memory.
struct PlanningShared {
  OrderScratch<kPlanThreads> order;
  GradientPlanScratch plan;
  Segments segments;
  EntryChunk granule;
  uint32_t starts[kPlanWarps];  // a bit of each entry that is seen: its i2 is not the last one's
};

// A granule ends where a slice of core 2 does, if one does within so many entries behind its chunk:
// tiles are of one slice, and those that a granule's end cuts are not full. The next granule begins
// there. length: of the chunk.
constexpr __host__ __device__ int32_t granule_reach(int32_t length) {
  return kPlanThreads - length < length ? kPlanThreads - length : length;
}

// The first entry in [from, to) that has its bit, or -1. By all lanes of a warp.
__device__ __forceinline__ int32_t first_start(const uint32_t (&starts)[kPlanWarps], int32_t from,
                                               int32_t to) {
  static_assert(kPlanWarps == 32, "a word for each lane");
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  uint32_t own = starts[lane];
  if (32 * lane < from) own &= from - 32 * lane < 32 ? ~0u << (from - 32 * lane) : 0u;
  const int32_t first = own != 0 ? 32 * lane + __ffs(static_cast<int>(own)) - 1 : kPlanThreads;
  const int32_t least =
      static_cast<int32_t>(__reduce_min_sync(kAllLanes, static_cast<uint32_t>(first)));
  return least < to ? least : -1;
}

// What the kernel counts in, cleared by a launch of its own where no sort has done so.
__global__ void __launch_bounds__(kPlanThreads)
    tiled_backward_counters_kernel(const ClearedVectors counters) {
  wait_for_previous_kernel();
  // Only now: the next kernel reads and writes before it waits.
  allow_dependent_launch();
  counters.clear<kPlanThreads>(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
}

// The grid: `planning` blocks, a granule of at most so many lookups each, then those that clear.
// is_sorted: the lookups were so before the launch ahead.
__global__ void __launch_bounds__(kPlanThreads, 2)
    tiled_backward_planning_kernel(const __grid_constant__ TiledGroup group,
                                   const __grid_constant__ BagBatch batch,
                                   const __grid_constant__ TiledRange range,
                                   const __grid_constant__ TiledWorkspace workspace,
                                   const __grid_constant__ BackwardWork work, int32_t most,
                                   int32_t planning, ClearedVectors cleared, bool is_sorted) {
  __shared__ PlanningShared shared;
  allow_dependent_launch();
  const int32_t number = static_cast<int32_t>(blockIdx.x);
  if (number >= planning) {
    if (!is_sorted) wait_for_previous_kernel();
    cleared.clear<kPlanThreads>(number - planning, static_cast<int32_t>(gridDim.x) - planning);
    // The end of this launch is to mean the end of those before.
    wait_for_previous_kernel();
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
  if (!is_sorted || granule.count == 0) wait_for_previous_kernel();
  if (granule.count == 0) return;
  const Segments& segments = shared.segments;
  const int32_t first_of_feature = segments.first_entry[granule.f];
  const int32_t end_of_feature = segments.first_entry[granule.f + 1];
  const int32_t reach = granule_reach(granule.length);
  const int32_t seen = min(end_of_feature - granule.first, granule.length + reach);
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const int32_t place = granule.first + min(i, seen - 1);
  const uint4* const sorted_entries = reinterpret_cast<const uint4*>(workspace.entries);
  const uint4 entry = sorted_entries[place];
  const float factor = workspace.factors != nullptr ? workspace.factors[place] : 1.0f;
  uint32_t i2_before = __shfl_up_sync(kAllLanes, entry.y, 1);
  if (i % 32 == 0 && place > first_of_feature) i2_before = sorted_entries[place - 1].y;
  const bool starts = i < seen && place > first_of_feature && entry.y != i2_before;
  const uint32_t starting = __ballot_sync(kAllLanes, starts);
  if (i % 32 == 0) shared.starts[i / 32] = starting;
  __syncthreads();
  const int32_t begin =
      granule.first == first_of_feature ? 0 : max(first_start(shared.starts, 0, reach), 0);
  int32_t end = seen;
  if (granule.first + granule.length < end_of_feature) {
    end = first_start(shared.starts, granule.length, granule.length + reach);
    if (end < 0) end = granule.length;
  }
  if (begin == end) {
    wait_for_previous_kernel();
    return;
  }
  const bool exists = begin <= i && i < end;
  const uint32_t sorted =
      order_entry(shared.order, group.features[granule.f], entry.x, entry.y, exists);
  if (exists) {
    shared.plan.sorted[sorted] = {entry.x, entry.y, entry.w & ~kLoneLookup, factor};
  }
  __syncthreads();
  const int32_t first = granule.first + begin;
  const int32_t entries = plan_entries(work, shared.plan, first, end - begin);
  wait_for_previous_kernel();  // tiles are counted in what it has cleared
  plan_tiles(work, shared.plan, static_cast<uint32_t>(granule.f), first, entries);
}

}  // namespace flowtt::cuda
