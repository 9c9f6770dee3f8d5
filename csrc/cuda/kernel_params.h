// What the general CUDA kernels take as kernel parameters, beside the plain structs of tt_shape.h.
//
// Everything a kernel needs to know about its tables travels inside the kernel parameters, so a
// call makes no host-to-device copy: there is nothing to synchronise on, and a captured CUDA graph
// holds the values themselves instead of a pointer to host memory that may be gone at replay.

#pragma once

#include <cstdint>

#include "fast_division.h"
#include "tt_shape.h"

namespace flowtt::cuda {

// Tables beyond these numbers go into further launches of the same kernel. Both keep a launch
// within half of the 32,764 bytes of parameters that CUDA 12.1 and later accept.
inline constexpr int kFeaturesPerLaunch = 32;
inline constexpr int kCoresPerLaunch = 128;
// Up to so many a launch stays within 4 KB of parameters, which start faster.
inline constexpr int kFeaturesPerSmallLaunch = 8;

// Core k of a chain and the product P_k = P_{k-1} @ G_k[i_k] (chain.cuh), with P_{k-1} as
// (rows x inner), the slice as (inner x columns), columns = q rank. 32 bits are enough:
// has_32_bit_levels refuses larger levels.
struct ChainLevel {
  FastDivisor row_ids;  // rows of the table that share i_1 ... i_k
  int32_t rows;
  int32_t inner;
  int32_t q;
  int32_t rank;
  int32_t columns;
  int32_t slice_numel;
  int32_t stride;           // from one of the rows of P_k, of `rank` elements, to the next
  int32_t prefix_elements;  // of P_k in the scratch
  int32_t column_tiles;     // of one vector each, or of one column
  bool by_vectors;          // whether whole vectors of a slice are aligned
  FastDivisor32 by_rank;
  FastDivisor32 by_column_tiles;
};

// One feature and the table it looks up. Features that share a table repeat its description.
struct TTFeature {
  ChainLevel levels[kMaxCores];
  const void* cores[kMaxCores];
  void* core_gradients[kMaxCores];  // accumulation type, same shape as the core; backward only
  uint8_t* touched[kMaxCores];      // a byte for each slice; null when no optimizer step follows
  int64_t num_embeddings;
  int64_t output_column;  // first column of the feature in [B, sum_f D_f]
  int32_t num_cores;
  int32_t embedding_dim;
  int32_t feature;  // its number in the call
  int32_t table;
};

// The features of one launch.
template <int kCapacity>
struct FeatureGroupOf {
  int32_t count;
  TTFeature features[kCapacity];
};
using FeatureGroup = FeatureGroupOf<kFeaturesPerLaunch>;
using SmallFeatureGroup = FeatureGroupOf<kFeaturesPerSmallLaunch>;

// The output, contiguous: [batch_size, row_stride], or [nnz, row_stride] without pooling.
struct PooledOutput {
  void* data;
  ElementType type;
  int64_t row_stride;
};

// Where a block keeps the intermediates of a chain: in dynamic shared memory, or where that is too
// small in its own `elements_per_block` accumulators of `global`.
enum class ScratchPlace { kShared, kGlobal };
struct ChainScratch {
  void* global;
  int64_t elements_per_block;
  int64_t row_elements;  // of the largest embedding_dim of the launch
};

// One core in the passes that follow the backward kernel.
struct CoreTask {
  void* values;            // the core (optimizer step) or its gradient tensor (cast)
  const void* gradient;    // accumulation type
  const uint8_t* touched;  // [num_slices], optimizer step only
  void* momentum1;         // accumulation type, or null
  void* momentum2;         // accumulation type, or null
  int64_t num_slices;      // p_k
  int64_t slice_numel;     // r_{k-1} * q_k * r_k
};

// The cores of one launch.
struct CoreGroup {
  int32_t count;
  int32_t first;  // the first one's number in the call
  CoreTask tasks[kCoresPerLaunch];
};

static_assert(sizeof(FeatureGroup) + sizeof(BagBatch) + sizeof(StridedMatrix) +
                  sizeof(ChainScratch) <=
              16384);
static_assert(sizeof(SmallFeatureGroup) + sizeof(BagBatch) + sizeof(PooledOutput) +
                  sizeof(ChainScratch) <=
              4096 - 32);
static_assert(sizeof(CoreGroup) + sizeof(OptimizerArguments) <= 16384);

}  // namespace flowtt::cuda
