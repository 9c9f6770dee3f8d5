// Folding of equal ids, between the preparation and the contraction, where bags are larger than one
// lookup. A block turns a chunk of sorted lookups into as few rows as it can, each with one
// destination: lookups of larger bags that have an id in common become one row, which is buffered;
// the row of any other lookup of a larger bag is buffered too or added to the bag's sum; that of a
// bag of one lookup is stored. Sorting brings equal ids into few chunks; nothing here needs it.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_segments.cuh"
#include "tiled_window.cuh"

namespace flowtt::cuda {

// Entries of a chunk, one for each thread.
constexpr int kFoldShift = 9;
constexpr int kFoldThreads = 1 << kFoldShift;
constexpr int kFoldWarps = kFoldThreads / 32;
static_assert(kFoldThreads == kPrepareThreads, "of ClearedVectors");

// In shared memory, of each entry of the chunk unless it says otherwise.
struct FoldScratch {
  // Of the hash table of ids.
  static constexpr int kPlacesShift = kFoldShift + 1;
  static constexpr uint32_t kPlaces = 1u << kPlacesShift;

  uint32_t outer[kFoldThreads];   // of GroupedLookup
  uint32_t first_of_id[kPlaces];  // by hash: an entry, or kNoEntry
  uint32_t slot[kFoldThreads];    // of its row, or kAddedRow
  uint16_t i2[kFoldThreads];
  uint8_t sharing[kFoldThreads];    // of its row
  uint32_t row_counts[kFoldWarps];  // of each warp, see RowCounts
  uint32_t first_row;               // where the chunk's rows are written
  uint32_t first_slot;
  uint32_t slots;
  uint32_t first_single_slot;
  uint32_t single_slots;
  Segments segments;
  EntryChunk chunk;
};
inline constexpr uint32_t kNoEntry = ~0u;
inline constexpr uint8_t kNotShared = 0;
inline constexpr uint8_t kShared = 1;     // other entries have the same row
inline constexpr uint8_t kDissolved = 2;  // they had, but there was no slot for it

__device__ __forceinline__ uint32_t place_of_id(uint32_t outer, uint32_t i2) {
  return (outer ^ i2 * 0x85ebca6bu) * 0x9e3779b1u >> (32 - FoldScratch::kPlacesShift);
}

// The one entry that stands for all with the id of `entry`. Every entry has written itself down at
// the place of its id; of those that have one id the last has done so, without the atomic
// operations that an id of many lookups would have to wait for. Only ids that have lost their place
// to another look for the next free one.
__device__ __forceinline__ uint32_t find_first(FoldScratch& scratch, uint32_t entry, uint32_t outer,
                                               uint32_t i2) {
  uint32_t place = place_of_id(outer, i2);
  uint32_t seen = scratch.first_of_id[place];
  while (scratch.outer[seen] != outer || scratch.i2[seen] != i2) {
    place = (place + 1) & (FoldScratch::kPlaces - 1);
    seen = *static_cast<volatile uint32_t*>(&scratch.first_of_id[place]);
    if (seen == kNoEntry) seen = atomicCAS(&scratch.first_of_id[place], kNoEntry, entry);
    if (seen == kNoEntry) return entry;
  }
  return seen;
}

// Rows of three kinds, counted or ranked in the order of their entries: those that lookups share,
// those of one lookup of a larger bag, and those of bags of one lookup.
struct RowCounts {
  uint32_t packed;

  __device__ __forceinline__ uint32_t shared() const { return packed >> 22; }
  __device__ __forceinline__ uint32_t single() const { return packed >> 11 & 0x7ffu; }
  __device__ __forceinline__ uint32_t all() const {
    return shared() + single() + (packed & 0x7ffu);
  }
};
inline constexpr uint32_t kNoRow = 0;
inline constexpr uint32_t kSharedRow = 1u << 22;  // at most half of the entries
inline constexpr uint32_t kSingleRow = 1u << 11;
inline constexpr uint32_t kLoneRow = 1;
static_assert(kFoldThreads < 1 << 11);

// Ranks the rows of all threads and counts them. kind: of the row of the thread's entry. Called by
// all threads; has a barrier.
__device__ __forceinline__ RowCounts rank_rows(FoldScratch& scratch, uint32_t kind,
                                               RowCounts* rank) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t shared = __ballot_sync(kAllLanes, kind == kSharedRow);
  const uint32_t single = __ballot_sync(kAllLanes, kind == kSingleRow);
  const uint32_t lone = __ballot_sync(kAllLanes, kind == kLoneRow);
  const auto count = [&](uint32_t lanes) {
    return __popc(shared & lanes) * kSharedRow + __popc(single & lanes) * kSingleRow +
           __popc(lone & lanes) * kLoneRow;
  };
  if (lane == 0) scratch.row_counts[warp] = count(kAllLanes);
  __syncthreads();
  const uint32_t counts = lane < kFoldWarps ? scratch.row_counts[lane] : 0;
  rank->packed = __reduce_add_sync(kAllLanes, lane < warp ? counts : 0) + count(lanes_before(lane));
  return {__reduce_add_sync(kAllLanes, counts)};
}

// Takes slots of the `capacity` that there are. used: how many have been wanted.
__device__ __forceinline__ void take_slots(uint32_t* used, uint32_t capacity, uint32_t wanted,
                                           uint32_t* first, uint32_t* slots) {
  const uint32_t taken = wanted > 0 ? min(atomicAdd(used, wanted), capacity) : 0;
  *first = taken;
  *slots = min(capacity - taken, wanted);
}

__global__ void __launch_bounds__(kFoldThreads, 2048 / kFoldThreads)
    tiled_fold_kernel(const __grid_constant__ TiledGroup group,
                      const __grid_constant__ BagBatch batch,
                      const __grid_constant__ TiledRange range,
                      const __grid_constant__ TiledWorkspace workspace, ClearedVectors sums,
                      bool rows_are_fp16) {
  __shared__ FoldScratch scratch;
  allow_dependent_launch();
  // Nothing since the first launch of the call, which has waited for what was ahead of it, reads or
  // writes them.
  sums.clear(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
  const uint32_t entry = threadIdx.x;
#pragma unroll
  for (uint32_t i = 0; i < FoldScratch::kPlaces; i += kFoldThreads) {
    scratch.first_of_id[i + entry] = kNoEntry;
  }
  load_segments(scratch.segments, group, batch, range);
  // Offsets out of order can make features overlap; the preparation reports them.
  if (scratch.segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  if (entry < 32) {
    find_entry_chunk(scratch.chunk, scratch.segments, group.count, kFoldThreads,
                     static_cast<int32_t>(blockIdx.x));
  }
  __syncthreads();
  const EntryChunk chunk = scratch.chunk;
  // By blocks without a chunk too: the end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
  if (chunk.count == 0) return;

  const TiledFeature& feature = group.features[chunk.f];
  const bool exists = entry < static_cast<uint32_t>(chunk.count);
  const uint32_t number = chunk.first + min(entry, static_cast<uint32_t>(chunk.count - 1));
  const uint4 words = reinterpret_cast<const uint4*>(workspace.entries)[number];
  const GroupedLookup lookup{words.x, words.y, words.z, words.w};
  const bool is_lone = (lookup.sample & kLoneLookup) != 0;
  const LookupScale scale = load_scale(lookup, feature, workspace, workspace.factors, number);
  if (exists) {
    scratch.outer[entry] = lookup.outer;
    scratch.i2[entry] = static_cast<uint16_t>(lookup.i2);
    scratch.sharing[entry] = kNotShared;
  }
  const bool folds = exists && !is_lone && (range.disabled & kFoldingDisabled) == 0;
  // Many write to one place, and any of them may be the last.
  if (folds) atomicExch(&scratch.first_of_id[place_of_id(lookup.outer, lookup.i2)], entry);
  __syncthreads();
  uint32_t first = entry;
  if (folds) {
    first = find_first(scratch, entry, lookup.outer, lookup.i2);
    if (first != entry) scratch.sharing[first] = kShared;
  }
  __syncthreads();
  const auto find_kind = [&] {
    return !exists                             ? kNoRow
           : is_lone                           ? kLoneRow
           : first != entry                    ? kNoRow
           : scratch.sharing[entry] == kShared ? kSharedRow
                                               : kSingleRow;
  };
  uint32_t kind = find_kind();
  RowCounts rank;
  RowCounts rows = rank_rows(scratch, kind, &rank);
  const bool are_apart = workspace.single_slots != kAnySlots;
  const uint32_t shared_slots = workspace.row_slots - (are_apart ? workspace.single_slots : 0);
  if (entry == 0) {
    take_slots(workspace.control + kUsedSlotsWord, shared_slots,
               rows.shared() + (are_apart ? 0 : rows.single()), &scratch.first_slot,
               &scratch.slots);
  }
  uint32_t* const used_rows = workspace.control + kFoldedRowsWord + chunk.f;
  if (entry == 32) scratch.first_row = atomicAdd(used_rows, rows.all());
  if (entry == 64 && are_apart) {
    take_slots(workspace.control + kUsedSingleSlotsWord, workspace.single_slots, rows.single(),
               &scratch.first_single_slot, &scratch.single_slots);
  }
  __syncthreads();
  const uint32_t slots = scratch.slots;
  const uint32_t planned_rows = rows.all();
  const uint32_t first_row = scratch.segments.first_entry[chunk.f] + scratch.first_row;
  uint32_t more_rows = 0;  // where rows go for which no place was planned
  if (rows.shared() > slots) {
    // Each lookup of a row that finds no slot gets a row of its own, to be added to its bag's sum.
    if (kind == kSharedRow && rank.shared() >= slots) scratch.sharing[entry] = kDissolved;
    __syncthreads();
    if (exists && scratch.sharing[first] == kDissolved) first = entry;
    __syncthreads();
    kind = find_kind();
    rows = rank_rows(scratch, kind, &rank);
    if (entry == 0) {
      scratch.first_row = atomicAdd(used_rows, rows.all() - planned_rows);
    }
    __syncthreads();
    more_rows = scratch.segments.first_entry[chunk.f] + scratch.first_row;
  }
  uint32_t slot = kAddedRow;
  if (kind == kSharedRow) slot = scratch.first_slot + rank.shared();
  // Rows that had to be dissolved have left no slots for others.
  if (kind == kSingleRow && are_apart && rank.single() < scratch.single_slots) {
    slot = shared_slots + scratch.first_single_slot + rank.single();
  }
  if (kind == kSingleRow && !are_apart && rows.shared() + rank.single() < slots) {
    slot = scratch.first_slot + rows.shared() + rank.single();
  }
  if (kind != kNoRow) {
    const uint32_t row = rank.all();
    const uint32_t place = row < planned_rows ? first_row + row : more_rows + (row - planned_rows);
    reinterpret_cast<uint4*>(workspace.folded_rows)[place] =
        make_uint4(lookup.outer, lookup.i2, slot, lookup.sample);
    if (workspace.factors != nullptr) workspace.folded_factors[place] = scale.weight;
    scratch.slot[entry] = slot;
  }
  __syncthreads();
  if (exists && !is_lone) {
    const uint32_t own_slot = scratch.slot[first];
    const float factor = factor_of(scale) * (rows_are_fp16 ? 1 << kBufferedRowShift : 1);
    workspace.row_of_lookup[lookup.position] =
        make_uint2(own_slot, own_slot != kAddedRow ? __float_as_uint(factor) : 0u);
  }
}

}  // namespace flowtt::cuda
