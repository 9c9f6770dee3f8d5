// Kernel parameters of the tiled forward path: tables of three cores whose slices fill the tiles of
// the tensor cores. docs/kernels.md has the drawing; tiled_forward.h the host interface.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernel_params.h"

namespace flowtt::cuda {

// Row factors are stored in 16 bits each, and a block keeps one counter for every value of i2.
inline constexpr int32_t kMaxTiledOuterFactor = 65536;
inline constexpr int32_t kMaxTiledBins = 2048;

// A tile is the rows of four lookups: q1 and q2 fill at most four rows of it each.
inline constexpr int kTileLookups = 4;
inline constexpr int kMaxTiledQ = 4;

// With the other parameters these stay below the 4 KB that every driver takes at full speed.
inline constexpr int kTiledFeaturesPerLaunch = 24;

// Lookups that one block groups: few for small batches, so that many blocks share the work; more
// for large ones, whose groups would otherwise be scattered over many chunks.
inline constexpr int32_t kSmallChunk = 2048;
inline constexpr int32_t kLargeChunk = 8192;

// One feature of a launch and the table it looks up. Features that share a table share its packed
// cores too.
struct TiledFeature {
  const void* cores[3];
  int64_t num_embeddings;
  int64_t output_column;
  uint32_t packed[3];    // where the packed slices of each core start, in halves
  int32_t exponents[3];  // where the exponents of each core's slices start
  int32_t p[3];
  int32_t q[3];
  int32_t r[2];  // the ranks between the cores, unpadded
  int32_t embedding_dim;
  int32_t feature;
  int32_t table;
  int32_t first_pack_block;  // in the preparation launch; equal to the next feature's if it shares
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
  int32_t chunk_lookups;  // lookups that one block groups
  int32_t max_chunks;
  int32_t starts_stride;  // halfwords between two chunks in `starts`
};

// Device memory of a call. `entries` has one element per lookup of the range, feature after
// feature, within a feature chunk after chunk, within a chunk ordered by i2.
struct TiledWorkspace {
  uint2* entries;       // {i1 << 16 | i3, sample | kLoneLookup}
  float* factors;       // weight of each entry, or null when all are 1
  uint16_t* starts;     // [max_chunks, starts_stride]: first entry of each i2 within its chunk
  __half* packed_high;  // cores in fragment order, scaled slice by slice, rounded to fp16
  __half* packed_low;   // what that rounding left, rounded again; null with a single product
  int32_t* exponents;   // binary exponent of each slice's scale
  float* sums;          // [samples of the range, row_stride] of a 16-bit output, or null
};

// Bag of one lookup: its row is stored; rows of other bags are added.
inline constexpr uint32_t kLoneLookup = 0x80000000u;

static_assert(sizeof(TiledGroup) + sizeof(BagBatch) + sizeof(TiledRange) + sizeof(TiledWorkspace) +
                  sizeof(PooledOutput) <=
              4096);

}  // namespace flowtt::cuda
