// Kernel parameters of the tiled forward path: tables whose slices fill the tiles of the tensor
// cores. docs/kernels.md has the drawing; tiled_forward.h the host interface.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernel_params.h"

namespace flowtt::cuda {

// Digits of an id are stored in 16 bits each.
inline constexpr int32_t kMaxTiledFactor = 65536;

// Bins that the lookups of a feature are sorted into: one counter each in shared memory.
inline constexpr int32_t kMaxTiledBins = 4096;

// Bins whose lookups are summed up when places are found for them, by a block.
inline constexpr int32_t kSummedBins = 128;
inline constexpr int32_t kBinSums = kMaxTiledBins / kSummedBins;

// A tile is the rows of four prefixes: q1 and q2 fill at most four rows of it each.
inline constexpr int kTileLookups = 4;
inline constexpr int kMaxTiledQ = 4;

// With the other parameters these stay below the 4 KB that every driver takes at full speed.
inline constexpr int kTiledFeaturesPerLaunch = 20;

// What the contraction wants zeroed for each range: queues and checkpoint tags. In words.
inline constexpr int32_t kControlWords = 2048;
// Of these, where lookups are folded: rows of each feature, and slots that have been taken by rows
// that lookups share and by others.
inline constexpr int32_t kFoldedRowsWord = 1984;
inline constexpr int32_t kUsedSlotsWord = 2046;
inline constexpr int32_t kUsedSingleSlotsWord = 2047;
static_assert(kFoldedRowsWord + kTiledFeaturesPerLaunch <= kUsedSlotsWord);
// What a backward pass counts in, kept with the order of the lookups.
inline constexpr int32_t kOrderCounters = 64;
// Prefix products that several blocks use, whatever the batch.
inline constexpr int64_t kCheckpointBytes = int64_t{512} << 10;
// Prefix products of a multiprocessor when fusion is disabled.
inline constexpr int64_t kScratchBytesPerMultiprocessor = int64_t{160} << 10;

// One lookup after sorting. Tables of two and of four cores are seen as if they had three, see
// set_three_cores.
struct __align__(16) GroupedLookup {
  uint32_t outer;  // i1 | i3 << 16
  uint32_t i2;
  uint32_t position;  // in `indices`, relative to range.first_lookup
  uint32_t sample;    // | kLoneLookup when its bag has exactly one lookup
};

// Bag of one lookup: its row is stored; rows of other bags are buffered or added.
inline constexpr uint32_t kLoneLookup = 0x80000000u;

// Whether rows are multiplied by more than 1 before they are added up.
inline bool has_factors(const BagBatch& batch) {
  return batch.per_sample_weights != nullptr || batch.pooling_mode == PoolingMode::kMean;
}

// In row_of_lookup, instead of a slot: the contraction has added the row to the sum.
inline constexpr uint32_t kAddedRow = 0xffffffffu;

// In single_slots: every row finds a slot, whichever it takes.
inline constexpr uint32_t kAnySlots = 0xffffffffu;

// Lookups of a piece of a long bag, and how many whole pieces make a bag long.
inline constexpr int32_t kPoolPiece = 256;
inline constexpr int32_t kLongBagPieces = 2;

// Columns of a buffered row with those that fill its last vector.
constexpr uint32_t padded_columns(int32_t columns) {
  return (static_cast<uint32_t>(columns) + 7) / 8 * 8;
}

// Buffered fp16 rows are the scaled rows times 2^-kBufferedRowShift, which fp16 holds.
inline constexpr int kBufferedRowShift = 8;

// Bits of TiledRange::disabled, one for each word of FLOWTT_CUDA_DISABLE.
inline constexpr uint32_t kFusionDisabled = 1u << 0;
inline constexpr uint32_t kGroupingDisabled = 1u << 1;
inline constexpr uint32_t kFoldingDisabled = 1u << 2;
inline constexpr uint32_t kSharingDisabled = 1u << 3;
inline constexpr uint32_t kStealingDisabled = 1u << 4;
inline constexpr uint32_t kCheckpointsDisabled = 1u << 5;

// Divides values below 2^31: value / p = (2 value * reciprocal) / 2^(32 + shift), rounded down,
// with 2^shift the next power of two from p on and reciprocal = 2^(31 + shift) / p, rounded down,
// + 1.
struct Divisor {
  uint32_t value;
  uint32_t reciprocal;
  uint32_t shift;
};

constexpr uint32_t bag_reciprocal(uint32_t bag_length) {
  return bag_length > 1 ? 0xffffffffu / bag_length : 0xffffffffu;
}

// One feature of a launch and the table it looks up. Features that share a table share its packed
// cores too. Arrays have one element per core.
struct TiledFeature {
  const void* cores[kMaxCores];
  int64_t num_embeddings;
  int64_t output_column;
  uint32_t packed[kMaxCores];        // where the packed slices start, in halves
  uint32_t slice_halves[kMaxCores];  // from one packed slice to the next
  int32_t exponents[kMaxCores];      // where the exponents of the slices start
  int32_t p[kMaxCores];
  uint32_t reciprocals[kMaxCores];  // of p, see Divisor
  uint8_t reciprocal_shifts[kMaxCores];
  int16_t q[kMaxCores];
  int16_t r[kMaxCores - 1];  // the ranks between the cores, unpadded
  int16_t num_cores;
  int32_t embedding_dim;
  int32_t feature;
  int32_t table;
  int32_t first_pack_block;  // of the launch that packs; equal to the next feature's if it shares
  // bin = (i2 >> bin_shift) * bin_split + i1 * bin_split / p1
  uint32_t minor_scale;  // bin_split / p1, as a fraction of 2^32
  uint16_t bin_shift;
  uint16_t bin_split;
};

struct TiledGroup {
  int32_t count;
  int32_t pack_blocks;  // of all features
  TiledFeature features[kTiledFeaturesPerLaunch];
};

// Which part of the batch a launch covers, and how it is cut.
struct TiledRange {
  int64_t first_sample;
  int64_t end_sample;
  int64_t first_lookup;
  int64_t end_lookup;
  int32_t chunk_shift;  // log2 of the lookups of a block that sorts
  int32_t bins;         // that any feature uses, a multiple of kSummedBins
  // The length that all bags of the call have, if they have one length, or 0, and 2^32 divided by
  // it, rounded down, at most 2^32 - 1.
  uint32_t bag_length;
  uint32_t bag_reciprocal;
  uint32_t disabled;  // mechanisms that are switched off
  // Rows that at least this many lookups of a window share are buffered, others added to the sum.
  // 1: all rows are buffered.
  int32_t buffered_sharers;
};

// Device memory of a call. `entries` has one element per lookup of the range, feature after
// feature, within a feature sorted by bin.
struct TiledWorkspace {
  GroupedLookup* entries;
  float* factors;       // of each entry: weight, weight / length or 1 / length; null when all are 1
  __half* packed_high;  // cores in fragment order, scaled slice by slice, rounded to fp16
  __half* packed_low;   // what that rounding left, rounded again; null with a single product
  int32_t* exponents;   // binary exponent of each slice's scale
  float* sums;          // [samples of the range, row_stride] of a 16-bit output, or null
  uint32_t* control;    // [kControlWords], zeros when the contraction starts
  uint32_t* order_counters;  // of the order that is kept, to be cleared, or null
  // Of the preparation, not after it: [chunks, kMaxTiledBins] lookups of each bin of each chunk,
  // then where they start; and [chunks, kBinSums] sums of the former.
  uint32_t* bin_starts;
  uint32_t* bin_sums;
  void* checkpoints;  // kCheckpointBytes
  void* scratch;      // kScratchBytesPerMultiprocessor for each; null unless fusion is disabled
  void* rows;         // [slots, buffered_row_elements]: fp16 with one product, fp32 with three;
                      // or null: rows of bags are added to their sums
  uint2*
      row_of_lookup;  // {slot or kAddedRow, bits of the row's factor} by position; null as `rows`
  // Bags of many lookups are summed in pieces of kPoolPiece lookups.
  float* piece_sums;         // [pieces of the range, buffered_row_elements]
  uint2* piece_bags;         // {feature of the group + 1, sample} of the long bag it lies in, or 0
  uint32_t* piece_arrivals;  // finished pieces of a long bag, at its first one
  int32_t rows_per_block;    // slots of a block, block after block; a block that has used its
                             // own adds. 0: the slot of a row is the number of its first
                             // entry, so that every row has one
  int32_t buffered_row_elements;  // a multiple of 8
  // What folding makes of the entries, or null: the distinct rows of a feature from its first entry
  // on, with a slot or kAddedRow for the position, and their factors as above.
  GroupedLookup* folded_rows;
  float* folded_factors;
  uint32_t row_slots;
  uint32_t single_slots;  // the last of these, for rows that lookups do not share, or kAnySlots
};

static_assert(sizeof(TiledGroup) + sizeof(BagBatch) + sizeof(TiledRange) + sizeof(TiledWorkspace) +
                  sizeof(PooledOutput) <=
              4096 - 32);

}  // namespace flowtt::cuda
