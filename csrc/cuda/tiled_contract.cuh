// The contraction: persistent blocks whose warps take windows of lookups and compute their rows.
// tiled_pooled_contract.cuh has the kernel for bags of several lookups.

#pragma once

#include <cstddef>

#include "tiled_checkpoints.cuh"
#include "tiled_emission.cuh"
#include "tiled_tile.cuh"

namespace flowtt::cuda {

// A warp's shared memory.
template <typename Chain, bool kFused>
struct __align__(128) WarpStorage {
  char tile[kFused ? Chain::kTile : 0];
  WindowPlan plan;
};

// The entries of a window.
struct EntryRange {
  int f;  // feature of the group
  int first_entry;
  int count;
};

// The slices of core 3 of two rows.
template <typename Chain>
struct ThirdPair {
  typename Chain::Third rows[2];
};

// Computes the rows of a planned window. `plan`: address of the WindowPlan. `second` holds the
// slice of core 2 of its first tile; `resident` says which slice that is. kFirstAhead: slices of
// core 1 are loaded a tile ahead.
template <typename Chain, bool kFirstAhead, typename Tile, typename Emitter>
__device__ __forceinline__ void contract_window(const Tile& tile, uint32_t plan, uint32_t lane,
                                                typename Chain::Second& second, uint32_t& resident,
                                                const TiledWorkspace& workspace,
                                                const Emitter& emitter) {
  const uint32_t unused = plan + offsetof(WindowPlan, unused) + lane * sizeof(uint32_t);
  const Tile read_tile = tile.at(Chain::read_offset(lane));
  const uint32_t third_lane = Chain::third_offset(lane);
  const auto first_slice = [&](uint32_t prefix) {
    return load_shared_word(plan + offsetof(WindowPlan, first) + prefix * sizeof(uint32_t));
  };
  // Where the lane's words of a tile's prefixes lie.
  const auto own_first = [&](uint32_t first_of_tile) {
    return first_slice(first_of_tile + Chain::own_prefix(lane)) + Chain::first_offset(lane);
  };
  const auto second_slice_of = [&](uint32_t prefix) {
    return load_shared_word(plan + offsetof(WindowPlan, second) + prefix * sizeof(uint32_t));
  };
  // `sources`: as in PlannedPair.
  const auto load_thirds = [&](ThirdPair<Chain>& pair, const uint4& sources) {
    Chain::load_third(pair.rows[0], workspace, sources.x + third_lane);
    Chain::load_third(pair.rows[1], workspace, sources.z + third_lane);
  };
  typename Chain::FirstPart first;
  if constexpr (kFirstAhead) Chain::load_first_part(first, workspace, 0, own_first(0));
  uint32_t planned = plan + offsetof(WindowPlan, pairs);
  const auto pair_ahead = [&](int pairs) {
    return load_shared_vector(planned + pairs * sizeof(PlannedPair));
  };
  const uint4 first_pair = pair_ahead(0);
  ThirdPair<Chain> pair;
  load_thirds(pair, first_pair);
  uint32_t place = first_pair.y;  // of the rows of the pair
  uint32_t next_place = first_pair.w;
  if ((place & kHeavyPrefix) != 0) {
    const Checkpoint<Chain> checkpoint(workspace, first_slice(0), second_slice_of(0));
    const CheckpointState state = checkpoint.find();
    // Whether the warp is to publish its product is looked up at the end, not held in a register.
    if (state != CheckpointState::kOwned && lane == 0) {
      store_shared_vector(planned, make_uint4(first_pair.x, first_pair.y & ~kHeavyPrefix,
                                              first_pair.z, first_pair.w));
    }
    __syncwarp();
    if (state == CheckpointState::kReady) {
      typename Chain::Prefix prefix;
      checkpoint.load(prefix);
      Chain::store_prefix(prefix, read_tile);
      place &= ~kFirstOfTile;
    }
  }
  const auto start_tile = [&] {
    const uint32_t prefix = place >> 8 & 0xffu;
    const uint32_t next_prefix = prefix + 1 + (place & 0xffu) / kTilePrefix;
    const uint32_t slice = (second_slice_of(prefix) & ~kNewSecond) + Chain::second_offset(lane);
    if constexpr (!kFirstAhead) Chain::load_first_part(first, workspace, 0, own_first(prefix));
    __syncwarp();  // the last tile has been read
    Chain::compute_prefixes(tile, lane, first, second, workspace, own_first(prefix), slice);
    // What the next tile needs. After the last one, prefixes of an earlier window.
    if constexpr (kFirstAhead) {
      Chain::load_first_part(first, workspace, 0, own_first(next_prefix));
    }
    if constexpr (Chain::kHolds) {
      const uint32_t next_slice = second_slice_of(next_prefix);
      if ((next_slice & kNewSecond) != 0) {
        Chain::load_second(second, workspace, next_slice - kNewSecond, lane, unused);
      }
    }
    __syncwarp();
  };
  // Computes two rows and replaces their slices by those of the next pair. False after the last.
  const auto step = [&] {
    constexpr uint32_t kDestinations = offsetof(PlannedPair, destinations);
    // Two rows of one tile are computed together.
    const bool is_pair = (next_place & (kFirstOfTile | kPastEnd)) == 0;
#pragma unroll 1
    for (bool is_second = false;; is_second = true) {
      if ((place & kFirstOfTile) != 0) start_tile();
      const uint4 destination =
          load_shared_vector(planned + kDestinations + (is_second ? sizeof(RowDestination) : 0));
      if (is_pair) {
        typename Chain::Prefix prefixes[2];
        Chain::load_prefix(prefixes[0], read_tile, place >> 16);
        Chain::load_prefix(prefixes[1], read_tile, next_place >> 16);
        const uint4 next_destination =
            load_shared_vector(planned + kDestinations + sizeof(RowDestination));
        const uint4 ahead = pair_ahead(1);
        float rows[2][4];
        Chain::compute_rows(rows, prefixes, pair.rows);
        load_thirds(pair, ahead);
        emitter.emit_pair(rows, place, next_place, destination, next_destination);
        break;
      }
      typename Chain::Prefix prefixes[1];
      Chain::load_prefix(prefixes[0], read_tile, place >> 16);
      const typename Chain::Third third[1] = {pair.rows[0]};
      float rows[1][4];
      Chain::compute_rows(rows, prefixes, third);
      emitter.emit(rows[0], place, destination);
      if (is_second || (next_place & kPastEnd) != 0) {
        load_thirds(pair, pair_ahead(1));
        break;
      }
      place = next_place;
      pair.rows[0] = pair.rows[1];
    }
    const uint4 next = pair_ahead(1);
    planned += sizeof(PlannedPair);
    place = next.y;
    next_place = next.w;
    return (place & kPastEnd) == 0;
  };
  while (step()) {
  }
  resident = second_slice_of(place >> 8 & 0xffu) & ~kNewSecond;
  const uint32_t first_place = plan + offsetof(WindowPlan, pairs) + offsetof(RowSource, place);
  if ((load_shared_word(first_place) & kHeavyPrefix) != 0) {
    typename Chain::Prefix prefix;
    Chain::load_prefix(prefix, read_tile, 0);
    Checkpoint<Chain>(workspace, first_slice(0), second_slice_of(0)).publish(prefix);
  }
}

// Emitting rows of padded tilings takes the registers that loading ahead would need.
template <typename Chain, bool kExact>
inline constexpr bool kLoadsFirstAhead = kExact || Chain::kParts == 1;

// The rest of a warp's work on a planned window.
template <typename Chain, bool kExact, bool kFused, bool kPooled>
__device__ __forceinline__ void contract_planned(WarpStorage<Chain, kFused>& storage,
                                                 const TiledFeature& feature,
                                                 const TiledWorkspace& workspace,
                                                 const PooledOutput& output,
                                                 typename Chain::Second& second,
                                                 uint32_t& resident) {
  // Held from here on only: planning needs registers too.
  const uint32_t lane = hold(static_cast<uint32_t>(threadIdx.x % 32));
  const uint32_t address = hold(shared_address(&storage));
  using Storage = WarpStorage<Chain, kFused>;
  const uint32_t plan = address + offsetof(Storage, plan);
  const RowEmitter<Chain, kExact, kPooled> emitter(feature, output.type,
                                                   plan + offsetof(WindowPlan, lookups), lane);
  constexpr bool kFirstAhead = kLoadsFirstAhead<Chain, kExact>;
  if constexpr (kFused) {
    contract_window<Chain, kFirstAhead>(SharedTile{address}, plan, lane, second, resident,
                                        workspace, emitter);
  } else {
    const int64_t warp = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
    char* const tile = static_cast<char*>(workspace.scratch) + warp * Chain::kTile;
    contract_window<Chain, kFirstAhead>(ScratchTile{reinterpret_cast<uint64_t>(tile)}, plan, lane,
                                        second, resident, workspace, emitter);
  }
}

// Where the row of a lookup goes that is not buffered.
__device__ __forceinline__ RowDestination plan_lookup(uint32_t sample, float factor,
                                                      const TiledFeature& feature,
                                                      const TiledRange& range,
                                                      const TiledWorkspace& workspace,
                                                      const PooledOutput& output) {
  if ((sample & kLoneLookup) == 0) {
    return {sum_row(range, workspace, output, feature, sample), factor, kAddRow};
  }
  return {output_row(output, feature, sample & ~kLoneLookup), factor,
          output.type == ElementType::kFloat32 ? kStoreFp32 : kStore16Bits};
}

// Where rows are not buffered: of lookups that have been sorted.
template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused,
          int kHeld, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_contract_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  using Storage = WarpStorage<Chain, kFused>;
  __shared__ Segments segments;
  __shared__ Windows windows;
  extern __shared__ __align__(128) char warp_storage[];
  const int lane = threadIdx.x % 32;
  Storage& storage = reinterpret_cast<Storage*>(warp_storage)[threadIdx.x / 32];

  allow_dependent_launch();
  for (int i = lane; i < kWindow + kTileLookups; i += 32) storage.plan.first[i] = 0;
  load_segments(segments, group, batch, range);
  // Offsets out of order can make features overlap; the preparation reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  const int warps = blockDim.x / 32;  // kWarps where shared memory allows it
  divide_into_windows(windows, group.count, warps, range.disabled, [&](int f) {
    return segments.first_entry[f + 1] - segments.first_entry[f];
  });
  WindowQueue queue(windows, workspace.control, warps);
  wait_for_previous_kernel();

  const uint4* const entries = reinterpret_cast<const uint4*>(workspace.entries);
  const auto locate = [&](int32_t window) {
    int f = 0;
    while (windows.first_window[f + 1] <= window) ++f;
    const int begin = (window - windows.first_window[f]) * windows.size;
    return EntryRange{f, segments.first_entry[f] + begin,
                      min(windows.size, windows.entries[f] - begin)};
  };
  const uint32_t unused = shared_address(&storage.plan.unused[lane]);
  typename Chain::Second second;
  uint32_t resident = ~0u;  // the slice in `second`
  while (queue.take()) {
    const auto [f, first_entry, count] = locate(queue.window());
    const TiledFeature& feature = group.features[f];
    const int number = first_entry + min(lane, count - 1);
    const uint4 entry = __ldg(entries + number);
    queue.ask();
    const GroupedLookup lookup{entry.x, entry.y, entry.z, entry.w};
    const LookupScale scale = load_scale(lookup, feature, workspace, workspace.factors, number);
    // That of the first tile, on its way during planning.
    const uint32_t slice = second_slice<Chain>(feature, __shfl_sync(kAllLanes, lookup.i2, 0));
    if (slice != resident) Chain::load_second(second, workspace, slice, lane, unused);
    __syncwarp();  // the last window's plan has been read
    const WindowGroups groups = group_window(lookup, count, range.disabled);
    plan_window<Chain>(storage.plan, lookup, groups, feature, range, [&] {
      RowDestination row =
          plan_lookup(lookup.sample, factor_of(scale), feature, range, workspace, output);
      storage.plan.lookups[lane] = row;
      const bool is_alone = (groups.id & (groups.id - 1)) == 0;
      if (row.kind == kAddRow || !is_alone) row = {groups.id, row.factor, kEmitEach};
      return row;
    });
    __syncwarp();
    queue.advance();
    if (queue.owns() && lane < 5) {  // lines of 8 entries, perhaps not aligned
      const EntryRange next = locate(queue.window());
      touch(unused, entries + next.first_entry + min(8 * lane, next.count - 1));
    }
    contract_planned<Chain, kExact, kFused, false>(storage, feature, workspace, output, second,
                                                     resident);
  }
  wait_for_touched();
}

}  // namespace flowtt::cuda
