// C (M x N) = or += A (M x K) B (K x N) for the small matrices of a TT chain, vectorised over N.
#pragma once

#include "cpu/simd/vector.h"

namespace flowtt {
namespace {

enum class Accumulate : bool { kNo, kYes };
// Element (m, k) of A: a[m * lda + k], or a[k * lda + m].
enum class Order : bool { kRowMajor, kColumnMajor };

// One register block: M rows, N vectors of W lanes.
template <typename A, int W, int M, int N, Accumulate kAccumulate, Order kOrder>
FLOWTT_INLINE void product_block(int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb,
                                 A* c, int64_t ldc) {
  Vector<A, W> sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      if constexpr (kAccumulate == Accumulate::kYes) {
        sum[m][n] = load<A, W>(c + m * ldc + n * W);
      } else {
        sum[m][n] = Vector<A, W>{};
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<A, W> right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      right[n] = load<A, W>(b + n * W);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const A left = kOrder == Order::kRowMajor ? a[m * lda] : a[m];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        sum[m][n] += left * right[n];
      }
    }
    a += kOrder == Order::kRowMajor ? 1 : lda;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      store<A, W>(c + m * ldc + n * W, sum[m][n]);
    }
  }
}

// All rows of a column block.
template <typename A, int W, int M, int N, Accumulate kAccumulate, Order kOrder>
FLOWTT_INLINE void product_columns(int64_t rows, int64_t depth, const A* a, int64_t lda, const A* b,
                                   int64_t ldb, A* c, int64_t ldc) {
  int64_t m = 0;
  for (; m + M <= rows; m += M) {
    product_block<A, W, M, N, kAccumulate, kOrder>(
        depth, kOrder == Order::kRowMajor ? a + m * lda : a + m, lda, b, ldb, c + m * ldc, ldc);
  }
  if constexpr (M > 1) {
    if (m < rows) {
      product_columns<A, W, M / 2, N, kAccumulate, kOrder>(
          rows - m, depth, kOrder == Order::kRowMajor ? a + m * lda : a + m, lda, b, ldb,
          c + m * ldc, ldc);
    }
  }
}

template <typename A, int W, Accumulate kAccumulate, Order kOrder>
FLOWTT_INLINE void product_tail(int64_t rows, int64_t columns, int64_t depth, const A* a,
                                int64_t lda, const A* b, int64_t ldb, A* c, int64_t ldc) {
  int64_t n = 0;
  for (; n + W <= columns; n += W) {
    product_columns<A, W, 8, 1, kAccumulate, kOrder>(rows, depth, a, lda, b + n, ldb, c + n, ldc);
  }
  if constexpr (W > 1) {
    if (n < columns) {
      product_tail<A, (W > 4 ? W / 2 : 1), kAccumulate, kOrder>(rows, columns - n, depth, a, lda,
                                                                b + n, ldb, c + n, ldc);
    }
  }
}

template <Accumulate kAccumulate, Order kOrder, typename A>
__attribute__((noinline)) void matrix_product(int64_t rows, int64_t columns, int64_t depth,
                                              const A* a, int64_t lda, const A* b, int64_t ldb,
                                              A* c, int64_t ldc) {
  constexpr int W = kLanes<A>;
  int64_t n = 0;
  if constexpr (kVectorRegisters >= 32) {
    for (; n + 4 * W <= columns; n += 4 * W) {
      product_columns<A, W, 4, 4, kAccumulate, kOrder>(rows, depth, a, lda, b + n, ldb, c + n, ldc);
    }
  }
  constexpr int kPairRows = kVectorRegisters >= 32 ? 8 : 4;
  for (; n + 2 * W <= columns; n += 2 * W) {
    product_columns<A, W, kPairRows, 2, kAccumulate, kOrder>(rows, depth, a, lda, b + n, ldb, c + n,
                                                             ldc);
  }
  if (n < columns) {
    product_tail<A, W, kAccumulate, kOrder>(rows, columns - n, depth, a, lda, b + n, ldb, c + n,
                                            ldc);
  }
}

}  // namespace
}  // namespace flowtt
