// Where finished rows go, shared by the wide and the two-core kernels: to the output, to a sum, or
// to the buffer of rows that the pooling launch reads.

#pragma once

#include "float_types.cuh"
#include "matrix_memory.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

enum class RowKind : uint32_t { kStored, kAdded, kBuffered, kElsewhere };

// Where one lookup's row goes, in shared memory.
struct RowTarget {
  char* row;  // the feature's first column
  float factor;
  RowKind kind;
};

// Buffered fp16 rows are scaled down by 2^shift, so that the largest of them fit: a product of
// slices below 2^4 sums r1 r2 terms below 2^12, or r terms below 2^8 with two cores.
__device__ __forceinline__ int buffered_shift(int32_t summed_terms, bool two_cores) {
  const int bits = 32 - __clz(summed_terms - 1);
  return max(0, bits - (two_cores ? 8 : 4));
}

struct EmissionContext {
  const TiledFeature& feature;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  bool rows_are_half;      // type of buffered rows: fp16 with one product, fp32 with three
  int32_t buffered_shift;  // of fp16 rows
  int32_t first_entry;     // position of the warp's lane 0 in `entries`
  int32_t blocks;          // of a multiprocessor, which share its part of the buffer
};

// Plans the lane's row. All lanes call it; `active` is false where there is no lookup. `members`
// are the lanes with the same id, itself included. Returns the lanes of the same id that write
// something.
__device__ __forceinline__ uint32_t plan_row(RowTarget& target, const EmissionContext& context,
                                             const GroupedLookup& entry, bool active,
                                             uint32_t members, float weight, int32_t exponent,
                                             int32_t* rows_used) {
  const int lane = threadIdx.x % 32;
  const TiledWorkspace& workspace = context.workspace;
  const bool lone = (entry.sample & kLoneLookup) != 0;
  const int64_t sample = entry.sample & ~kLoneLookup;
  const uint32_t pooled = __ballot_sync(kAllLanes, active && !lone) & members;
  float factor = ldexpf(weight, -exponent);
  RowKind kind = lone ? RowKind::kStored : RowKind::kAdded;
  uint32_t slot = kAddedRow;
  const bool buffers = workspace.rows != nullptr && active && !lone &&
                       __popc(pooled) >= context.range.buffered_sharers;
  const int owner = pooled != 0 ? __ffs(pooled) - 1 : lane;
  if (buffers && owner == lane) {
    if (workspace.rows_per_block == 0) {
      slot = static_cast<uint32_t>(context.first_entry + lane);
    } else {
      const int32_t rows = workspace.rows_per_block / context.blocks;
      const int32_t used = atomicAdd(rows_used, 1);
      if (used < rows) slot = static_cast<uint32_t>(blockIdx.x * rows + used);
    }
  }
  slot = __shfl_sync(kAllLanes, slot, owner);
  if (active && !lone && workspace.row_of_lookup != nullptr) {
    const int shift = context.rows_are_half ? context.buffered_shift : 0;
    workspace.row_of_lookup[entry.position] =
        make_uint2(buffers ? slot : kAddedRow, __float_as_uint(ldexpf(weight, shift - exponent)));
  }
  const int64_t row_stride = context.output.row_stride;
  if (buffers && slot != kAddedRow) {
    kind = owner == lane ? RowKind::kBuffered : RowKind::kElsewhere;
    factor = context.rows_are_half ? ldexpf(1.0f, -context.buffered_shift) : 1.0f;
    target.row = static_cast<char*>(workspace.rows) +
                 static_cast<int64_t>(slot) * workspace.buffered_row_elements *
                     (context.rows_are_half ? 2 : 4);
  } else if (!lone && workspace.sums != nullptr) {
    target.row =
        reinterpret_cast<char*>(workspace.sums + (sample - context.range.first_sample) * row_stride +
                                context.feature.output_column);
  } else {
    target.row = static_cast<char*>(context.output.data) +
                 (sample * row_stride + context.feature.output_column) *
                     (context.output.type == ElementType::kFloat32 ? 4 : 2);
  }
  target.factor = factor;
  target.kind = kind;
  return __ballot_sync(kAllLanes, active && kind != RowKind::kElsewhere) & members;
}

__device__ __forceinline__ void store_half_pair(char* row, bool bfloat, int column, float first,
                                                float second) {
  uint32_t word;
  if (bfloat) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    word = *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    word = round_pair(first, second);
  }
  __stcs(reinterpret_cast<uint32_t*>(reinterpret_cast<__half*>(row) + column), word);
}

// Writes columns `column` and `column + 1` of a row, the second if there is one. `paired`: every row
// is aligned to pairs and has an even number of columns in each run of the last core.
__device__ __forceinline__ void emit_pair(const RowTarget& target, bool paired, bool has_second,
                                          ElementType output_type, bool rows_are_half, int column,
                                          float first, float second) {
  first *= target.factor;
  second *= target.factor;
  ElementType type = output_type;
  if (target.kind == RowKind::kBuffered) {
    type = rows_are_half ? ElementType::kFloat16 : ElementType::kFloat32;
  }
  if (target.kind == RowKind::kAdded) {
    float* const sum = reinterpret_cast<float*>(target.row) + column;
    if (paired) {
      add_pair(sum, first, second);
    } else {
      atomicAdd(sum, first);
      if (has_second) atomicAdd(sum + 1, second);
    }
  } else if (!paired) {
    store_element<float>(target.row, type, column, first);
    if (has_second) store_element<float>(target.row, type, column + 1, second);
  } else if (type == ElementType::kFloat32) {
    float2* const pair = reinterpret_cast<float2*>(reinterpret_cast<float*>(target.row) + column);
    if (target.kind == RowKind::kStored) {
      __stcs(pair, make_float2(first, second));
    } else {
      *pair = make_float2(first, second);
    }
  } else {
    store_half_pair(target.row, type == ElementType::kBFloat16, column, first, second);
  }
}

// Whether rows of the feature can be written in pairs of columns.
__device__ __forceinline__ bool rows_are_paired(const TiledFeature& feature,
                                                const PooledOutput& output, int32_t last_q) {
  return last_q % 2 == 0 && feature.output_column % 2 == 0 && output.row_stride % 2 == 0 &&
         reinterpret_cast<uintptr_t>(output.data) % 8 == 0;
}

}  // namespace flowtt::cuda
