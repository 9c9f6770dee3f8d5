// The second launch of the preparation, where lookups are not folded: each granule's in the order
// of their prefixes.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_ordering.cuh"

namespace flowtt::cuda {

constexpr int kSortThreads = 512;

// The grid: `sorting` blocks, a granule each, then those that note long bags.
__global__ void __launch_bounds__(kSortThreads, 2)
    tiled_sort_kernel(const __grid_constant__ TiledGroup group,
                      const __grid_constant__ BagBatch batch,
                      const __grid_constant__ TiledRange range,
                      const __grid_constant__ TiledWorkspace workspace,
                      const __grid_constant__ ClearingPieces pieces, int32_t sorting) {
  __shared__ GatherScratch<kSortThreads> scratch;
  __shared__ OrderScratch<kSortThreads> order_scratch;
  allow_dependent_launch();
  if (static_cast<int32_t>(blockIdx.x) >= sorting) {
    note_pieces(group, batch, range, workspace, pieces, static_cast<int32_t>(blockIdx.x) - sorting,
                static_cast<int32_t>(gridDim.x) - sorting);
    return;
  }
  clear_ranges(order_scratch);
  int32_t place = 0;
  if (!find_lookups(scratch, group, batch, range, workspace, blockIdx.x, &place)) return;
  const Granule& granule = scratch.granule;
  const uint4 entry = reinterpret_cast<const uint4*>(workspace.partitioned)[place];
  const float factor = workspace.factors != nullptr ? workspace.partitioned_factors[place] : 1.0f;
  const bool exists = static_cast<int32_t>(threadIdx.x) < granule.count;
  uint32_t number = threadIdx.x;
  if (!keeps_order(range)) {
    const FineOrder order(scratch, group.features[granule.f]);
    number = order_entry(order_scratch, order, entry.x, entry.y, exists);
  }
  if (!exists) return;
  number += granule.first_entry + granule.begin;
  reinterpret_cast<uint4*>(workspace.entries)[number] = entry;
  if (workspace.factors != nullptr) workspace.factors[number] = factor;
}

}  // namespace flowtt::cuda
