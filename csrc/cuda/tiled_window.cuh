// What a warp does with a window, up to 32 neighbouring entries of one feature: it finds the
// distinct ids and the distinct prefixes (i1, i2) among them and writes down in which order it will
// compute them. One lane looks after one lookup.
//
// Nothing here needs sorted entries: a tile is up to four prefixes of one i2 that follow each other
// in the order of their first lookups. Sorting makes tiles full and ids meet.

#pragma once

#include "tiled_queue.cuh"

namespace flowtt::cuda {

// Rows are computed two at a time. Pairs whose slices of core 3 are on their way meanwhile.
inline constexpr int kMaxPairsAhead = 2;

// Of a distinct id: what is read when loads start ahead.
struct RowSource {
  uint32_t third;  // slice of core 3, in bytes
  uint32_t place;  // of its P_x in the tile, in bytes << 16 | first prefix of the tile << 8 |
                   // (prefixes of the tile - 1) * kTilePrefix | flags
};
// And what is read with the row.
struct __align__(16) RowDestination {
  uint64_t target;  // address of the row; kEmitEach: slot or kAddedRow << 32 | its lookups' lanes
  float factor;     // of the scaled row
};
struct PlannedPair {
  RowSource sources[2];  // one vector
  RowDestination destinations[2];
};
inline constexpr uint32_t kStoreFp32 = 0;    // the only lookup is of a bag of one lookup
inline constexpr uint32_t kBufferRow = 1;    // its lookups are of larger bags
inline constexpr uint32_t kStore16Bits = 2;  // as kStoreFp32
inline constexpr uint32_t kEmitEach = 3;     // any lookups, one by one
inline constexpr uint32_t kRowKind = 3;
inline constexpr uint32_t kFirstOfTile = 8;
inline constexpr uint32_t kPastEnd = 16;  // not a row of the window
// With kFirstOfTile: the prefix fills the window, so other windows are likely to have it too.
inline constexpr uint32_t kHeavyPrefix = 32;
inline constexpr uint32_t kTilePrefix = 64;

// Two rows of one tile that are stored as they are or both buffered need no branches of their own.
__device__ __forceinline__ bool are_plain(uint32_t place, uint32_t next_place) {
  return ((place | next_place) & 2u) == 0 && ((place ^ next_place) & kRowKind) == 0 &&
         (next_place & kFirstOfTile) == 0;
}

// Of one warp, in shared memory. Rows are in the order of their prefixes. The last one is followed
// by itself, so that there are whole pairs, and by slices of core 3, so that loading ahead needs no
// end; the last prefix by its slice of core 2. A tile's prefixes may be followed by those of the
// next one or of an earlier window: what is computed for them is not used.
struct __align__(16) WindowPlan {
  PlannedPair pairs[kWindow / 2 + kMaxPairsAhead + 1];
  uint2 lookups[kWindow];                  // {sample | kLoneLookup, bits of the factor}
  uint32_t first[kWindow + kTileLookups];  // of each prefix: slice of core 1, in bytes
  uint32_t second[kWindow + 1];            // and of core 2, in bytes | kNewSecond
  uint32_t unused;                         // see touch
};
// The tile that starts with this prefix has another slice of core 2 than the tile before.
inline constexpr uint32_t kNewSecond = 1;

__device__ __forceinline__ uint32_t lanes_before(int lane) { return (1u << lane) - 1; }

__device__ __forceinline__ int lowest_lane(uint32_t lanes) { return __ffs(lanes) - 1; }

__device__ __forceinline__ int highest_lane(uint32_t lanes) { return 31 - __clz(lanes); }

// What the window's lookups have in common. The same in all lanes but for `prefix` and `id`.
struct WindowGroups {
  uint32_t prefix;  // lanes with the lane's (i1, i2)
  uint32_t id;      // lanes with its id
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

// Where the row of the lane's id goes: its kind, and the slot of the lookups that are buffered or
// kAddedRow. `used_slots`, in shared memory, counts the block's.
struct RowTarget {
  uint32_t kind;
  uint32_t slot;
};

__device__ __forceinline__ RowTarget choose_target(const WindowGroups& groups,
                                                   const GroupedLookup& lookup,
                                                   const TiledRange& range,
                                                   const TiledWorkspace& workspace,
                                                   ElementType output_type, uint32_t first_entry,
                                                   int32_t* used_slots) {
  const int lane = threadIdx.x % 32;
  const bool is_lone = (lookup.sample & kLoneLookup) != 0;
  const uint32_t lone = __ballot_sync(kAllLanes, is_lone) & groups.id;
  RowTarget row{kEmitEach, kAddedRow};
  if (is_lone && (groups.id & (groups.id - 1)) == 0) {
    row.kind = output_type == ElementType::kFloat32 ? kStoreFp32 : kStore16Bits;
  }
  if (workspace.rows == nullptr) return row;
  const int sharers = __popc(groups.id & ~lone);
  bool buffers = sharers > 0 && sharers >= range.buffered_sharers;
  const int head = lowest_lane(groups.id);
  uint32_t slot = first_entry + head;
  if (workspace.rows_per_block > 0) {
    const uint32_t heads = __ballot_sync(kAllLanes, buffers && head == lane);
    int32_t index = 0;
    if (lane == 0 && heads != 0) index = atomicAdd(used_slots, __popc(heads));
    index = __shfl_sync(kAllLanes, index, 0) + __popc(heads & lanes_before(head));
    buffers = buffers && index < workspace.rows_per_block;
    slot = blockIdx.x * workspace.rows_per_block + index;
  }
  if (!buffers) return row;
  return {lone == 0 ? kBufferRow : kEmitEach, slot};
}

// 2^exponent as the product of two normal numbers, or the nearest that there is.
__device__ __forceinline__ float scaled(float value, int32_t exponent) {
  const int32_t half = min(max(exponent >> 1, -126), 127);
  const int32_t rest = min(max(exponent - half, -126), 127);
  return value * __int_as_float((half + 127) << 23) * __int_as_float((rest + 127) << 23);
}

// Addresses of rows. They are computed here, by the lane that looks after the row: with all of them
// in the loop over rows, loads of constants would delay every store.
__device__ __forceinline__ uint64_t output_row(const PooledOutput& output,
                                               const TiledFeature& feature, uint32_t sample) {
  const int element = output.type == ElementType::kFloat32 ? 4 : 2;
  return reinterpret_cast<uint64_t>(output.data) +
         (sample * output.row_stride + feature.output_column) * element;
}

template <typename Chain>
__device__ __forceinline__ uint64_t buffered_row(const TiledWorkspace& workspace, uint32_t slot) {
  constexpr int kElement = Chain::kParts == 1 ? 2 : 4;
  return reinterpret_cast<uint64_t>(workspace.rows) +
         static_cast<uint64_t>(slot) * (workspace.buffered_row_elements * kElement);
}

// Where the packed slice of core 2 lies, in bytes.
template <typename Chain>
__device__ __forceinline__ uint32_t second_slice(const TiledFeature& feature, uint32_t i2) {
  return feature.packed[1] * static_cast<uint32_t>(sizeof(__half)) + i2 * Chain::kSecondSlice;
}

// What a scaled row is multiplied by when it is buffered.
template <typename Chain>
__device__ __forceinline__ constexpr float buffered_row_scale() {
  return Chain::kParts == 1 ? 1.0f / (1 << kBufferedRowShift) : 1.0f;
}

// What the lane's lookup is multiplied by. Planning needs it last.
struct LookupScale {
  int32_t exponents[3];
  float weight;
};

__device__ __forceinline__ LookupScale load_scale(const GroupedLookup& lookup,
                                                  const TiledFeature& feature,
                                                  const TiledWorkspace& workspace,
                                                  uint32_t first_entry, int count) {
  const uint32_t digits[3] = {lookup.outer & 0xffffu, lookup.i2, lookup.outer >> 16};
  LookupScale scale;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    scale.exponents[k] = __ldg(workspace.exponents + feature.exponents[k] + digits[k]);
  }
  const int lane = threadIdx.x % 32;
  scale.weight = workspace.factors != nullptr && lane < count
                     ? __ldg(workspace.factors + first_entry + lane)
                     : 1.0f;
  return scale;
}

// Plans the window of `count` lookups that starts at `first_entry`; `lookup` is the lane's. Called
// by whole warps; the plan is complete after a __syncwarp.
template <typename Chain>
__device__ __forceinline__ void plan_window(WindowPlan& plan, const GroupedLookup& lookup,
                                            const LookupScale& scale, const TiledFeature& feature,
                                            const TiledRange& range,
                                            const TiledWorkspace& workspace,
                                            const PooledOutput& output, uint32_t first_entry,
                                            int count, int32_t* used_slots) {
  const int lane = threadIdx.x % 32;
  const uint32_t i1 = lookup.outer & 0xffffu;
  const uint32_t i3 = lookup.outer >> 16;
  const WindowGroups groups = group_window(lookup, count, range.disabled);
  const int first_lane = lowest_lane(groups.prefix);
  const int prefix = __popc(groups.first_of_prefixes & lanes_before(first_lane));
  const int run = highest_lane(groups.first_of_runs & (2u * lanes_before(first_lane) + 1u));
  const int prefix_of_run = prefix - __popc(groups.first_of_prefixes & lanes_before(run));
  const int x = prefix_of_run % kTileLookups;
  const uint32_t tiles = __ballot_sync(kAllLanes, first_lane == lane && x == 0);
  const int prefixes = __popc(groups.first_of_prefixes);
  const uint32_t later_tiles = tiles & ~(2u * lanes_before(first_lane) + 1u);
  const int end_of_tile =
      later_tiles == 0 ? prefixes
                       : __popc(groups.first_of_prefixes & lanes_before(lowest_lane(later_tiles)));
  const int first_of_tile = prefix - x;
  if (first_lane == lane) {
    plan.first[prefix] =
        feature.packed[0] * static_cast<uint32_t>(sizeof(__half)) + i1 * Chain::kFirstSlice;
    const uint32_t second = second_slice<Chain>(feature, lookup.i2);
    plan.second[prefix] = second | (prefix > 0 && prefix_of_run == 0 ? kNewSecond : 0);
    if (prefix == prefixes - 1) plan.second[prefixes] = second;
  }

  const uint32_t ids_before = groups.prefix & groups.first_of_ids & lanes_before(lane);
  const int rank = rows_before_prefix(groups) + __popc(ids_before);
  const int rows = __popc(groups.first_of_ids);
  const RowTarget target =
      choose_target(groups, lookup, range, workspace, output.type, first_entry, used_slots);
  const float factor =
      scaled(scale.weight, -(scale.exponents[0] + scale.exponents[1] + scale.exponents[2]));
  plan.lookups[lane] = make_uint2(lookup.sample, __float_as_uint(factor));
  const uint32_t third =
      feature.packed[2] * static_cast<uint32_t>(sizeof(__half)) + i3 * Chain::kThirdSlice;
  if ((groups.first_of_ids >> lane & 1) != 0) {
    const uint32_t place =
        x * Chain::kPrefix << 16 | first_of_tile << 8 |
        (end_of_tile - first_of_tile - 1) * kTilePrefix | target.kind |
        (groups.prefix == kAllLanes && (range.disabled & kCheckpointsDisabled) == 0 ? kHeavyPrefix
                                                                                    : 0);
    RowDestination row;
    row.target = output_row(output, feature, lookup.sample & ~kLoneLookup);
    row.factor = factor;
    if (target.kind == kBufferRow) {
      row.target = buffered_row<Chain>(workspace, target.slot);
      row.factor = buffered_row_scale<Chain>();
    } else if (target.kind == kEmitEach) {
      row.target = static_cast<uint64_t>(target.slot) << 32 | groups.id;
    }
    plan.pairs[rank / 2].sources[rank % 2] = {
        third, place | (ids_before == 0 && x == 0 ? kFirstOfTile : 0)};
    plan.pairs[rank / 2].destinations[rank % 2] = row;
    if (rank == rows - 1) {
      plan.pairs[rows / 2].sources[rows % 2] = {third,
                                                (place & ~0xff00u) | prefixes << 8 | kPastEnd};
      plan.pairs[rows / 2].destinations[rows % 2] = row;
    }
  }
  const int beyond = rows + 1 + lane;
  if (lane < 2 * kMaxPairsAhead) {
    plan.pairs[beyond / 2].sources[beyond % 2] = {third, prefixes << 8 | kPastEnd};
  }
  if (workspace.rows != nullptr && lane < count && (lookup.sample & kLoneLookup) == 0) {
    workspace.row_of_lookup[lookup.position] = make_uint2(
        target.slot,
        target.slot != kAddedRow ? __float_as_uint(factor / buffered_row_scale<Chain>()) : 0u);
  }
}

}  // namespace flowtt::cuda
