// Where finished rows go, shared by the wide and the two-core kernels: to the output, to a sum, or
// to the buffer of rows that the pooling launch reads.

#pragma once

#include "float_types.cuh"
#include "matrix_memory.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// How a row is written. Rows are paired when all of them are aligned to pairs of columns and runs
// of the last core's columns have an even length.
enum class RowWrite : uint32_t {
  kFloatPairs,          // of the output: not read again soon
  kFloatPairsBuffered,  // of the buffer
  kHalfPairs,
  kBFloatPairs,
  kAddedPairs,
  kFloats,
  kHalves,
  kBFloats,
  kAdded,
};

// Where one lookup's row goes, in shared memory.
struct alignas(16) RowTarget {
  char* row;  // the feature's first column
  float factor;
  RowWrite write;
};

// Buffered fp16 rows are scaled down by 2^shift, so that the largest of them fit: a product of
// slices below 2^4 sums r1 r2 terms below 2^12, or r terms below 2^8 with two cores.
__device__ __forceinline__ int buffered_shift(int32_t summed_terms, bool two_cores) {
  const int bits = 32 - __clz(summed_terms - 1);
  return max(0, bits - (two_cores ? 8 : 4));
}

// value * 2^exponent, for sums of three exponents of scales.
__device__ __forceinline__ float times_power(float value, int32_t exponent) {
  const int32_t first = max(-126, min(126, exponent));
  const int32_t second = max(-126, min(126, exponent - first));
  return value * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);
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
  bool paired;
};

// Zeros behind the columns of a buffered row, as its last vector is read whole.
__device__ __forceinline__ void pad_row(char* row, int32_t columns, bool is_half) {
  const int32_t end = static_cast<int32_t>(padded_columns(columns));
#pragma unroll 1
  for (; columns < end; ++columns) {
    if (is_half) {
      reinterpret_cast<__half*>(row)[columns] = __half(0.0f);
    } else {
      reinterpret_cast<float*>(row)[columns] = 0.0f;
    }
  }
}

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
  float factor = times_power(weight, -exponent);
  ElementType type = context.output.type;
  bool adds = !lone;
  bool elsewhere = false;  // another lane writes the row
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
    workspace.row_of_lookup[entry.position] = make_uint2(
        buffers ? slot : kAddedRow, __float_as_uint(times_power(weight, shift - exponent)));
  }
  const int64_t row_stride = context.output.row_stride;
  if (buffers && slot != kAddedRow) {
    adds = false;
    elsewhere = owner != lane;
    type = context.rows_are_half ? ElementType::kFloat16 : ElementType::kFloat32;
    factor = context.rows_are_half ? times_power(1.0f, -context.buffered_shift) : 1.0f;
    target.row = static_cast<char*>(workspace.rows) + static_cast<int64_t>(slot) *
                                                          workspace.buffered_row_elements *
                                                          (context.rows_are_half ? 2 : 4);
    if (owner == lane) pad_row(target.row, context.feature.embedding_dim, context.rows_are_half);
  } else if (!lone && workspace.sums != nullptr) {
    target.row = reinterpret_cast<char*>(workspace.sums +
                                         (sample - context.range.first_sample) * row_stride +
                                         context.feature.output_column);
  } else {
    target.row = static_cast<char*>(context.output.data) +
                 (sample * row_stride + context.feature.output_column) *
                     (context.output.type == ElementType::kFloat32 ? 4 : 2);
  }
  target.factor = factor;
  if (context.paired) {
    target.write = adds                             ? RowWrite::kAddedPairs
                   : type == ElementType::kFloat16  ? RowWrite::kHalfPairs
                   : type == ElementType::kBFloat16 ? RowWrite::kBFloatPairs
                   : buffers && slot != kAddedRow   ? RowWrite::kFloatPairsBuffered
                                                    : RowWrite::kFloatPairs;
  } else {
    target.write = adds                             ? RowWrite::kAdded
                   : type == ElementType::kFloat16  ? RowWrite::kHalves
                   : type == ElementType::kBFloat16 ? RowWrite::kBFloats
                                                    : RowWrite::kFloats;
  }
  return __ballot_sync(kAllLanes, active && !elsewhere) & members;
}

// Two neighbouring columns of a row, unscaled; `second` may be behind the last column.
struct ColumnPair {
  int32_t column;
  bool exists;
  float first;
  float second;
};

// Rare, so kept out of line.
inline __device__ __noinline__ void write_unpaired(char* row, RowWrite write, int32_t column,
                                                   float first, float second, bool has_second) {
  if (write == RowWrite::kAdded) {
    float* const sums = reinterpret_cast<float*>(row) + column;
    atomicAdd(sums, first);
    if (has_second) atomicAdd(sums + 1, second);
    return;
  }
  const ElementType type = write == RowWrite::kHalves    ? ElementType::kFloat16
                           : write == RowWrite::kBFloats ? ElementType::kBFloat16
                                                         : ElementType::kFloat32;
  store_element<float>(row, type, column, first);
  if (has_second) store_element<float>(row, type, column + 1, second);
}

// Writes a lane's columns of a row.
template <int kPairs>
__device__ __forceinline__ void write_pairs(const RowTarget& target,
                                            const ColumnPair (&pairs)[kPairs], bool has_second) {
  const float factor = target.factor;
  const auto each = [&](auto&& write) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (pairs[i].exists) {
        write(pairs[i].column, pairs[i].first * factor, pairs[i].second * factor);
      }
    }
  };
  float* const floats = reinterpret_cast<float*>(target.row);
  __half* const halves = reinterpret_cast<__half*>(target.row);
  if (target.write == RowWrite::kFloatPairs) {
    each([&](int32_t column, float first, float second) {
      __stcs(reinterpret_cast<float2*>(floats + column), make_float2(first, second));
    });
  } else if (target.write == RowWrite::kHalfPairs) {
    each([&](int32_t column, float first, float second) {
      *reinterpret_cast<uint32_t*>(halves + column) = round_pair(first, second);
    });
  } else if (target.write == RowWrite::kAddedPairs) {
    each([&](int32_t column, float first, float second) {
      add_pair(floats + column, make_float2(first, second));
    });
  } else if (target.write == RowWrite::kFloatPairsBuffered) {
    each([&](int32_t column, float first, float second) {
      *reinterpret_cast<float2*>(floats + column) = make_float2(first, second);
    });
  } else if (target.write == RowWrite::kBFloatPairs) {
    each([&](int32_t column, float first, float second) {
      *reinterpret_cast<__nv_bfloat162*>(halves + column) = __floats2bfloat162_rn(first, second);
    });
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (pairs[i].exists) {
        write_unpaired(target.row, target.write, pairs[i].column, pairs[i].first * factor,
                       pairs[i].second * factor, has_second);
      }
    }
  }
}

// Whether rows of the feature can be written in pairs of columns.
__device__ __forceinline__ bool rows_are_paired(const TiledFeature& feature,
                                                const PooledOutput& output, int32_t last_q) {
  return last_q % 2 == 0 && feature.output_column % 2 == 0 && output.row_stride % 2 == 0 &&
         reinterpret_cast<uintptr_t>(output.data) % 8 == 0;
}

}  // namespace flowtt::cuda
