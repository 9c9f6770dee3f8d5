// Transposition of small matrices.
#pragma once

#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

FLOWTT_INLINE void transpose_4x4(const float* source, int64_t source_stride, float* target,
                                 int64_t target_stride) {
  using V = Vector<float, 4>;
  const V a = load<float, 4>(source);
  const V b = load<float, 4>(source + source_stride);
  const V c = load<float, 4>(source + 2 * source_stride);
  const V d = load<float, 4>(source + 3 * source_stride);
  const V ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const V ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const V cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const V cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store<float, 4>(target, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
  store<float, 4>(target + target_stride, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
  store<float, 4>(target + 2 * target_stride,
                  __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
  store<float, 4>(target + 3 * target_stride,
                  __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}

// target [columns, rows] = source [rows, columns] transposed, both dense.
template <typename A>
FLOWTT_INLINE void transpose(int64_t rows, int64_t columns, const A* source, A* target) {
  int64_t blocked_rows = 0;
  int64_t blocked_columns = 0;
  if constexpr (sizeof(A) == 4) {
    blocked_rows = rows & ~int64_t{3};
    blocked_columns = columns & ~int64_t{3};
    for (int64_t i = 0; i < blocked_rows; i += 4) {
      for (int64_t j = 0; j < blocked_columns; j += 4) {
        transpose_4x4(source + i * columns + j, columns, target + j * rows + i, rows);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < blocked_rows ? blocked_columns : 0; j < columns; ++j) {
      target[j * rows + i] = source[i * columns + j];
    }
  }
}

}  // namespace
}  // namespace flowtt
