// What a block of the backward pass has in shared memory where its warps multiply in groups of four
// (GradientShape::kGrouped): right operands are lines that the tensor core reads itself
// (warpgroup_product.cuh), left ones are registers.
//
// Which element of a sum, or which row or column of a product, stands where in an operand is free,
// so long as both operands agree, or the reader of the product knows: the orders below are those in
// which no bank is met twice.

#pragma once

#include <type_traits>

#include "tiled_backward_tile.cuh"
#include "warpgroup_product.cuh"

namespace flowtt::cuda {

// Places are in bytes, as in BackwardTile.
template <int kRank>
struct __align__(1024) GroupTile {
  using Products = BackwardTile<kRank>;
  // Of lines r1.
  static constexpr uint32_t kOperandBytes = kRank * kGroupLineBytes;
  static constexpr uint32_t kOperandElements = kOperandBytes / sizeof(float);
  // Steps of a product whose sums are over r1, or over r2 of one j2.
  static constexpr uint32_t kSteps = kRank / kGroupStepElements;
  // With rank 32 there is no room for `rows`: while a warp has an entry's P in registers, the start
  // of its place is where it hands a row of grad_output around.
  static constexpr bool kHasRows = kRank == 16;

  // As in BackwardTile; with rank 16, see kGradientsByLane, the gradient of P has its r2 in another
  // order.
  float products[kTileEntries * Products::kProductElements];
  // G1[i1] as right operand of the product that gives dG2: an operand for each slot of the warps,
  // of lines r1, whose vectors are its entries.
  float first[kEntriesPerWarp * kOperandElements];
  // G2[i2] as right operand of the product that gives P, the columns of P. Rank 32: four times 32
  // lines. Rank 16: 32 lines, each of one column with j2 < 2 and then one with j2 >= 2.
  float second[Products::kSecondElements];
  // G2[i2] as right operand of the product that gives dG1: lines r1. Rank 32: an operand for each
  // j2; rank 16: for two.
  float second_rows[Products::kSecondElements];
  struct NoRows {};
  using Rows = float[kBackwardWarps][kGradientQ * kGradientQ * kRank / 4];
  [[no_unique_address]] std::conditional_t<kHasRows, Rows, NoRows> rows;  // as in BackwardTile

  // P is multiplied half of its columns at a time: in tiles of 8, and where their lines are.
  static constexpr uint32_t kProductTiles = kRank / 4;
  static constexpr uint32_t kProductPieces = kGradientQ * kRank / 8 / kProductTiles;
  static __device__ __forceinline__ uint32_t second_piece(uint32_t piece) {
    return kRank == 32 ? piece * kProductTiles * 8 * kGroupLineBytes
                       : piece * kSteps * kGroupStepBytes;
  }
  // Of second_rows, where step `step` of the sum over (j2, r2) is.
  static __device__ __forceinline__ uint32_t second_rows_step(uint32_t step) {
    constexpr uint32_t kStepsOfLine = kGroupLineBytes / kGroupStepBytes;
    return step / kStepsOfLine * kOperandBytes + step % kStepsOfLine * kGroupStepBytes;
  }

  // Of `first`: element (j1, r1 = 4 t) of the entry in a slot of a warp. Entries of odd slots are
  // swapped, so that lanes that store for two slots meet in no bank.
  static constexpr uint32_t kSwapped = kRank == 32 ? 1 : 4;
  static __device__ __forceinline__ uint32_t first_lane(uint32_t slot, uint32_t warp, uint32_t j1,
                                                        uint32_t t) {
    return slot * kOperandBytes +
           group_line_place(kRank == 32 ? 2 * t : t, warp ^ slot % 2 * kSwapped) + j1 * 4;
  }
  // Element i of those that a lane has of G1, as TileGradients::FirstRows has them.
  static __device__ __forceinline__ uint32_t first_place(uint32_t lane_place, uint32_t i) {
    if constexpr (kRank == 32) {
      return (lane_place ^ i % 2 * (kGroupLineBytes + 16)) +
             (2 * (i / 4) + i % 4 / 2) * 8 * kGroupLineBytes;
    } else {
      return (lane_place ^ i % 2 * 4 * 16) + 4 * i * kGroupLineBytes;
    }
  }

  // dG2 transposed has rows (j2, r2). With rank 32 each group of warps has half of them, with rank
  // 16 all of them, over the entries of its own warps: so many of a slot.
  static constexpr uint32_t kSummedEntries = kRank == 32 ? kBackwardWarps : kBackwardWarps / 2;
  // Of vector i of a slot's entries, in the order of `first`: the entry's number.
  static __device__ __forceinline__ uint32_t summed_entry(uint32_t warp, uint32_t slot,
                                                          uint32_t i) {
    return slot * kBackwardWarps +
           (kRank == 32 ? i ^ slot % 2 * kSwapped : warp / 4 * kSummedEntries + i);
  }
  // Where those entries start in `first`.
  static __device__ __forceinline__ uint32_t summed_first(uint32_t warp, uint32_t slot) {
    return slot * kOperandBytes + (kRank == 32 ? 0 : (warp / 4 ^ slot % 2) * kSummedEntries * 16);
  }
  // What a lane sums: row j2 and, as r2 and r2 + 1, the pair that starts in vector `vector`, at
  // its start or 8 bytes behind, of the gradient of P.
  struct SummedRows {
    uint32_t j2;
    uint32_t vector;
    uint32_t r2;

    __device__ __forceinline__ SummedRows(uint32_t warp, uint32_t g)
        : j2(kRank == 32 ? warp / 2 : warp % 4),
          vector(kRank == 32 ? warp % 2 * 4 + g / 2 : g / 2),
          r2(kRank == 32 ? warp % 2 * 16 + 2 * g : g % 2 * 8 + g / 2 * 2) {}
  };
  // Column 2 t + e of tile n is r1 = summed_column(t) + summed_column_step(n, e).
  static __device__ __forceinline__ uint32_t summed_column(uint32_t t) {
    return kRank == 32 ? 4 * t : 8 * (t % 2) + t / 2;
  }
  static __device__ __forceinline__ uint32_t summed_column_step(uint32_t n, uint32_t e) {
    return kRank == 32 ? 16 * (n / 2) + 2 * (n % 2) + e : 2 * n + 4 * e;
  }

  // Rank 16: of the gradient of P, vector t of a row (j1, j2) has what a lane has of it: r2 = 2 t,
  // 2 t + 1, 8 + 2 t and 8 + 2 t + 1.
  static constexpr bool kGradientsByLane = kRank == 16;
  // Rank 16: the columns 2 t and 2 t + 1 of the two tiles of dG1 are four neighbours.
  static constexpr bool kFirstByVectors = kRank == 16;
  // The r2 that stands at row g of the left operand of dG3, and that + 8 at row g + 8.
  static __device__ __forceinline__ uint32_t product_row(uint32_t g) {
    return kRank == 32 ? g : 2 * (g % 4) + g / 4;
  }
};

// The vectors of rows of G2[i2] that a thread loads, and where their elements go.
template <int kRank>
struct GroupSecondRows;

// 8 rows apart.
template <>
struct GroupSecondRows<32> {
  static constexpr int kRank = 32;
  using Tile = GroupTile<kRank>;
  uint32_t element;     // of the slice
  uint32_t place;       // of that element in GroupTile::second
  uint32_t rows_place;  // and in GroupTile::second_rows

  __device__ __forceinline__ explicit GroupSecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;
    const uint32_t row = thread / 4 % 8;
    const uint32_t r2_part = thread / 32 % 2;
    const uint32_t j2 = thread / 64;
    element = (row * kGradientQ + j2) * kRank + 16 * r2_part + 4 * v;
    const uint32_t line = (4 * j2 + v % 2 * 2 + r2_part) * 8 + v / 2;
    place = group_line_place(line, 2 * (row % 4)) + row / 4 * 4;
    rows_place = j2 * Tile::kOperandBytes + group_line_place(row, r2_part) + v * 4;
  }
  static constexpr __device__ __forceinline__ uint32_t element_step(uint32_t step) {
    return step * 8 * kGradientQ * kRank;
  }
  // Of column `column` of vector `step`.
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t step,
                                                      uint32_t column) {
    return (place ^ (step / 2 ^ 2 * column) * 16) + 2 * column * kGroupLineBytes + step % 2 * 8;
  }
  // The columns of vector `step`, to their places in second_rows.
  static __device__ __forceinline__ void store_rows(float* second_rows, uint32_t rows_place,
                                                    uint32_t step, const float (&columns)[4]) {
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      store_at(second_rows, (rows_place ^ 2 * n * 16) + step * 8 * kGroupLineBytes, columns[n]);
    }
  }
};

// One vector a thread: r2 = 4 v and the next three. A warp has eight r1 of one j2.
template <>
struct GroupSecondRows<16> {
  static constexpr int kRank = 16;
  using Tile = GroupTile<kRank>;
  uint32_t element;
  uint32_t place;
  uint32_t rows_place;

  __device__ __forceinline__ explicit GroupSecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;
    const uint32_t r1_quarter = thread / 4 % 4;  // r1 / 4
    const uint32_t r1_bits[2] = {thread / 16 % 2, thread / 32 % 2};
    const uint32_t j2 = thread / 64;
    const uint32_t r1 = 4 * r1_quarter + 2 * r1_bits[1] + r1_bits[0];
    element = (r1 * kGradientQ + j2) * kRank + 4 * v;
    // Columns of tile 2 j2 + b of P: at 2 t + e is r2 = 8 e + 2 t + b. Of r1, vectors have r1 % 4.
    const uint32_t line = j2 % 2 * 16 + v % 2 * 4 + v / 2;
    place = group_line_place(line, j2 / 2 * 4 + 2 * r1_bits[0] + r1_bits[1]) + r1_quarter * 4;
    // Of a j2, vector 2 e + n has r2 = 8 n + 2 t + e. Lines are in the order of kFirstByVectors.
    const uint32_t row = r1_bits[1] * 8 + 2 * r1_quarter + r1_bits[0];
    rows_place =
        j2 / 2 * Tile::kOperandBytes + group_line_place(row, j2 % 2 * 4 + v / 2) + v % 2 * 8;
  }
  static constexpr __device__ __forceinline__ uint32_t element_step(uint32_t) { return 0; }
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t, uint32_t column) {
    return (place ^ column / 2 * 2 * 16) + (column / 2 * 2 + column % 2 * 8) * kGroupLineBytes;
  }
  static __device__ __forceinline__ void store_rows(float* second_rows, uint32_t rows_place,
                                                    uint32_t, const float (&columns)[4]) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      store_at(second_rows, rows_place ^ e * 2 * 16, make_float2(columns[e], columns[2 + e]));
    }
  }
};

}  // namespace flowtt::cuda
