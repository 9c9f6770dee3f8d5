// left (rows x inner) @ right (inner x columns) by one thread block: one level of a chain. `left`
// is a prefix product in the block's scratch, `right` a core slice in global memory.
//
// A thread forms a tile of kRows rows x kColumns columns in registers. Its columns are one vector
// of `right` (or one column), its rows are spread over all rows; threads of a warp are neighbours
// in the columns. So an element of the slice is loaded once for kRows rows, by loads that the warp
// coalesces, many of them in flight, and `left` comes as vectors along `inner`, mostly the same
// ones for the whole warp.

#pragma once

#include "chain_layout.h"
#include "float_types.cuh"
#include "predicated_load.cuh"

namespace flowtt::cuda {

constexpr int kMaxBlockThreads = 256;

// Rows of a tile when there is more than one.
constexpr int kTileRows = 4;

// kOne is for small batches, which leave SMs idle: tiles of one column give a row more threads, and
// the loads of nearly all that a thread needs are in flight at once. Less code too, whose first
// fetch such a batch waits for.
enum class TileColumns { kVectorOrOne, kOne };

// What a thread loads of a slice before it multiplies: vectors, or elements of one column.
template <TileColumns kTiles>
constexpr int ahead(int columns) {
  return columns > 1 ? 8 : kTiles == TileColumns::kOne ? 32 : 16;
}

// A kernel that calls level_product is compiled for so many threads on an SM: enough loads in
// flight, and registers for a tile and the vectors of the slice that it is multiplied by.
constexpr int kChainThreadsPerMultiprocessor = 512;

// What a thread hands over: kColumns elements of one row of the product, either neighbours or one
// alone.
template <typename acc_t, int kColumns>
struct ProductVector {
  int32_t row;
  int32_t column;
  acc_t values[kColumns];
};

template <typename acc_t, int kCount>
__device__ __forceinline__ void load_accumulators(acc_t (&values)[kCount], const acc_t* source) {
  if constexpr (kCount * sizeof(acc_t) == 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(source);
    __builtin_memcpy(values, &words, sizeof(words));
  } else {
    for (int i = 0; i < kCount; ++i) values[i] = source[i];
  }
}

template <typename acc_t, int kCount>
__device__ __forceinline__ void store_accumulators(acc_t* target, const acc_t (&values)[kCount]) {
  if constexpr (kCount * sizeof(acc_t) == 16) {
    uint4 words;
    __builtin_memcpy(&words, values, sizeof(words));
    *reinterpret_cast<uint4*>(target) = words;
  } else {
    for (int i = 0; i < kCount; ++i) target[i] = values[i];
  }
}

// kColumns neighbours of a core slice, as they are in memory.
template <typename core_t, int kColumns>
struct SliceVector {
  static constexpr int kBytes = kColumns * sizeof(core_t);
  using Words = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;
  Words words;

  // Zeros unless `is_there`.
  __device__ __forceinline__ void load(const core_t* source, bool is_there) {
    load_if<kBytes>(words, source, is_there);
  }
  template <typename acc_t>
  __device__ __forceinline__ void unpack(acc_t (&values)[kColumns]) const {
    core_t elements[kColumns];
    __builtin_memcpy(elements, &words, sizeof(words));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = to_accumulator<acc_t>(elements[i]);
  }
};

template <int kRows, int kColumns, int kAhead, typename core_t, typename acc_t, typename Prepare,
          typename Consume>
__device__ __forceinline__ void multiply_tiles(const ChainLevel& level, const acc_t* left,
                                               int32_t left_stride, const core_t* right,
                                               Prepare& prepare, Consume& consume) {
  // Left operands are read by kDepth, slice vectors by kAhead at a time.
  constexpr int kDepth = kVectorBytes / sizeof(acc_t);
  using Vector = SliceVector<core_t, kColumns>;
  const int32_t rows = level.rows;
  const int32_t columns = level.columns;
  const int32_t inner = level.inner;
  const int32_t row_tiles = (rows + kRows - 1) / kRows;
  const int32_t tiles = row_tiles * level.column_tiles;

  bool is_first_tile = true;
#pragma unroll 1
  for (int32_t tile = threadIdx.x;; tile += blockDim.x) {
    const bool has_tile = tile < tiles;
    const int32_t row_tile = divide(static_cast<uint32_t>(tile), level.by_column_tiles);
    const int32_t column = (tile - row_tile * level.column_tiles) * kColumns;
    const core_t* source = right + column;
    Vector vectors[kAhead];
    const auto load_ahead = [&](int32_t a) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        // Beyond `inner`, zeros meet the zeros at the end of the left rows.
        vectors[u].load(source, a + u < inner);
        source += columns;
        // Or the compiler keeps all these addresses in registers.
        forget(source);
      }
    };
    if (has_tile) load_ahead(0);
    if (is_first_tile) {
      prepare();
      __syncthreads();
      is_first_tile = false;
    }
    if (!has_tile) return;

    const acc_t* left_rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Rows past the end are formed for nothing, from the last row.
      left_rows[i] = left + min(row_tile + i * row_tiles, rows - 1) * left_stride;
    }
    acc_t sums[kRows][kColumns] = {};
    int32_t a = 0;
    while (true) {
#pragma unroll
      for (int first = 0; first < kAhead; first += kDepth) {
        if (a + first >= inner) break;
        acc_t slice_values[kDepth][kColumns];
#pragma unroll
        for (int u = 0; u < kDepth; ++u) vectors[first + u].unpack(slice_values[u]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          acc_t left_values[kDepth];
          load_accumulators(left_values, left_rows[i] + a + first);
#pragma unroll
          for (int u = 0; u < kDepth; ++u) {
#pragma unroll
            for (int v = 0; v < kColumns; ++v) sums[i][v] += left_values[u] * slice_values[u][v];
          }
        }
      }
      a += kAhead;
      if (a >= inner) break;
      load_ahead(a);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = row_tile + i * row_tiles;
      if (row >= rows) break;
      ProductVector<acc_t, kColumns> vector{row, column, {}};
#pragma unroll
      for (int v = 0; v < kColumns; ++v) vector.values[v] = sums[i][v];
      consume(vector);
    }
  }
}

// Calls consume(ProductVector<acc_t, n>) with the whole product, n being a vector or 1. Rows of
// `left` are left_stride apart. prepare() may write `left`: a barrier follows it.
template <TileColumns kTiles, typename core_t, typename acc_t, typename Prepare, typename Consume>
__device__ __forceinline__ void level_product(const ChainLevel& level, const acc_t* left,
                                              int32_t left_stride, const core_t* right,
                                              Prepare&& prepare, Consume&& consume) {
  constexpr int kVector = kVectorBytes / sizeof(acc_t);
  // Several rows a thread only if that leaves a tile for (nearly) every thread.
  const bool by_rows = level.rows > 1 && level.rows * level.column_tiles >= 2 * blockDim.x;
  constexpr int kVectorAhead = ahead<kTiles>(kVector);
  constexpr int kColumnAhead = ahead<kTiles>(1);
  if constexpr (kTiles == TileColumns::kVectorOrOne) {
    if (level.by_vectors && by_rows) {
      multiply_tiles<kTileRows, kVector, kVectorAhead>(level, left, left_stride, right, prepare,
                                                       consume);
      return;
    }
    if (level.by_vectors) {
      multiply_tiles<1, kVector, kVectorAhead>(level, left, left_stride, right, prepare, consume);
      return;
    }
  }
  if (by_rows) {
    multiply_tiles<kTileRows, 1, kColumnAhead>(level, left, left_stride, right, prepare, consume);
  } else {
    multiply_tiles<1, 1, kColumnAhead>(level, left, left_stride, right, prepare, consume);
  }
}

// Writes elements of P_k = (Q_{k-1} x q rank) where the next level finds them, as Q_k rows of
// `rank` elements. Who writes the end of a row fills its last vector with zeros.
template <typename acc_t, int kColumns>
__device__ __forceinline__ void write_prefix(const ChainLevel& level, acc_t* prefix,
                                             const ProductVector<acc_t, kColumns>& vector) {
  const int32_t j = divide(static_cast<uint32_t>(vector.column), level.by_rank);
  const int32_t s = vector.column - j * level.rank;
  acc_t* const row = prefix + (vector.row * level.q + j) * level.stride;
  store_accumulators(row + s, vector.values);
  if constexpr (kColumns == 1) {
    constexpr int kVector = kVectorBytes / sizeof(acc_t);
    if (s + 1 < level.rank) return;
#pragma unroll 1
    for (int32_t end = s + 1; end % kVector != 0; ++end) row[end] = 0;
  }
}

}  // namespace flowtt::cuda
