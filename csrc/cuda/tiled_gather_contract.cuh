// The contraction of calls of so few lookups that every warp has one window, and that are not
// folded: each block gathers its granule in the order of the prefixes and contracts it.

#pragma once

#include "tiled_contract.cuh"
#include "tiled_ordering.cuh"

namespace flowtt::cuda {

// In shared memory, behind what the warps have.
template <int kThreads>
struct __align__(16) GatheredLookups {
  uint4 entries[kThreads];  // GroupedLookups in the order of their prefixes
  float factors[kThreads];
  GatherScratch<kThreads> scratch;
  OrderScratch<kThreads> order;
};

// Gathers and orders the block's lookups: their number. most: as of find_granule. Waits for the
// partition. Called by all threads; ends with a barrier.
template <int kThreads>
__device__ __forceinline__ int32_t gather_lookups(GatheredLookups<kThreads>& gathered,
                                                  const TiledGroup& group, const BagBatch& batch,
                                                  const TiledRange& range,
                                                  const TiledWorkspace& workspace, int32_t most) {
  clear_ranges(gathered.order);
  int32_t place = 0;
  if (!find_lookups(gathered.scratch, group, batch, range, workspace, blockIdx.x, &place, most))
    return 0;
  const Granule& granule = gathered.scratch.granule;
  const bool exists = static_cast<int32_t>(threadIdx.x) < granule.count;
  const uint4 entry = reinterpret_cast<const uint4*>(workspace.partitioned)[place];
  const float factor =
      workspace.partitioned_factors != nullptr ? workspace.partitioned_factors[place] : 1.0f;
  uint32_t number = threadIdx.x;
  if (!keeps_order(range)) {
    const FineOrder order(gathered.scratch, group.features[granule.f]);
    number = order_entry(gathered.order, order, entry.x, entry.y, exists);
  }
  if (exists) {
    gathered.entries[number] = entry;
    gathered.factors[number] = factor;
  }
  __syncthreads();
  return granule.count;
}

// The grid: as many blocks as there may be granules of `most` lookups.
template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, int kHeld, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_gather_contract_kernel(const __grid_constant__ TiledGroup group,
                                 const __grid_constant__ BagBatch batch,
                                 const __grid_constant__ TiledRange range,
                                 const __grid_constant__ TiledWorkspace workspace,
                                 const __grid_constant__ PooledOutput output, int32_t most) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  using Storage = WarpStorage<Chain, true>;
  extern __shared__ __align__(128) char warp_storage[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  Storage& storage = reinterpret_cast<Storage*>(warp_storage)[warp];
  auto& gathered =
      *reinterpret_cast<GatheredLookups<kWarps * 32>*>(warp_storage + kWarps * sizeof(Storage));
  allow_dependent_launch();
  for (int i = lane; i < kWindow + kTileLookups; i += 32) storage.plan.first[i] = 0;
  const int32_t lookups = gather_lookups(gathered, group, batch, range, workspace, most);
  const int32_t size = min(max((lookups + kWarps - 1) / kWarps, kMinWindow), kWindow);
  const int32_t begin = warp * size;
  if (begin >= lookups) return;
  const int count = min(size, lookups - begin);
  const TiledFeature& feature = group.features[gathered.scratch.granule.f];
  const int number = begin + min(lane, count - 1);
  const uint4 entry = gathered.entries[number];
  const GroupedLookup lookup{entry.x, entry.y, entry.z, entry.w};
  LookupScale scale = load_scale(lookup, feature, workspace, nullptr, 0);
  scale.weight = gathered.factors[number];
  const uint32_t unused = shared_address(&storage.plan.unused[lane]);
  typename Chain::Second second;
  uint32_t resident = second_slice<Chain>(feature, __shfl_sync(kAllLanes, lookup.i2, 0));
  Chain::load_second(second, workspace, resident, lane, unused);
  plan_lookups<Chain>(
      storage.plan, lookup, count, [&] { return factor_of(scale); }, feature, range, workspace,
      output);
  __syncwarp();
  contract_planned<Chain, kExact, true, false>(storage, feature, workspace, output, second,
                                               resident);
  wait_for_touched();
}

}  // namespace flowtt::cuda
