// What the general CUDA kernels take as kernel parameters, beside the plain structs of tt_shape.h.
//
// Everything a kernel needs to know about its tables travels inside the kernel parameters, so a
// call makes no host-to-device copy: there is nothing to synchronise on, and a captured CUDA graph
// holds the values themselves instead of a pointer to host memory that may be gone at replay.

#pragma once

#include <cstdint>

#include "tt_shape.h"

namespace flowtt::cuda {

// Tables beyond these numbers go into further launches of the same kernel. Both keep a launch
// within half of the 32,764 bytes of parameters that CUDA 12.1 and later accept.
inline constexpr int kFeaturesPerLaunch = 64;
inline constexpr int kCoresPerLaunch = 128;

// One feature and the table it looks up. Features that share a table repeat its description.
struct TTFeature {
  TableShape shape;
  const void* cores[kMaxCores];
  void* core_gradients[kMaxCores];  // accumulation type, same shape as the core; backward only
  uint8_t* touched[kMaxCores];      // [p[k]]; null when no optimizer step follows
  int64_t output_column;            // first column of the feature in [B, sum_f D_f]
  int32_t feature;                  // its number in the call
  int32_t table;
};

// The features of one launch.
struct FeatureGroup {
  int32_t count;
  TTFeature features[kFeaturesPerLaunch];
};

// The pooled output, [batch_size, row_stride], contiguous.
struct PooledOutput {
  void* data;
  ElementType type;
  int64_t row_stride;
};

// Where a block keeps the intermediates of a chain: in dynamic shared memory when `global` is null,
// otherwise in its own `elements_per_block` accumulators of `global`.
struct ChainScratch {
  void* global;
  int64_t elements_per_block;
  int64_t row_elements;  // largest embedding_dim of the launch
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
  CoreTask tasks[kCoresPerLaunch];
};

static_assert(sizeof(FeatureGroup) + sizeof(BagBatch) + sizeof(StridedMatrix) +
                  sizeof(ChainScratch) <=
              16384);
static_assert(sizeof(CoreGroup) + sizeof(OptimizerArguments) <= 16384);

}  // namespace flowtt::cuda
