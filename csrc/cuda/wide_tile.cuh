// Tiles of the wide kernel: up to 128 consecutive lookups of one i2, with as many distinct prefixes
// (i1, i2) as shared memory holds. Four warps plan a tile while the block works on the one before.

#pragma once

#include "wide_emission.cuh"
#include "wide_queue.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

constexpr int kTileEntries = 128;  // a lane of the planning warps each
constexpr int kPlanningWarps = kTileEntries / 32;
constexpr int kMaxTilePrefixes = 64;
constexpr int kMaxTileItems = kTileEntries * (kMaxWideColumns / 8);
constexpr int kMaxStackedRows = 128;  // of core 1, padded, of all prefixes of a tile
constexpr int kPrefixSlots = 256;     // of the hash table that finds equal i1

// Where a tile's prefix products come from.
enum class ProductSource : int32_t {
  kComputed,
  kPublished,   // computed, and copied to the checkpoints for other blocks
  kReloaded,    // from the checkpoints
  kLeftBehind,  // by the last tile, which had the same single prefix
};

// One product of stage 2: a distinct id, and 8 columns of core 3.
struct WideItem {
  uint32_t third;     // offset of core 3's columns
  uint32_t product;   // offset of the prefix's product
  uint32_t emitters;  // entries of the planning warp's 32 that the row is written for
  uint16_t first;     // the first of these 32
  uint16_t column;
};

struct WideTile {
  RowTarget targets[kTileEntries];
  WideItem items[kMaxTileItems];
  uint16_t i1[kMaxTilePrefixes];
  int32_t entries;  // 0: no work is left
  int32_t prefixes;
  int32_t item_count;
  int32_t feature;
  bool first_is_missing;   // slices of core 1 have still to be copied
  uint32_t second_offset;  // of the slice of core 2
  int32_t checkpoint;      // number of a kPublished or kReloaded product
  ProductSource source;
  int32_t next_item;  // that no warp has taken
};

// Where things lie in the arena of shared memory, as 32-bit addresses, and the sizes that the
// products need. One for each feature of the launch.
struct WideArena {
  uint32_t first;     // stacked slices of core 1
  uint32_t products;  // P
  uint32_t first_part_bytes;
  uint32_t product_part_bytes;
  uint32_t product_bytes;  // of one prefix and part
  int32_t capacity;        // prefixes
  int32_t q1;
  int32_t q2;
  int32_t q3;
  int32_t q1_shift;
  int32_t rows;
  int32_t tiles3;
  int32_t third_lanes;  // that hold a packed vector of core 3
  int32_t buffered_shift;
  bool paired;
};

// Two of these take turns: one is cleared while the other is in use.
struct PrefixTable {
  uint32_t keys[kPrefixSlots];  // i1 + 1, or 0
  int32_t first[kPrefixSlots];  // entry that has it first
};

struct PlanningScratch {
  PrefixTable tables[2];
  int32_t run_end[kPlanningWarps];
  uint32_t firsts[kPlanningWarps];  // entries that have their prefix first
  int32_t cut;
};

__device__ __forceinline__ void clear_prefixes(PrefixTable& table, int thread) {
#pragma unroll
  for (int i = thread; i < kPrefixSlots; i += kTileEntries) {
    table.keys[i] = 0;
    table.first[i] = kTileEntries;
  }
}

// The slot of an i1, which is entered if it is new.
__device__ __forceinline__ int find_prefix(PrefixTable& table, uint32_t i1) {
  const uint32_t key = i1 + 1;
  int slot = static_cast<int>(i1 * 0x9e3779b1u >> 24);
  while (true) {
    const uint32_t found = atomicCAS(&table.keys[slot], 0u, key);
    if (found == 0 || found == key) return slot;
    slot = (slot + 1) % kPrefixSlots;
  }
}

// The entries of the tile to be planned next, copied ahead by the planning warps' lanes.
struct AheadEntries {
  GroupedLookup entries[kTileEntries];
  float weights[kTileEntries];

  __device__ __forceinline__ void copy(const TiledWorkspace& workspace, Claim claim) {
    const int32_t position = claim.begin + static_cast<int32_t>(threadIdx.x);
    if (position >= claim.end) return;
    copy_async(shared_address(&entries[threadIdx.x]), workspace.entries + position);
    if (workspace.factors != nullptr) {
      copy_async_4(shared_address(&weights[threadIdx.x]), workspace.factors + position);
    }
  }
};

// Which entries of a claim make a tile, and its prefixes.
struct TileExtent {
  int32_t entries;
  int32_t prefixes;
  int32_t number;  // of the thread's prefix
  uint32_t i2;
};

// First half of planning, by the planning warps; ends with a barrier. `find_source(prefixes, i1,
// i2, entries, checkpoint)` says where the products come from; one thread calls it.
template <typename FindSource>
__device__ __forceinline__ TileExtent find_extent(WideTile& tile, PlanningScratch& scratch,
                                                  PartialBarrier& planners, int table_in_use,
                                                  const AheadEntries& ahead, int32_t capacity,
                                                  bool shares, Claim claim,
                                                  FindSource&& find_source) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  PrefixTable& table = scratch.tables[table_in_use];
  const bool valid = claim.begin + thread < claim.end;
  const GroupedLookup& entry = ahead.entries[valid ? thread : 0];
  const uint32_t i2 = ahead.entries[0].i2;
  const uint32_t i1 = entry.outer & 0xffffu;
  const bool same = valid && entry.i2 == i2;
  int slot = thread;
  if (same) {
    if (shares) slot = find_prefix(table, i1);
    atomicMin(&table.first[slot], thread);
  }
  const uint32_t others = ~__ballot_sync(kAllLanes, same);
  if (lane == 0) scratch.run_end[warp] = others == 0 ? kTileEntries : warp * 32 + __ffs(others) - 1;
  if (thread == 0) {
    scratch.cut = kTileEntries;
    tile.item_count = tile.next_item = 0;
  }
  planners.wait();

  int32_t end = kTileEntries;
#pragma unroll
  for (int w = 0; w < kPlanningWarps; ++w) end = min(end, scratch.run_end[w]);
  const int32_t first = table.first[slot];
  const bool is_first = thread < end && first == thread;
  const uint32_t firsts = __ballot_sync(kAllLanes, is_first);
  if (lane == 0) scratch.firsts[warp] = firsts;
  clear_prefixes(scratch.tables[table_in_use ^ 1], thread);
  planners.wait();

  // A prefix is numbered by the entry that has it first.
  int32_t number = 0;
  int32_t prefixes = 0;
#pragma unroll
  for (int w = 0; w < kPlanningWarps; ++w) {
    const uint32_t bits = scratch.firsts[w];
    const int32_t before = min(max(first - 32 * w, 0), 32);
    number += __popc(before < 32 ? bits & ((1u << before) - 1) : bits);
    prefixes += __popc(bits);
  }
  if (is_first && number < capacity) tile.i1[number] = static_cast<uint16_t>(i1);
  if (is_first && number == capacity) scratch.cut = thread;
  if (thread == 0) tile.source = find_source(prefixes, i1, i2, end, &tile.checkpoint);
  planners.wait();
  return {min(end, scratch.cut), min(prefixes, capacity), number, i2};
}

// Second half: the rows of the tile's entries, and the products of its distinct ids.
template <int kSteps>
__device__ __forceinline__ void plan_rows(WideTile& tile, const AheadEntries& ahead,
                                          const WideArena& arena, const EmissionContext& context,
                                          const TileExtent& extent, int32_t* rows_used) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const TiledFeature& feature = context.feature;
  const TiledWorkspace& workspace = context.workspace;
  const bool active = thread < extent.entries;
  const uint32_t actives = __ballot_sync(kAllLanes, active);
  if (actives == 0) return;
  const int index = active ? thread : 0;
  const GroupedLookup entry = ahead.entries[index];
  const uint32_t i1 = entry.outer & 0xffffu;
  const uint32_t i3 = entry.outer >> 16;
  const int32_t exponent = __ldg(workspace.exponents + feature.exponents[0] + i1) +
                           __ldg(workspace.exponents + feature.exponents[1] + extent.i2) +
                           __ldg(workspace.exponents + feature.exponents[2] + i3);
  uint32_t members = 1u << lane;
  if ((context.range.disabled & kFoldingDisabled) == 0) {
    members = __match_any_sync(kAllLanes, entry.outer);
  }
  members &= actives;
  const bool leads = active && __ffs(members) - 1 == lane;
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  int32_t place = 0;
  if (lane == 0) place = atomicAdd(&tile.item_count, __popc(leaders) * arena.tiles3);
  RowTarget target{};
  const uint32_t emitters =
      plan_row(target, context, entry, active, members,
               workspace.factors != nullptr ? ahead.weights[index] : 1.0f, exponent, rows_used);
  if (active) tile.targets[thread] = target;
  place = __shfl_sync(kAllLanes, place, 0) + __popc(leaders & ((1u << lane) - 1)) * arena.tiles3;
  if (!leads) return;
  const uint32_t third = feature.packed[2] + i3 * feature.slice_halves[2];
  for (int32_t tile3 = 0; tile3 < arena.tiles3; ++tile3) {
    tile.items[place + tile3] =
        WideItem{third + tile3 * kSteps * arena.third_lanes * kVectorHalves,
                 extent.number * arena.product_bytes, emitters,
                 static_cast<uint16_t>(thread - lane), static_cast<uint16_t>(tile3 * 8)};
  }
}

}  // namespace flowtt::cuda
