// What a warp does with a window, up to 32 neighbouring entries of one feature: it finds the
// distinct ids and the distinct prefixes (i1, i2) among them and writes down in which order it will
// compute them. One lane looks after one lookup.
//
// Nothing here needs sorted entries: a tile is up to four prefixes of one i2 that follow each other
// in the order of their first lookups. Sorting makes tiles full and ids meet.

#pragma once

#include "tiled_queue.cuh"

namespace flowtt::cuda {

// Of a distinct id: what is read when loads start ahead.
struct RowSource {
  uint32_t third;  // slice of core 3, in bytes
  uint32_t place;  // of its P_x in the tile, in bytes << 16 | first prefix of the tile << 8 |
                   // (prefixes of the tile - 1) * kTilePrefix | flags
};
// And what is read with the row.
struct __align__(16) RowDestination {
  uint64_t target;  // address of the row or, kAddRow, of the sum; kEmitEach: its lookups' lanes
  float factor;     // of the scaled row
  uint32_t kind;
};
struct PlannedPair {
  RowSource sources[2];  // one vector
  RowDestination destinations[2];
};
inline constexpr uint32_t kStoreFp32 = 0;    // the only lookup is of a bag of one lookup
inline constexpr uint32_t kBufferRow = 1;    // its lookups are of larger bags
inline constexpr uint32_t kStore16Bits = 2;  // as kStoreFp32
inline constexpr uint32_t kEmitEach = 3;     // where nothing is buffered: any lookups, one by one
inline constexpr uint32_t kAddRow = 3;       // the only lookup is of a larger bag: added to its sum
inline constexpr uint32_t kRowKind = 3;
inline constexpr uint32_t kFirstOfTile = 8;
inline constexpr uint32_t kPastEnd = 16;  // not a row of the window
// With kFirstOfTile: the prefix fills the window, so other windows are likely to have it too.
inline constexpr uint32_t kHeavyPrefix = 32;
inline constexpr uint32_t kTilePrefix = 64;

// Of one warp, in shared memory. Rows are in the order of their prefixes, and are computed two at a
// time, while the slices of core 3 of the next two are on their way. The last row is followed by
// slices of core 3, so that there are whole pairs and loading ahead needs no end; the last
// prefix by its slice of core 2. A tile's prefixes may be followed by those of the next one or of
// an earlier window: what is computed for them is not used.
struct __align__(16) WindowPlan {
  PlannedPair pairs[kWindow / 2 + 2];
  RowDestination lookups[kWindow];         // kEmitEach: kStoreFp32, kStore16Bits or kAddRow
  uint32_t first[kWindow + kTileLookups];  // of each prefix: slice of core 1, in bytes
  uint32_t second[kWindow + 1];            // and of core 2, in bytes | kNewSecond
  uint32_t unused[32];                     // of each lane: see touch
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

// What entries of a window have in common whose `id`s are known.
__device__ __forceinline__ WindowGroups group_prefixes(const GroupedLookup& lookup, uint32_t prefix,
                                                       uint32_t id) {
  const int lane = threadIdx.x % 32;
  WindowGroups groups{prefix, id, 0, 0, 0};
  groups.first_of_prefixes = __ballot_sync(kAllLanes, lowest_lane(groups.prefix) == lane);
  groups.first_of_ids = __ballot_sync(kAllLanes, lowest_lane(groups.id) == lane);
  const uint32_t earlier = groups.first_of_prefixes & lanes_before(lane);
  const uint32_t i2_before = __shfl_sync(kAllLanes, lookup.i2, highest_lane(earlier));
  groups.first_of_runs =
      __ballot_sync(kAllLanes, earlier == 0 || i2_before != lookup.i2) & groups.first_of_prefixes;
  return groups;
}

// The lanes with the lane's prefix. Lanes beyond the window repeat its last entry, and are in no
// group.
__device__ __forceinline__ uint32_t match_prefix(const GroupedLookup& lookup, int count,
                                                 uint32_t disabled) {
  const uint32_t valid = kAllLanes >> (32 - count);
  if ((disabled & kSharingDisabled) != 0) return 1u << threadIdx.x % 32 & valid;
  return __match_any_sync(kAllLanes, lookup.outer << 16 | lookup.i2) & valid;
}

// Of `count` lookups.
__device__ __forceinline__ WindowGroups group_window(const GroupedLookup& lookup, int count,
                                                     uint32_t disabled) {
  const uint32_t valid = kAllLanes >> (32 - count);
  const uint32_t prefix = match_prefix(lookup, count, disabled);
  uint32_t id = 1u << threadIdx.x % 32 & valid;
  if ((disabled & kFoldingDisabled) == 0) {
    id = __match_any_sync(kAllLanes, lookup.outer) & prefix;
  }
  return group_prefixes(lookup, prefix, id);
}

// Of `count` rows: no two have one id.
__device__ __forceinline__ WindowGroups group_rows(const GroupedLookup& row, int count,
                                                   uint32_t disabled) {
  const uint32_t valid = kAllLanes >> (32 - count);
  return group_prefixes(row, match_prefix(row, count, disabled), 1u << threadIdx.x % 32 & valid);
}

// The number of the lane's first row: rows of earlier prefixes.
__device__ __forceinline__ int rows_before_prefix(const WindowGroups& groups) {
  const int lane = threadIdx.x % 32;
  const bool is_first = lowest_lane(groups.prefix) == lane;
  const int rows = is_first ? __popc(groups.prefix & groups.first_of_ids) : 0;
  return __shfl_sync(kAllLanes, inclusive_sum(rows) - rows, lowest_lane(groups.prefix));
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

// Of the bag's sum, where rows are added.
__device__ __forceinline__ uint64_t sum_row(const TiledRange& range,
                                            const TiledWorkspace& workspace,
                                            const PooledOutput& output, const TiledFeature& feature,
                                            uint32_t sample) {
  float* const row = workspace.sums != nullptr
                         ? workspace.sums + (sample - range.first_sample) * output.row_stride
                         : static_cast<float*>(output.data) + sample * output.row_stride;
  return reinterpret_cast<uint64_t>(row + feature.output_column);
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

// What a lookup's row is multiplied by, see TiledWorkspace. Planning needs it last.
struct LookupScale {
  int32_t exponents[3];
  float weight;
};

__device__ __forceinline__ LookupScale load_scale(const GroupedLookup& lookup,
                                                  const TiledFeature& feature,
                                                  const TiledWorkspace& workspace,
                                                  const float* factors, uint32_t entry) {
  const uint32_t digits[3] = {lookup.outer & 0xffffu, lookup.i2, lookup.outer >> 16};
  LookupScale scale;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    scale.exponents[k] = __ldg(workspace.exponents + feature.exponents[k] + digits[k]);
  }
  scale.weight = factors != nullptr ? __ldg(factors + entry) : 1.0f;
  return scale;
}

__device__ __forceinline__ float factor_of(const LookupScale& scale) {
  return scaled(scale.weight, -(scale.exponents[0] + scale.exponents[1] + scale.exponents[2]));
}

// Plans a window; `lookup` is the lane's, `groups` what group_window found. target(): where the row
// of the lane goes, called by all lanes; the first lane of each id counts. Called by whole warps;
// the plan is complete after a __syncwarp.
template <typename Chain, typename Target>
__device__ __forceinline__ void plan_window(WindowPlan& plan, const GroupedLookup& lookup,
                                            const WindowGroups& groups, const TiledFeature& feature,
                                            const TiledRange& range, Target&& target) {
  const int lane = threadIdx.x % 32;
  const uint32_t i1 = lookup.outer & 0xffffu;
  const uint32_t i3 = lookup.outer >> 16;
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
  const uint32_t third =
      feature.packed[2] * static_cast<uint32_t>(sizeof(__half)) + i3 * Chain::kThirdSlice;
  const RowDestination row = target();
  if ((groups.first_of_ids >> lane & 1) != 0) {
    const uint32_t place =
        x * Chain::kPrefix << 16 | first_of_tile << 8 |
        (end_of_tile - first_of_tile - 1) * kTilePrefix | row.kind |
        (groups.prefix == kAllLanes && (range.disabled & kCheckpointsDisabled) == 0 ? kHeavyPrefix
                                                                                    : 0);
    plan.pairs[rank / 2].sources[rank % 2] = {
        third, place | (ids_before == 0 && x == 0 ? kFirstOfTile : 0)};
    plan.pairs[rank / 2].destinations[rank % 2] = row;
  }
  const int beyond = rows + lane;
  if (lane <= 2) {
    plan.pairs[beyond / 2].sources[beyond % 2] = {third, prefixes << 8 | kPastEnd};
  }
}

}  // namespace flowtt::cuda
