// Tiles of the wide kernel: up to 128 consecutive lookups of one i2, with as many distinct prefixes
// (i1, i2) as shared memory holds. Four warps plan a tile while the block works on the one before.

#pragma once

#include "wide_emission.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

constexpr int kTileEntries = 128;  // a lane of the planning warps each
constexpr int kPlanningWarps = kTileEntries / 32;
constexpr int kMaxTilePrefixes = 64;
constexpr int kMaxStackedRows = 128;  // of core 1, padded, of all prefixes of a tile
constexpr int kPrefixSlots = 256;     // of the hash table that finds equal i1

// Where a tile's prefix products come from.
enum class ProductSource : int32_t {
  kComputed,
  kPublished,   // computed, and copied to the checkpoints for other blocks
  kReloaded,    // from the checkpoints
  kLeftBehind,  // by the last tile, which had the same single prefix
};

struct WideTile {
  RowTarget targets[kTileEntries];
  uint32_t emitters[kTileEntries];  // of a distinct id: entries of its warp's 32 that write rows
  uint16_t i3[kTileEntries];
  uint8_t prefix_of[kTileEntries];
  uint8_t leaders[kTileEntries];  // an entry of each distinct id
  uint16_t i1[kMaxTilePrefixes];
  int32_t entries;  // 0: no work is left
  int32_t prefixes;
  int32_t distinct;
  int32_t feature;
  int32_t i2;
  int32_t checkpoint;  // number of a kPublished or kReloaded product
  ProductSource source;
  int32_t next_product;  // of stage 2, that no warp has taken
};

struct PlanningScratch {
  uint32_t keys[kPrefixSlots];  // i1 + 1, or 0
  int32_t first[kPrefixSlots];  // entry that has it first
  int32_t number[kPrefixSlots];
  int32_t run_end[kPlanningWarps];
  int32_t prefixes[kPlanningWarps];
  int32_t distinct[kPlanningWarps];
  int32_t cut;
  ProductSource source;
  int32_t checkpoint;
};

__device__ __forceinline__ void clear_planning(PlanningScratch& scratch, int thread, int threads) {
  for (int i = thread; i < kPrefixSlots; i += threads) {
    scratch.keys[i] = 0;
    scratch.first[i] = kTileEntries;
  }
  if (thread == 0) scratch.cut = kTileEntries;
}

// The slot of an i1, which is entered if it is new.
__device__ __forceinline__ int find_prefix(PlanningScratch& scratch, uint32_t i1) {
  const uint32_t key = i1 + 1;
  int slot = static_cast<int>(i1 * 0x9e3779b1u >> 24);
  while (true) {
    const uint32_t found = atomicCAS(&scratch.keys[slot], 0u, key);
    if (found == 0 || found == key) return slot;
    slot = (slot + 1) % kPrefixSlots;
  }
}

// One entry of the planning warps' lanes, loaded ahead.
struct AheadEntry {
  GroupedLookup entry;
  float weight;
  int32_t lead_i2;  // of the tile's first entry
  bool valid;

  __device__ __forceinline__ void load(const TiledWorkspace& workspace, int32_t begin,
                                       int32_t end) {
    const int32_t position = begin + static_cast<int32_t>(threadIdx.x);
    valid = position < end;
    if (begin >= end) return;
    const int32_t clamped = valid ? position : begin;
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(workspace.entries + clamped));
    entry = GroupedLookup{words.x, words.y, words.z, words.w};
    lead_i2 = static_cast<int32_t>(
        __ldg(reinterpret_cast<const uint32_t*>(workspace.entries + begin) + 1));
    weight = workspace.factors != nullptr ? __ldg(workspace.factors + clamped) : 1.0f;
  }
};

// Plans the tile that starts at `begin`, by the planning warps; `capacity`: prefixes that fit,
// `blocks`: of a multiprocessor.
// Checkpoints are looked up by `find_source`, which one thread calls with the tile's only i1.
template <typename FindSource>
__device__ __forceinline__ void plan_tile(WideTile& tile, PlanningScratch& scratch,
                                          const AheadEntry& ahead, const TiledFeature& feature,
                                          int32_t feature_number, const TiledRange& range,
                                          const TiledWorkspace& workspace,
                                          const PooledOutput& output, bool rows_are_half,
                                          int32_t blocks,
                                          int32_t begin, int32_t capacity, int32_t* rows_used,
                                          FindSource&& find_source) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const uint32_t i1 = ahead.entry.outer & 0xffffu;
  const uint32_t i3 = ahead.entry.outer >> 16;
  const bool same = ahead.valid && static_cast<int32_t>(ahead.entry.i2) == ahead.lead_i2;
  const bool shares = (range.disabled & kSharingDisabled) == 0;
  // Exponents arrive while the prefixes are found.
  int32_t exponent = 0;
  if (same) {
    exponent = __ldg(workspace.exponents + feature.exponents[0] + i1) +
               __ldg(workspace.exponents + feature.exponents[1] + ahead.lead_i2) +
               __ldg(workspace.exponents + feature.exponents[2] + i3);
  }
  int slot = thread;
  if (shares && same) {
    slot = find_prefix(scratch, i1);
    atomicMin(&scratch.first[slot], thread);
  }
  const uint32_t others = ~__ballot_sync(kAllLanes, same);
  if (lane == 0) scratch.run_end[warp] = others == 0 ? kTileEntries : warp * 32 + __ffs(others) - 1;
  partial_barrier(kTileEntries);

  int32_t end = kTileEntries;
#pragma unroll
  for (int w = 0; w < kPlanningWarps; ++w) end = min(end, scratch.run_end[w]);
  const bool is_first = thread < end && (!shares || scratch.first[slot] == thread);
  const uint32_t firsts = __ballot_sync(kAllLanes, is_first);
  if (lane == 0) scratch.prefixes[warp] = __popc(firsts);
  partial_barrier(kTileEntries);

  int32_t number = __popc(firsts & ((1u << lane) - 1));
  int32_t prefixes = 0;
#pragma unroll
  for (int w = 0; w < kPlanningWarps; ++w) {
    if (w < warp) number += scratch.prefixes[w];
    prefixes += scratch.prefixes[w];
  }
  if (is_first) {
    scratch.number[slot] = number;
    if (number < capacity) tile.i1[number] = static_cast<uint16_t>(i1);
    if (number == capacity) scratch.cut = thread;
    if (number == 0) scratch.source = find_source(prefixes, i1, end, &scratch.checkpoint);
  }
  partial_barrier(kTileEntries);

  end = min(end, scratch.cut);
  prefixes = min(prefixes, capacity);
  const bool active = thread < end;
  uint32_t members = 1u << lane;
  if ((range.disabled & kFoldingDisabled) == 0) {
    members = __match_any_sync(kAllLanes, ahead.entry.outer);
  }
  members &= __ballot_sync(kAllLanes, active);
  const EmissionContext context{
      feature,       range, workspace, output, rows_are_half,
      buffered_shift(feature.r[0] * feature.r[1], false), begin + warp * 32, blocks};
  RowTarget target{};
  const uint32_t emitters = plan_row(target, context, ahead.entry, active, members, ahead.weight,
                                     exponent, rows_used);
  const bool leads = active && __ffs(members) - 1 == lane;
  const uint32_t leaders = __ballot_sync(kAllLanes, leads);
  if (active) {
    tile.targets[thread] = target;
    tile.emitters[thread] = emitters;
    tile.i3[thread] = static_cast<uint16_t>(i3);
    tile.prefix_of[thread] = static_cast<uint8_t>(scratch.number[slot]);
  }
  if (lane == 0) scratch.distinct[warp] = __popc(leaders);
  partial_barrier(kTileEntries);

  int32_t before = __popc(leaders & ((1u << lane) - 1));
  int32_t distinct = 0;
#pragma unroll
  for (int w = 0; w < kPlanningWarps; ++w) {
    if (w < warp) before += scratch.distinct[w];
    distinct += scratch.distinct[w];
  }
  if (leads) tile.leaders[before] = static_cast<uint8_t>(thread);
  if (thread == 0) {
    tile.entries = end;
    tile.prefixes = prefixes;
    tile.distinct = distinct;
    tile.feature = feature_number;
    tile.i2 = ahead.lead_i2;
    tile.checkpoint = scratch.checkpoint;
    tile.source = scratch.source;
    tile.next_product = 0;
  }
  clear_planning(scratch, thread, kTileEntries);
  partial_barrier(kTileEntries);
}

}  // namespace flowtt::cuda
