// The launch that groups lookups: each block folds the equal ids of a chunk of consecutive lookups,
// takes ids apart, and writes what is left into bins. What needs nothing of the launch before is
// done before waiting for it, which is nearly everything. Beside it, cores are packed, offsets are
// checked, and sums that rows are added to are cleared.

#pragma once

#include "tiled_bags.cuh"
#include "tiled_bins.cuh"
#include "tiled_clearing.cuh"
#include "tiled_id_check.cuh"
#include "tiled_prepare.cuh"

namespace flowtt::cuda {

// A thread's lookups are one batch.
inline constexpr int kMaxGroupChunkShift = 11;
static_assert(1 << kMaxGroupChunkShift == kBatch * kPrepareThreads);

// At the start of dynamic shared memory. Lookups of the chunk are numbered from 0: its items.
struct __align__(16) GroupScratch {
  SortedChunk chunk;
  BinPlaces places;      // of the chunk's feature
  uint32_t first_entry;  // lookups of the features before
  BagMarks marks;
  uint32_t shared_rows;    // items that stand for others
  uint32_t first_slot;     // of these
  uint32_t slots;          // how many of them there are
  uint32_t kept_in_order;  // items that stand for themselves, where there are no bins
  uint32_t kept_overflow;
};

// The arrays behind it.
struct GroupArrays {
  uint32_t* bins;  // items of each bin, then where the first of them goes
  // By hash, 2 * chunk: an item with this id, or kNoItem; later, of each bin, where in the overflow
  // what it has no place for goes, less its places.
  uint32_t* first_of_id;
  uint2* items;      // {outer as in GroupedLookup, i2 | kLoneItem}
  uint16_t* shared;  // what an item that stands for others is among those, + 1, or 0

  __device__ __forceinline__ GroupArrays(GroupScratch* scratch, int32_t bin_count, int32_t chunk)
      : bins(reinterpret_cast<uint32_t*>(scratch + 1)),
        first_of_id(bins + bin_count),
        items(reinterpret_cast<uint2*>(first_of_id + max(bin_count, 2 * chunk))),
        shared(reinterpret_cast<uint16_t*>(items + chunk)) {}

  __device__ __forceinline__ uint32_t* overflow() const { return first_of_id; }

  static constexpr size_t bytes(int32_t bins, int32_t chunk) {
    const int32_t table = bins > 2 * chunk ? bins : 2 * chunk;
    return sizeof(GroupScratch) + (bins + table) * sizeof(uint32_t) +
           chunk * (sizeof(uint2) + sizeof(uint16_t));
  }
};
inline constexpr uint32_t kLoneItem = 0x80000000u;
inline constexpr uint32_t kNoItem = ~0u;
inline constexpr uint16_t kStandsForOthers = 0xffff;  // in `shared`, before they are numbered

__device__ __forceinline__ uint32_t place_of_id(uint32_t outer, uint32_t i2, int32_t chunk_shift) {
  return (outer ^ i2 * 0x85ebca6bu) * 0x9e3779b1u >> (31 - chunk_shift);
}

// A thread's items: item(i) for i < kBatch, those that exist. All loops over them are unrolled, so
// that what one waits for is on its way for the others.
struct OwnItems {
  int32_t count;  // of the chunk
  uint2 lookups[kBatch];
  uint32_t firsts[kBatch];  // the item that stands for each
  uint32_t ranks[kBatch];   // of those that stand for themselves, in their bins

  static __device__ __forceinline__ int32_t item(int i) {
    return static_cast<int32_t>(threadIdx.x) + i * kPrepareThreads;
  }
  __device__ __forceinline__ bool exists(int i) const { return item(i) < count; }
  __device__ __forceinline__ bool is_lone(int i) const { return (lookups[i].y & kLoneItem) != 0; }
  __device__ __forceinline__ uint32_t i2(int i) const { return lookups[i].y & 0xffffu; }
  __device__ __forceinline__ bool stands(int i) const {
    return exists(i) && firsts[i] == static_cast<uint32_t>(item(i));
  }
};

// Takes the ids apart. Each item writes itself down at the place of its id.
template <bool kWide>
__device__ __forceinline__ void take_apart(OwnItems& own, const GroupScratch& scratch,
                                           const GroupArrays& arrays, const SortedChunk& chunk,
                                           const TiledFeature& feature, const BagBatch& batch,
                                           const TiledRange& range, const int64_t (&ids)[kBatch],
                                           bool equal_bags) {
  const IdSplitter splitter(feature);
  const bool folds = (range.disabled & kFoldingDisabled) == 0;
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = OwnItems::item(i);
    own.firsts[i] = static_cast<uint32_t>(item);
    if (!own.exists(i)) continue;
    const bool has = has_row(feature, ids[i]);
    is_bad |= !has;
    const LookupDigits digits = splitter.split_id<kWide>(has ? ids[i] : 0);
    const bool is_lone =
        equal_bags ? chunk.bag_length == 1
                   : (marked_sample(scratch.marks, batch, item) & kLoneLookup) != 0;
    own.lookups[i] = make_uint2(digits.outer, digits.i2 | (is_lone ? kLoneItem : 0));
    arrays.items[item] = own.lookups[i];
    arrays.shared[item] = 0;
    // Many write to one place, and any of them may be the last.
    if (folds && !is_lone) {
      atomicExch(&arrays.first_of_id[place_of_id(digits.outer, digits.i2, range.chunk_shift)],
                 static_cast<uint32_t>(item));
    }
  }
  if (is_bad) {
    const int64_t first = range.first_lookup + chunk.first;
    find_bad_lookup(feature, batch, first + threadIdx.x, first + chunk.count);
  }
}

// The one item that stands for all with an id that has lost its place to another: it looks for the
// next free one.
inline __device__ __noinline__ uint32_t find_displaced(const GroupArrays& arrays, uint32_t item,
                                                       uint2 lookup, uint32_t place,
                                                       uint32_t last_place) {
  for (;;) {
    place = (place + 1) & last_place;
    uint32_t seen = *static_cast<volatile uint32_t*>(&arrays.first_of_id[place]);
    if (seen == kNoItem) seen = atomicCAS(&arrays.first_of_id[place], kNoItem, item);
    if (seen == kNoItem) return item;
    const uint2 other = arrays.items[seen];
    if (other.x == lookup.x && other.y == lookup.y) return seen;
  }
}

// Finds the one item that stands for all with an id. Every item has written itself down at the
// place of its id; of those that have one id the last has done so, without the atomic operations
// that an id of many lookups would have to wait for.
__device__ __forceinline__ void fold_items(OwnItems& own, const GroupArrays& arrays,
                                           int32_t chunk_shift) {
  const uint32_t last_place = (2u << chunk_shift) - 1;
  uint32_t places[kBatch];
  uint32_t seen[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    places[i] = place_of_id(own.lookups[i].x, own.i2(i), chunk_shift) & last_place;
    if (own.exists(i) && !own.is_lone(i)) seen[i] = arrays.first_of_id[places[i]];
  }
  uint2 others[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (own.exists(i) && !own.is_lone(i)) others[i] = arrays.items[seen[i]];
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (!own.exists(i) || own.is_lone(i)) continue;
    own.firsts[i] = seen[i];
    if (others[i].x != own.lookups[i].x || others[i].y != own.lookups[i].y) {
      own.firsts[i] = find_displaced(arrays, OwnItems::item(i), own.lookups[i], places[i],
                                     last_place);
    }
    if (!own.stands(i)) arrays.shared[own.firsts[i]] = kStandsForOthers;
  }
}

// Where the bins of the chunk's feature are. By a warp.
__device__ __forceinline__ void find_places(GroupScratch& scratch, const TiledGroup& group,
                                            const BagBatch& batch, const TiledRange& range,
                                            int32_t number) {
  int32_t lookups = static_cast<int32_t>(range.end_lookup - range.first_lookup);
  int feature = 0;
  uint32_t first_entry = 0;
  if (!has_all_lookups(batch, range)) {
    const FeatureLookups own(group, batch, range);
    feature = __ffs(__ballot_sync(kAllLanes, own.chunks_up_to > number)) - 1;
    lookups = own.count;
    first_entry = own.entries_up_to - own.count;
  }
  const BinPlaces places = find_bin_places(group, lookups);
  if (static_cast<int>(threadIdx.x % 32) == feature) {
    scratch.places = places;
    scratch.first_entry = first_entry;
  }
}

// Takes places for the chunk's items in all bins. By all threads.
__device__ __forceinline__ void take_places(const GroupArrays& arrays, int32_t bins,
                                            uint32_t capacity, uint32_t* counts,
                                            uint32_t* overflow_count) {
#pragma unroll 1
  for (int32_t first = threadIdx.x; first < bins; first += kBatch * kPrepareThreads) {
    uint32_t own[kBatch];
    uint32_t base[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t bin = first + i * kPrepareThreads;
      own[i] = bin < bins ? arrays.bins[bin] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (own[i] != 0) base[i] = atomicAdd(counts + first + i * kPrepareThreads, own[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (own[i] == 0) continue;
      const int32_t bin = first + i * kPrepareThreads;
      arrays.bins[bin] = base[i];
      const uint32_t from = max(base[i], capacity);
      if (base[i] + own[i] > from) {
        arrays.overflow()[bin] = atomicAdd(overflow_count, base[i] + own[i] - from) - from;
      }
    }
  }
}

// Groups chunk `number`. Called by all threads of a block.
__device__ __forceinline__ void group_chunk(GroupScratch& scratch, const TiledGroup& group,
                                            const BagBatch& batch, const TiledRange& range,
                                            const TiledWorkspace& workspace, int32_t number) {
  const GroupArrays arrays(&scratch, range.bins, 1 << range.chunk_shift);
  for (int32_t i = threadIdx.x; i < range.bins / 4; i += kPrepareThreads) {
    reinterpret_cast<uint4*>(arrays.bins)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int32_t i = threadIdx.x; i < (2 << range.chunk_shift) / 4; i += kPrepareThreads) {
    reinterpret_cast<uint4*>(arrays.first_of_id)[i] =
        make_uint4(kNoItem, kNoItem, kNoItem, kNoItem);
  }
  if (threadIdx.x == 0) {
    scratch.shared_rows = 0;
    scratch.kept_in_order = 0;
  }
  if (threadIdx.x / 32 == 1) find_places(scratch, group, batch, range, number);
  const SortedChunk chunk = find_chunk(scratch.chunk, group, batch, range, number);
  if (chunk.feature < 0) return;
  const TiledFeature& feature = group.features[chunk.feature];
  int64_t ids[kBatch];
  load_ids(ids, batch, range.first_lookup + chunk.first + threadIdx.x,
           chunk.count - static_cast<int32_t>(threadIdx.x));
  const bool equal_bags = find_bags(scratch.marks, chunk, group, batch, range);
  __syncthreads();
  const BinPlaces places = scratch.places;
  OwnItems own;
  own.count = chunk.count;
  if (feature.num_embeddings > kMaxNarrowRows) {
    take_apart<true>(own, scratch, arrays, chunk, feature, batch, range, ids, equal_bags);
  } else {
    take_apart<false>(own, scratch, arrays, chunk, feature, batch, range, ids, equal_bags);
  }
  __syncthreads();
  if ((range.disabled & kFoldingDisabled) == 0) fold_items(own, arrays, range.chunk_shift);
  __syncthreads();
  const bool any_slots = workspace.shared_slots == kAnySlots;
  const IdSplitter splitter(feature);
  const bool sorts = !keeps_order(range);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (!own.stands(i)) continue;
    uint32_t* const counter = sorts ? &arrays.bins[splitter.bin_of(own.lookups[i].x, own.i2(i))]
                                    : &scratch.kept_in_order;
    own.ranks[i] = atomicAdd(counter, 1u);
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t item = OwnItems::item(i);
    if (own.stands(i) && arrays.shared[item] != 0) {
      arrays.shared[item] = static_cast<uint16_t>(1 + atomicAdd(&scratch.shared_rows, 1u));
    }
  }
  __syncthreads();
  wait_for_previous_kernel();

  uint32_t* const overflow_count = workspace.bin_counts + group.count * range.bins + chunk.feature;
  // By a thread that has fewer bins than others.
  if (threadIdx.x == kPrepareThreads - 1 && !any_slots) {
    const uint32_t wanted = scratch.shared_rows;
    const uint32_t taken =
        wanted > 0 ? min(atomicAdd(workspace.control + kSharedSlotsWord, wanted),
                         workspace.shared_slots)
                   : 0;
    scratch.first_slot = taken;
    scratch.slots = min(workspace.shared_slots - taken, wanted);
  }
  if (sorts) {
    take_places(arrays, range.bins, places.capacity,
                workspace.bin_counts + chunk.feature * range.bins, overflow_count);
  } else if (threadIdx.x == 0) {
    scratch.kept_overflow = atomicAdd(overflow_count, scratch.kept_in_order);
  }
  __syncthreads();

  // Whether there is a slot for an item that stands for others; `number`: as in `shared`.
  const auto has_slot = [&](uint32_t number_of_item) {
    return any_slots || number_of_item - 1 < scratch.slots;
  };
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (!own.exists(i)) continue;
    const int32_t item = OwnItems::item(i);
    const uint32_t i2 = own.i2(i);
    const uint32_t position = chunk.first + item;
    const uint32_t sample = find_sample(scratch.marks, chunk, equal_bags, batch, range, item);
    workspace.samples[position] = sample;
    if (workspace.factors != nullptr) {
      workspace.factors[position] =
          find_factor(batch, feature, range.first_lookup + position, sample,
                      equal_bags ? chunk.bag_length : 0);
    }
    uint32_t word = position | i2 << kLowDigitShift;
    if (own.is_lone(i)) word |= kLoneBit;
    const auto write_overflow = [&](uint32_t number_in_overflow) {
      const uint32_t place = scratch.first_entry + number_in_overflow;
      reinterpret_cast<uint2*>(workspace.overflow)[place] = make_uint2(own.lookups[i].x, word);
      workspace.overflow_i2[place] = static_cast<uint16_t>(i2);
    };
    if (!own.stands(i)) {
      if (has_slot(arrays.shared[own.firsts[i]])) {
        workspace.representatives[position] = chunk.first + own.firsts[i];
        continue;
      }
      // Without a slot each lookup needs a row of its own, and the bins have not seen this one.
      workspace.representatives[position] = position;
      write_overflow(atomicAdd(overflow_count, 1u));
      continue;
    }
    workspace.representatives[position] = position;
    const uint32_t shared = arrays.shared[item];
    if (shared != 0) {
      if (has_slot(shared)) word |= kSharedBit;
      if (!any_slots) {
        workspace.row_of_lookup[position].x = scratch.first_slot + shared - 1;
      }
    }
    if (!sorts) {
      write_overflow(scratch.kept_overflow + own.ranks[i]);
      continue;
    }
    const uint32_t bin = splitter.bin_of(own.lookups[i].x, i2);
    const uint32_t place = arrays.bins[bin] + own.ranks[i];
    if (place < places.capacity) {
      reinterpret_cast<uint2*>(workspace.binned)[places.first + bin * places.capacity + place] =
          make_uint2(own.lookups[i].x, word);
    } else {
      write_overflow(arrays.overflow()[bin] + place);
    }
  }
}

// The grid: `grouping` blocks, a chunk each, those that take pieces of packing in turn, and those
// that clear and check bags.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    tiled_group_kernel(const __grid_constant__ TiledGroup group,
                       const __grid_constant__ BagBatch batch,
                       const __grid_constant__ TiledRange range,
                       const __grid_constant__ TiledWorkspace workspace,
                       const __grid_constant__ PooledOutput output,
                       const __grid_constant__ ClearingPieces pieces, ClearedVectors cleared,
                       int32_t grouping, int32_t packing, int32_t packing_pieces) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < grouping) {
    group_chunk(*reinterpret_cast<GroupScratch*>(shared), group, batch, range, workspace,
                        block);
  } else if (block < grouping + packing) {
#pragma unroll 1
    for (int32_t piece = block - grouping; piece < packing_pieces; piece += packing) {
      pack_piece<Packing>(group, workspace,
                          *reinterpret_cast<typename Packing::Scratch*>(shared), piece);
    }
  } else {
    block -= grouping + packing;
    const int32_t clearing = static_cast<int32_t>(gridDim.x) - grouping - packing;
    cleared.clear(block, clearing);
    // What is noted of long bags is cleared by the launch before.
    wait_for_previous_kernel();
#pragma unroll 1
    for (int32_t piece = block; piece < pieces.count; piece += clearing) {
      clear_bags(group, batch, range, workspace, output, pieces, piece);
    }
  }
  // The end of this launch is to mean the end of the one before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
