// How a block of the planning launch cuts a granule of lookups into entries and tiles. Lookups come
// in the order of their prefixes, or nearly: where a prefix turns up again behind another, it has
// one entry more.

#pragma once

#include "tiled_backward_tile.cuh"
#include "tiled_ordering.cuh"

namespace flowtt::cuda {

// A block plans so many lookups, at most: one a thread.
inline constexpr int kPlanThreads = 512;
inline constexpr int kPlanWarps = kPlanThreads / 32;

// One bit of each thread of a block.
struct BlockBits {
  uint32_t words[kPlanWarps];

  // Called by all threads; a barrier must follow before anything is read.
  __device__ __forceinline__ void set(bool bit) {
    const uint32_t word = __ballot_sync(kAllLanes, bit);
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = word;
  }
  __device__ __forceinline__ bool has(uint32_t i) const {
    return i < kPlanThreads && (words[i / 32] >> i % 32 & 1) != 0;
  }
  // Bits up to the thread's, by whole warps.
  __device__ __forceinline__ uint32_t count_up_to_own() const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t before = lane < warp ? __popc(words[lane]) : 0;
    return __reduce_add_sync(kAllLanes, before) + __popc(words[warp] & 0xffffffffu >> (31 - lane));
  }
  // Of the thread `first` and those behind it.
  __device__ __forceinline__ uint32_t from(uint32_t first) const {
    const uint32_t word = first / 32;
    const uint32_t next = word + 1 < kPlanWarps ? words[word + 1] : 0;
    return __funnelshift_r(words[word], next, first % 32);
  }
  // The last thread up to this one that has a bit; thread 0 has one. By whole warps.
  __device__ __forceinline__ uint32_t last_up_to_own() const {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t nonzero = __ballot_sync(kAllLanes, lane < warp && words[lane % kPlanWarps] != 0);
    const uint32_t own = words[warp] & 0xffffffffu >> (31 - lane);
    if (own != 0) return 32 * warp + 31 - __clz(own);
    const uint32_t word = 31 - __clz(nonzero | 1);
    return 32 * word + 31 - __clz(words[word] | 1);
  }
};

// In shared memory, while a granule is planned.
struct GradientPlanScratch {
  struct __align__(16) SortedLookup {
    uint32_t outer;  // as in GroupedLookup
    uint32_t i2;
    uint32_t row;
    float factor;
  };
  SortedLookup sorted[kPlanThreads];
  // Of the sorted lookups once more: neighbours are read without looking whether they are there.
  uint32_t outer[kPlanThreads + kEntryLookups];
  uint16_t tile_entries[kPlanThreads];
  GradientEntry entries[kPlanThreads];
  uint32_t entry_i2[kPlanThreads];
  uint16_t entry_key[kPlanThreads];  // see key_of_entry
  BlockBits prefixes;                // lookups that start a run of one prefix,
  BlockBits starts;                  // an entry,
  BlockBits ids;                     // an id of the entry
  BlockBits seconds;                 // entries that start a run of one i2,
  BlockBits tiles;                   // a tile
};

// Higher for costlier entries, and among those that cost as much for earlier ones.
__device__ __forceinline__ uint32_t key_of_entry(uint32_t cost, uint32_t entry) {
  static_assert((2 * kEntryLookups + kEntryLookups + 1) * kPlanThreads <= 1 << 16);
  return cost * kPlanThreads + (kPlanThreads - 1 - entry);
}

// The cost of `count` neighbouring entries from `first` on, from the sum of their keys.
__device__ __forceinline__ uint32_t cost_of_keys(uint32_t sum, uint32_t first, uint32_t count) {
  const uint32_t of_places = count * (kPlanThreads - 1 - first) - count * (count - 1) / 2;
  return (sum - of_places) / kPlanThreads;
}

// Cuts the `count` lookups of scratch.sorted into entries: their number. granule: the number of the
// first lookup. Called by all threads, after a barrier; ends with one.
__device__ __forceinline__ int32_t plan_entries(const BackwardWork& work,
                                                GradientPlanScratch& scratch, int32_t granule,
                                                int32_t count) {
  const uint32_t i = threadIdx.x;
  const bool exists = static_cast<int32_t>(i) < count;
  const auto own = scratch.sorted[exists ? i : 0];
  const auto& before = scratch.sorted[exists && i > 0 ? i - 1 : 0];
  scratch.prefixes.set(i == 0 || (exists && ((own.outer ^ before.outer) % kMaxTiledFactor != 0 ||
                                             own.i2 != before.i2)));
  __syncthreads();
  const uint32_t of_run = i - scratch.prefixes.last_up_to_own();
  scratch.starts.set(i == 0 || (exists && of_run % kEntryLookups == 0));
  __syncthreads();
  const uint32_t first = scratch.starts.last_up_to_own();
  const uint32_t entry = scratch.starts.count_up_to_own() - 1;
  if (exists && (static_cast<int32_t>(i) + 1 == count || scratch.starts.has(i + 1))) {
    scratch.entries[entry] = {first | (i + 1 - first) << kCountShift, own.outer % kMaxTiledFactor};
    scratch.entry_i2[entry] = own.i2;
  }
  // Lookups of one id follow each other, in the order of i3.
  const uint32_t in_entry = i - first;
  bool is_first = false;
  if (exists) {
    const uint32_t others = scratch.starts.from(first) >> 1;  // entries behind this one
    const uint32_t end = min(others != 0 ? first + __ffs(others) : first + kEntryLookups,
                             static_cast<uint32_t>(count));
    // A bit for each lookup of the entry whose id is smaller, or the same.
    uint32_t smaller = 0;
    uint32_t equal = 0;
#pragma unroll
    for (uint32_t k = 0; k < kEntryLookups; ++k) {
      const uint32_t other = scratch.outer[first + k];
      if (other < own.outer) smaller |= 1u << k;
      if (other == own.outer) equal |= 1u << k;
    }
    const uint32_t there = (1u << (end - first)) - 1;
    smaller &= there;
    equal &= there;
    const uint32_t earlier = equal & ((1u << in_entry) - 1);
    const uint32_t place = __popc(smaller) + __popc(earlier);
    is_first = earlier == 0;
    const bool is_last = equal >> in_entry == 1;
    work.lookups[granule + first + place] = {own.row, own.outer >> 16 | (is_last ? kLastOfId : 0),
                                             own.factor, 0};
  }
  scratch.ids.set(is_first);
  __syncthreads();
  if (exists && i == first) {
    const uint32_t lookups = scratch.entries[entry].lookups >> kCountShift;
    const uint32_t ids = __popc(scratch.ids.from(first) & 0xffffffffu >> (32 - lookups));
    scratch.entry_key[entry] = static_cast<uint16_t>(key_of_entry(2 * ids + lookups, entry));
  }
  return __syncthreads_count(exists && scratch.starts.has(i));
}

// Cuts the entries into tiles of one i2, and gives each its rank: the warps deal them out from the
// costliest to the cheapest, forth and back (entry_of_warp). As plan_entries; feature: of the
// group.
__device__ __forceinline__ void plan_tiles(const BackwardWork& work, GradientPlanScratch& scratch,
                                           uint32_t feature, int32_t granule, int32_t entries) {
  const uint32_t i = threadIdx.x;
  const bool exists = static_cast<int32_t>(i) < entries;
  // There are fewer entries than lookups: whole warps have none.
  const bool has_entries = static_cast<int32_t>(i / 32 * 32) < entries;
  const uint32_t i2 = scratch.entry_i2[exists ? i : 0];
  scratch.seconds.set(i == 0 || (exists && i2 != scratch.entry_i2[i - 1]));
  __syncthreads();
  bool starts = false;
  if (has_entries) {
    const uint32_t of_run = i - scratch.seconds.last_up_to_own();
    starts = exists && (i == 0 || of_run % kTileEntries == 0);
  }
  scratch.tiles.set(starts);
  __syncthreads();
  uint32_t first = 0;
  uint32_t tile = 0;
  if (has_entries) {
    first = scratch.tiles.last_up_to_own();
    tile = scratch.tiles.count_up_to_own() - 1;
    if (exists && (static_cast<int32_t>(i) + 1 == entries || scratch.tiles.has(i + 1))) {
      scratch.tile_entries[tile] = static_cast<uint16_t>(i + 1 - first);
    }
  }
  __syncthreads();
  if (!exists) return;
  const GradientEntry own = scratch.entries[i];
  const uint32_t count = scratch.tile_entries[tile];
  const uint32_t own_key = scratch.entry_key[i];
  uint32_t rank = 0;
  uint32_t sum = 0;
#pragma unroll 8
  for (uint32_t other = first; other < first + count; ++other) {
    const uint32_t key = scratch.entry_key[other];
    sum += key;
    if (key > own_key) ++rank;
  }
  work.entries[granule + first + rank] = {own.lookups + granule, own.i1};
  if (i == first) {
    // In any order within the class: whoever is free takes the next.
    const uint32_t found = tile_class(cost_of_keys(sum, first, count));
    const uint32_t number = atomicAdd(work.tile_counts + found, 1u);
    work.tiles[work.first_tiles[found] + number] = {(granule + first) | count << kCountShift,
                                                    i2 | feature << 16};
  }
}

}  // namespace flowtt::cuda
