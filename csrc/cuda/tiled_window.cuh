// What a warp does with a window, up to 32 neighbouring entries of one feature: it finds the
// distinct ids and the distinct prefixes (i1, i2) among them and writes down in which order it will
// compute them. One lane looks after one lookup.
//
// Nothing here needs sorted entries: a tile is up to four prefixes of one i2 that follow each other
// in the order of their first lookups. Sorting makes tiles full and ids meet.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

inline constexpr int kWindow = 32;

// A distinct id. `prefix` is where its P_x lies in the tile, a multiple of 512 bytes, and the flags.
struct __align__(16) PlannedRow {
  uint32_t third;   // slice of core 3, in bytes
  uint32_t target;  // kStoreRow: the sample; kBufferRow: the slot; kEmitEach: its lookups' lanes
  float factor;     // kStoreRow: of the scaled row
  uint32_t prefix;
};
inline constexpr uint32_t kStoreRow = 0;   // the only lookup of a bag of one lookup
inline constexpr uint32_t kBufferRow = 1;  // lookups of larger bags: to `rows`
inline constexpr uint32_t kEmitEach = 2;   // any lookups: stored or added, one by one
inline constexpr uint32_t kRowKind = 3;
inline constexpr uint32_t kFirstOfPrefix = 4;  // the id before it has another prefix
inline constexpr uint32_t kFirstOfTile = 8;
inline constexpr uint32_t kPrefixPlace = ~511u;

// Up to four prefixes of one i2.
struct PlannedTile {
  uint32_t second;    // slice of core 2, in bytes
  uint32_t prefixes;  // number of the first | how many << 16
};

// Of one warp, in shared memory. Rows are in the order of their prefixes.
struct WindowPlan {
  PlannedRow rows[kWindow];
  PlannedTile tiles[kWindow];
  uint2 lookups[kWindow];   // {sample | kLoneLookup, factor of the scaled row}
  uint32_t first[kWindow];  // slice of core 1 of each prefix, in bytes
};

struct WindowCounts {
  int rows;
  int tiles;
};

__device__ __forceinline__ uint32_t lanes_before(int lane) { return (1u << lane) - 1; }

__device__ __forceinline__ int lowest_lane(uint32_t lanes) { return __ffs(lanes) - 1; }

__device__ __forceinline__ int highest_lane(uint32_t lanes) { return 31 - __clz(lanes); }

// What the window's lookups have in common. The same in all lanes but for `prefix` and `id`.
struct WindowGroups {
  uint32_t prefix;       // lanes with the lane's (i1, i2)
  uint32_t id;           // lanes with its id
  uint32_t first_of_prefixes;
  uint32_t first_of_ids;
  uint32_t first_of_runs;  // prefixes whose i2 is not that of the prefix before
};

__device__ __forceinline__ WindowGroups group_window(const GroupedLookup& lookup, int count,
                                                     uint32_t disabled) {
  const int lane = threadIdx.x % 32;
  const uint32_t valid = kAllLanes >> (32 - count);
  WindowGroups groups;
  groups.prefix = __match_any_sync(kAllLanes, lookup.outer << 16 | lookup.i2) & valid;
  groups.id = __match_any_sync(kAllLanes, lookup.outer) & groups.prefix;
  // Lanes beyond the window repeat its last lookup, and are in no group.
  if ((disabled & kFoldingDisabled) != 0) groups.id = 1u << lane & valid;
  if ((disabled & kSharingDisabled) != 0) groups.prefix = 1u << lane & valid;
  if ((disabled & kSharingDisabled) != 0) groups.id &= groups.prefix;
  groups.first_of_prefixes = __ballot_sync(kAllLanes, lowest_lane(groups.prefix) == lane);
  groups.first_of_ids = __ballot_sync(kAllLanes, lowest_lane(groups.id) == lane);
  const uint32_t earlier = groups.first_of_prefixes & lanes_before(lane);
  const uint32_t i2_before = __shfl_sync(kAllLanes, lookup.i2, highest_lane(earlier));
  groups.first_of_runs =
      __ballot_sync(kAllLanes, earlier == 0 || i2_before != lookup.i2) & groups.first_of_prefixes;
  return groups;
}

// The number of the lane's first row: rows of earlier prefixes.
__device__ __forceinline__ int rows_before_prefix(const WindowGroups& groups) {
  const int lane = threadIdx.x % 32;
  const bool is_first = lowest_lane(groups.prefix) == lane;
  const int rows = is_first ? __popc(groups.prefix & groups.first_of_ids) : 0;
  int up_to = rows;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  return __shfl_sync(kAllLanes, up_to - rows, lowest_lane(groups.prefix));
}

// Where the row of the lane's id goes. Counts the slots of `rows` that the block has used in
// `used_slots`, in shared memory.
struct RowTarget {
  uint32_t kind;
  uint32_t target;
};

__device__ __forceinline__ RowTarget choose_target(const WindowGroups& groups,
                                                   const GroupedLookup& lookup,
                                                   const TiledRange& range,
                                                   const TiledWorkspace& workspace,
                                                   uint32_t first_entry, int32_t* used_slots) {
  const int lane = threadIdx.x % 32;
  const bool is_lone = (lookup.sample & kLoneLookup) != 0;
  const uint32_t lone = __ballot_sync(kAllLanes, is_lone);
  const int sharers = __popc(groups.id);
  RowTarget row{kEmitEach, groups.id};
  if (is_lone && sharers == 1) row = {kStoreRow, lookup.sample & ~kLoneLookup};
  if (workspace.rows == nullptr) return row;
  bool buffers = (lone & groups.id) == 0 && sharers >= range.buffered_sharers;
  const int head = lowest_lane(groups.id);
  uint32_t slot = first_entry + head;
  if (workspace.rows_per_block > 0) {
    const uint32_t heads =
        __ballot_sync(kAllLanes, buffers && head == lane);
    int32_t index = 0;
    if (lane == 0 && heads != 0) index = atomicAdd(used_slots, __popc(heads));
    index = __shfl_sync(kAllLanes, index, 0) + __popc(heads & lanes_before(head));
    buffers = buffers && index < workspace.rows_per_block;
    slot = blockIdx.x * workspace.rows_per_block + index;
  }
  return buffers ? RowTarget{kBufferRow, slot} : row;
}

// Plans the window of `count` lookups that starts at `first_entry`; `lookup` is the lane's. Called
// by whole warps; the plan is complete after a __syncwarp.
template <typename Chain>
__device__ __forceinline__ WindowCounts plan_window(WindowPlan& plan, const GroupedLookup& lookup,
                                                    const TiledFeature& feature,
                                                    const TiledRange& range,
                                                    const TiledWorkspace& workspace,
                                                    uint32_t first_entry, int count,
                                                    int32_t* used_slots) {
  const int lane = threadIdx.x % 32;
  const uint32_t i1 = lookup.outer & 0xffffu;
  const uint32_t i3 = lookup.outer >> 16;
  // Loads that are needed last.
  const int32_t exponent = __ldg(workspace.exponents + feature.exponents[0] + i1) +
                           __ldg(workspace.exponents + feature.exponents[1] + lookup.i2) +
                           __ldg(workspace.exponents + feature.exponents[2] + i3);
  const float weight = workspace.factors != nullptr && lane < count
                           ? __ldg(workspace.factors + first_entry + lane)
                           : 1.0f;

  const WindowGroups groups = group_window(lookup, count, range.disabled);
  const int first_lane = lowest_lane(groups.prefix);
  const int prefix = __popc(groups.first_of_prefixes & lanes_before(first_lane));
  const int run = highest_lane(groups.first_of_runs & (2u * lanes_before(first_lane) + 1u));
  const int prefix_of_run = prefix - __popc(groups.first_of_prefixes & lanes_before(run));
  const bool starts_tile = first_lane == lane && prefix_of_run % kTileLookups == 0;
  const uint32_t tiles = __ballot_sync(kAllLanes, starts_tile);
  if (first_lane == lane) {
    plan.first[prefix] = feature.packed[0] * static_cast<uint32_t>(sizeof(__half)) +
                         i1 * Chain::kFirstSlice;
  }
  if (starts_tile) {
    const uint32_t later_runs = groups.first_of_runs & ~(2u * lanes_before(lane) + 1u);
    const uint32_t up_to_next = later_runs != 0 ? lanes_before(lowest_lane(later_runs)) : kAllLanes;
    const int end = __popc(groups.first_of_prefixes & up_to_next);
    plan.tiles[__popc(tiles & lanes_before(lane))] = {
        feature.packed[1] * static_cast<uint32_t>(sizeof(__half)) +
            lookup.i2 * Chain::kSecondSlice,
        static_cast<uint32_t>(prefix) | static_cast<uint32_t>(min(end - prefix, kTileLookups))
                                            << 16};
  }

  const uint32_t ids_before = groups.prefix & groups.first_of_ids & lanes_before(lane);
  const int rank = rows_before_prefix(groups) + __popc(ids_before);
  const RowTarget target =
      choose_target(groups, lookup, range, workspace, first_entry, used_slots);
  const float factor = ldexpf(weight, -exponent);
  plan.lookups[lane] = make_uint2(lookup.sample, __float_as_uint(factor));
  if ((groups.first_of_ids >> lane & 1) != 0) {
    const bool first_of_prefix = ids_before == 0;
    plan.rows[rank] = {
        feature.packed[2] * static_cast<uint32_t>(sizeof(__half)) + i3 * Chain::kThirdSlice,
        target.target, factor,
        prefix_of_run % kTileLookups * Chain::kPrefix | target.kind |
            (first_of_prefix ? kFirstOfPrefix : 0) |
            (first_of_prefix && prefix_of_run % kTileLookups == 0 ? kFirstOfTile : 0)};
  }
  if (workspace.rows != nullptr && lane < count && (lookup.sample & kLoneLookup) == 0) {
    constexpr int kShift = Chain::kParts == 1 ? kBufferedRowShift : 0;
    const float buffered_factor = factor * static_cast<float>(1 << kShift);
    workspace.row_of_lookup[lookup.position] =
        target.kind == kBufferRow ? make_uint2(target.target, __float_as_uint(buffered_factor))
                                  : make_uint2(kAddedRow, 0u);
  }
  return {__popc(groups.first_of_ids), __popc(tiles)};
}

}  // namespace flowtt::cuda
