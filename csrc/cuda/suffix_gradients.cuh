// The backward pass of tables of four cores: they are differentiated as tables of three, whose last
// core holds what the last two give for all pairs (i3, i4), in fp32:
//
//     G34[i3, i4] = G3[i3] G4[i4], as a matrix (r2 q3) x q4
//     dG3[i3] += sum over i4 of dG34[i3, i4] G4[i4]^T    dG4[i4] += sum over i3 of G3[i3]^T
//     dG34[i3, i4]
//
// The pairs and their gradients do not grow with the batch; their number is bounded
// (tiled_backward_pairs.cu). The sums over them are short beside the work on the lookups.

#pragma once

#include "float_types.cuh"
#include "tiled_backward.h"

namespace flowtt::cuda {

// Rows (a, j3) and columns b of a slice of core 3, seen as a matrix (r2 q3) x r3, of a block.
inline constexpr int kPairRows = 32;
inline constexpr int kPairColumns = 32;
inline constexpr int kPairThreads = 256;
inline constexpr int kPairTeams = kPairThreads / kPairColumns;
inline constexpr int kPairRowsOfThread = kPairRows / kPairTeams;

// Of one table.
struct PairedTable {
  const void* third;
  const void* fourth;
  ElementType core_type;
  int32_t p3;
  int32_t p4;
  int32_t rows;  // r2 q3
  int32_t r3;
  int32_t q4;
  float* values;     // [p3, p4, rows, q4]
  float* gradients;  // the same
  uint8_t* touched;  // [p3, p4]
  float* third_gradient;
  float* fourth_gradient;
  uint8_t* third_touched;  // null if fourth_touched is: when nobody asks
  uint8_t* fourth_touched;

  __device__ __forceinline__ int64_t pair(int32_t i3, int32_t i4) const {
    return (int64_t{i3} * p4 + i4) * rows * q4;
  }
  __device__ __forceinline__ float third_element(int32_t i3, int32_t row, int32_t b) const {
    return load_element<float>(third, core_type, (int64_t{i3} * rows + row) * r3 + b);
  }
  __device__ __forceinline__ float fourth_element(int32_t i4, int32_t b, int32_t j4) const {
    return load_element<float>(fourth, core_type, (int64_t{i4} * r3 + b) * q4 + j4);
  }
};

// Forms the pairs of i3 = blockIdx.x with every gridDim.y-th i4, and clears what belongs to them.
__global__ void __launch_bounds__(kPairThreads)
    expand_pairs_kernel(const __grid_constant__ PairedTable table) {
  const int32_t i3 = static_cast<int32_t>(blockIdx.x);
  const int32_t elements = table.rows * table.q4;
#pragma unroll 1
  for (int32_t i4 = blockIdx.y; i4 < table.p4; i4 += gridDim.y) {
    const int64_t pair = table.pair(i3, i4);
#pragma unroll 1
    for (int32_t e = threadIdx.x; e < elements; e += kPairThreads) {
      const int32_t row = e / table.q4;
      const int32_t j4 = e - row * table.q4;
      float sum = 0.0f;
#pragma unroll 4
      for (int32_t b = 0; b < table.r3; ++b) {
        sum = fmaf(table.third_element(i3, row, b), table.fourth_element(i4, b, j4), sum);
      }
      table.values[pair + e] = sum;
      table.gradients[pair + e] = 0.0f;
    }
    if (threadIdx.x == 0) table.touched[int64_t{i3} * table.p4 + i4] = 0;
  }
}

// dG3[i3] of a block of rows: blockIdx = (i3, block of rows).
__global__ void __launch_bounds__(kPairThreads)
    third_gradient_kernel(const __grid_constant__ PairedTable table) {
  const int32_t i3 = static_cast<int32_t>(blockIdx.x);
  const int32_t first_row =
      static_cast<int32_t>(blockIdx.y * kPairRows + threadIdx.x / kPairColumns);
  const uint8_t* const touched = table.touched + int64_t{i3} * table.p4;
#pragma unroll 1
  for (int32_t b = threadIdx.x % kPairColumns; b < table.r3; b += kPairColumns) {
    float sums[kPairRowsOfThread] = {};
    bool is_touched = false;
#pragma unroll 1
    for (int32_t i4 = 0; i4 < table.p4; ++i4) {
      if (touched[i4] == 0) continue;
      is_touched = true;
      const float* const gradients = table.gradients + table.pair(i3, i4);
#pragma unroll 1
      for (int32_t j4 = 0; j4 < table.q4; ++j4) {
        const float factor = table.fourth_element(i4, b, j4);
#pragma unroll
        for (int i = 0; i < kPairRowsOfThread; ++i) {
          const int32_t row = first_row + i * kPairTeams;
          if (row < table.rows) sums[i] = fmaf(gradients[row * table.q4 + j4], factor, sums[i]);
        }
      }
    }
    if (!is_touched) return;
#pragma unroll
    for (int i = 0; i < kPairRowsOfThread; ++i) {
      const int32_t row = first_row + i * kPairTeams;
      // Launches for other features of the table may have added to it.
      if (row < table.rows) {
        table.third_gradient[(int64_t{i3} * table.rows + row) * table.r3 + b] += sums[i];
      }
    }
    if (table.third_touched != nullptr && b == 0 && first_row == 0) table.third_touched[i3] = 1;
  }
}

// A part of dG4[i4]: blockIdx = (i4, part of i3).
__global__ void __launch_bounds__(kPairThreads)
    fourth_gradient_kernel(const __grid_constant__ PairedTable table) {
  constexpr int kColumns = 4;  // of q4, at a time
  const int32_t i4 = static_cast<int32_t>(blockIdx.x);
  const int32_t team = static_cast<int32_t>(threadIdx.x / kPairColumns);
  const auto add_columns = [&](int32_t b, int32_t first) {
    float sums[kColumns] = {};
    bool is_touched = false;
#pragma unroll 1
    for (int32_t i3 = blockIdx.y; i3 < table.p3; i3 += gridDim.y) {
      if (table.touched[int64_t{i3} * table.p4 + i4] == 0) continue;
      is_touched = true;
      const float* const gradients = table.gradients + table.pair(i3, i4);
#pragma unroll 1
      for (int32_t row = team; row < table.rows; row += kPairTeams) {
        const float factor = table.third_element(i3, row, b);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (first + j < table.q4) {
            sums[j] = fmaf(gradients[row * table.q4 + first + j], factor, sums[j]);
          }
        }
      }
    }
    if (!is_touched) return;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (first + j < table.q4) {
        atomicAdd(table.fourth_gradient + (int64_t{i4} * table.r3 + b) * table.q4 + first + j,
                  sums[j]);
      }
    }
    if (table.fourth_touched != nullptr && b == 0 && team == 0) table.fourth_touched[i4] = 1;
  };
#pragma unroll 1
  for (int32_t b = threadIdx.x % kPairColumns; b < table.r3; b += kPairColumns) {
#pragma unroll 1
    for (int32_t first = 0; first < table.q4; first += kColumns) add_columns(b, first);
  }
}

}  // namespace flowtt::cuda
