// What a block of the backward pass has in shared memory where its warps multiply in groups of four
// (GradientShape::kGrouped): right operands are lines that the tensor core reads itself
// (warpgroup_product.cuh), left ones are registers.
//
// Which element of a sum, or which row or column of a product, stands where in an operand is free,
// so long as both operands agree and the reader of the product knows: the orders below are such
// that no bank is met twice.

#pragma once

#include "tiled_backward_tile.cuh"
#include "warpgroup_product.cuh"

namespace flowtt::cuda {

// Places are in bytes, as in BackwardTile.
template <int kRank>
struct GroupTile;

template <>
struct __align__(1024) GroupTile<32> {
  static constexpr int kRank = 32;
  using Products = BackwardTile<kRank>;
  static constexpr uint32_t kOperandBytes = kRank * kGroupLineBytes;  // of lines r1
  static constexpr uint32_t kOperandElements = kOperandBytes / sizeof(float);
  static constexpr bool kHasRows = false;

  // As in BackwardTile; while a warp has an entry's P in registers, the start of its place is
  // where it hands a row of grad_output around.
  float products[kTileEntries * Products::kProductElements];
  // G1[i1] as right operand of the product that gives dG2: an operand for each slot of the warps,
  // of lines r1, whose vectors are its entries.
  float first[kEntriesPerWarp * kOperandElements];
  // G2[i2] as right operand of the product that gives P: four times 32 lines, the columns of P.
  float second[kGradientQ * kOperandElements];
  // G2[i2] as right operand of the product that gives dG1: an operand for each j2, of lines r1.
  float second_rows[kGradientQ * kOperandElements];

  // P is multiplied in pieces of so many tiles of 8 columns, which lie there in `second`.
  static constexpr uint32_t kPieceTiles = 8;
  static __device__ __forceinline__ constexpr uint32_t piece_place(uint32_t piece) {
    return piece * 8 * kPieceTiles * kGroupLineBytes;
  }
  // The r2 that stands at row g of the left operand of dG3; 8 more at row g + 8.
  static __device__ __forceinline__ uint32_t row_of_third(uint32_t g) { return g; }

  // Of `first`: element (j1, r1 = 4 t) of the entry in a slot of a warp, and element i of a lane's
  // FirstRows. Entries of odd slots are swapped, so that lanes that store for two slots meet in no
  // bank.
  static __device__ __forceinline__ uint32_t first_lane(uint32_t slot, uint32_t warp, uint32_t j1,
                                                        uint32_t t) {
    return slot * kOperandBytes + group_line_place(2 * t, warp ^ slot % 2) + j1 * 4;
  }
  static __device__ __forceinline__ uint32_t first_place(uint32_t lane_place, uint32_t i) {
    return (lane_place ^ i % 2 * (kGroupLineBytes + 16)) +
           (i / 4 * 2 + i % 4 / 2) * 8 * kGroupLineBytes;
  }
};

// A group of warps sums dG2 over its own entries.
template <>
struct __align__(1024) GroupTile<16> {
  static constexpr int kRank = 16;
  using Products = BackwardTile<kRank>;
  static constexpr uint32_t kOperandBytes = kRank * kGroupLineBytes;  // of lines r1
  static constexpr uint32_t kOperandElements = kOperandBytes / sizeof(float);
  static constexpr bool kHasRows = true;
  static constexpr uint32_t kGroups = kBackwardWarps / 4;

  // As in BackwardTile, but for the gradients of P, see gradient_lane.
  float products[kTileEntries * Products::kProductElements];
  // G1[i1] as right operand of the product that gives dG2: for slots 0 and 1, then 2 and 3, an
  // operand for each group, of lines r1, whose steps are warps.
  float first[kEntriesPerWarp / 2 * kGroups * kOperandElements];
  // G2[i2] as right operand of the product that gives P: 32 lines, each of one column with j2 < 2
  // and then the one with j2 + 2.
  float second[Products::kSecondElements];
  // G2[i2] as right operand of the product that gives dG1: an operand for j2 < 2 and one for the
  // others, of lines r1.
  float second_rows[Products::kSecondElements];
  float rows[kBackwardWarps][kGradientQ * kGradientQ * kRank / 4];  // as in BackwardTile
  // Of each thread, places that depend on nothing else, two in a word: to compute them again for
  // every tile would take a fifth of its instructions, and there are no registers to keep them.
  static constexpr uint32_t kPlaceWords = 5;
  uint32_t places[kPlaceWords][kBackwardThreads];

  static constexpr uint32_t kPieceTiles = 4;
  static __device__ __forceinline__ constexpr uint32_t piece_place(uint32_t piece) {
    return piece * 2 * kGroupStepBytes;
  }
  // Columns 2 t and + 1 of tile 2 j2 + b of P are r2 = 2 t + b and that + 8.
  static __device__ __forceinline__ uint32_t row_of_third(uint32_t g) {
    return 2 * (g % 4) + g / 4;
  }

  // Line n of `first` and of `second_rows` is such an r1 that a lane of a product's columns, 2 t
  // and + 1 of two tiles, has r1 = 4 t to 4 t + 3.
  static __device__ __forceinline__ constexpr uint32_t line_of(uint32_t r1) {
    return r1 / 2 % 2 * 8 + r1 / 4 * 2 + r1 % 2;
  }
  // As for rank 32. A step's first vector has j1 < 2: of the warp's even slot, then of its odd one.
  static __device__ __forceinline__ uint32_t first_lane(uint32_t slot, uint32_t warp, uint32_t j1,
                                                        uint32_t t) {
    return (slot / 2 * kGroups + warp / 4) * kOperandBytes +
           group_line_place(line_of(4 * t), warp % 4 * 2 + j1 / 2) + slot % 2 * 8 + j1 % 2 * 4;
  }
  static __device__ __forceinline__ uint32_t first_place(uint32_t lane_place, uint32_t i) {
    return (lane_place ^ i % 2 * (kGroupLineBytes + 16)) + i / 2 * 8 * kGroupLineBytes;
  }

  // The gradient of an entry's P: vector t of j2, j1 = b or b + 2 and r2 from 8 n on is what a lane
  // has as the sums of a product, r2 = 8 n + 2 t and + 1 of row j1 = b, then of row b + 2. For the
  // product that gives dG2 it is a left operand as well.
  static __device__ __forceinline__ uint32_t gradient_lane(uint32_t b, uint32_t j2, uint32_t t,
                                                           uint32_t slot) {
    return j2 / 2 * 512 + b * 128 + (j2 % 2 ^ b) * 64 + (t ^ slot % 2 * 2) * 16;
  }
  // From that with j2 = 0.
  static __device__ __forceinline__ uint32_t gradient_place(uint32_t lane_place, uint32_t j2,
                                                            uint32_t n) {
    return (lane_place ^ j2 % 2 * 64) + j2 / 2 * 512 + n * 256;
  }
};

// The vectors of rows of G2[i2] that a thread loads, and where their elements go.
template <int kRank>
struct GroupSecondRows;

// 8 rows apart.
template <>
struct GroupSecondRows<32> {
  using Tile = GroupTile<32>;
  uint32_t element;     // of the slice
  uint32_t place;       // of that element in GroupTile::second
  uint32_t rows_place;  // and in GroupTile::second_rows

  __device__ __forceinline__ explicit GroupSecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;
    const uint32_t row = thread / 4 % 8;
    const uint32_t r2_part = thread / 32 % 2;
    const uint32_t j2 = thread / 64;
    element = (row * kGradientQ + j2) * Tile::kRank + 16 * r2_part + 4 * v;
    const uint32_t line = (4 * j2 + v % 2 * 2 + r2_part) * 8 + v / 2;
    place = group_line_place(line, 2 * (row % 4)) + row / 4 * 4;
    rows_place = j2 * Tile::kOperandBytes + group_line_place(row, r2_part) + v * 4;
  }
  static constexpr __device__ __forceinline__ uint32_t element_step(uint32_t step) {
    return step * 8 * kGradientQ * Tile::kRank;
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
  using Tile = GroupTile<16>;
  uint32_t element;
  uint32_t place;
  uint32_t rows_place;

  __device__ __forceinline__ explicit GroupSecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;
    const uint32_t r1 =
        thread / 4 % 2 + thread / 32 % 2 * 2 + thread / 16 % 2 * 4 + thread / 8 % 2 * 8;
    const uint32_t j2 = thread / 64;
    element = (r1 * kGradientQ + j2) * Tile::kRank + 4 * v;
    // Vectors of a column: r1 % 4 = 0, 2, 1, 3. Column n is in line 8 (n % 2) + 2 (n / 2) from it.
    place =
        group_line_place(j2 % 2 * 16 + v % 2 * 4 + v / 2, j2 / 2 * 4 + r1 % 2 * 2 + r1 / 2 % 2) +
        r1 / 4 * 4;
    // Vector 2 n + e of a j2 has r2 = 8 n + 2 t + e.
    rows_place = j2 / 2 * Tile::kOperandBytes +
                 group_line_place(Tile::line_of(r1), j2 % 2 * 4 + v / 2 * 2) + v % 2 * 8;
  }
  static constexpr __device__ __forceinline__ uint32_t element_step(uint32_t) { return 0; }
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t, uint32_t column) {
    return (place ^ column / 2 * 2 * 16) + (column / 2 * 2 + column % 2 * 8) * kGroupLineBytes;
  }
  static __device__ __forceinline__ void store_rows(float* second_rows, uint32_t rows_place,
                                                    uint32_t, const float (&columns)[4]) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      store_at(second_rows, rows_place ^ e * 16, make_float2(columns[e], columns[2 + e]));
    }
  }
};

}  // namespace flowtt::cuda
