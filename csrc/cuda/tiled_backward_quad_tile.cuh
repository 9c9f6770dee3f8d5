// As tiled_backward_group_tile.cuh, for ranks 16, where a lane stores its sums of dP as they are:
// four neighbours, which are operands of dG1 and of dG2.
//
// Which element of a sum, or which row or column of a product, stands where in an operand is free,
// so long as both operands agree and the reader of the product knows: the orders below are such
// that no bank is met twice.

#pragma once

#include "tiled_backward_tile.cuh"
#include "warpgroup_product.cuh"

namespace flowtt::cuda {

// Places are in bytes, as in BackwardTile. A group of warps sums dG2 over its own entries.
struct __align__(1024) QuadTile {
  static constexpr int kRank = 16;
  using Products = BackwardTile<kRank>;
  static constexpr uint32_t kOperandBytes = kRank * kGroupLineBytes;  // of lines r1
  static constexpr uint32_t kOperandElements = kOperandBytes / sizeof(float);
  static constexpr uint32_t kGroups = kBackwardWarps / 4;

  // As in BackwardTile, but for the order of r2, see row_of_third, and for the gradients of P, see
  // gradient_lane.
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
  // Of each thread, places that depend on nothing else, two in a word: to compute them again for
  // every tile would take a fifth of its instructions, and there are no registers to keep them.
  enum PlaceWord : uint32_t { kFirstAndProduct, kProductAndGradient, kSums, kSecond, kPlaceWords };
  uint32_t places[kPlaceWords][kBackwardThreads];

  // Columns 2 t and + 1 of tile 2 j2 + b of P are r2 = 2 t + b and that + 8. So this r2 stands at
  // row g of the left operand of dG3, and 8 more at row g + 8.
  static __device__ __forceinline__ uint32_t row_of_third(uint32_t g) {
    return 2 * (g % 4) + g / 4;
  }

  // Line n of `first` and of `second_rows` is such an r1 that a lane of a product's columns, 2 t
  // and + 1 of two tiles, has r1 = 4 t to 4 t + 3.
  static __device__ __forceinline__ constexpr uint32_t line_of(uint32_t r1) {
    return r1 / 2 % 2 * 8 + r1 / 4 * 2 + r1 % 2;
  }
  // Of `first`: element (j1, r1 = 4 t) of the entry in a slot of a warp, and r1 = 4 t + i. A step's
  // first vector has j1 < 2: of the warp's even slot, then of its odd one.
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
    return j2 / 2 * 512 + b * 128 + (j2 % 2 ^ b) * 64 + (t * 16 ^ slot % 2 * kOddSlot);
  }
  // By ^: from the place in one slot to that in the next.
  static constexpr uint32_t kOddSlot = 32;
  // From that with j2 = 0.
  static __device__ __forceinline__ uint32_t gradient_place(uint32_t lane_place, uint32_t j2,
                                                            uint32_t n) {
    return (lane_place ^ j2 % 2 * 64) + j2 / 2 * 512 + n * 256;
  }
};

// The vector of a row of G2[i2] that a thread loads, and where its elements go. A warp has eight r1
// of one j2.
struct QuadSecondRows {
  uint32_t row;  // r1
  uint32_t j2;
  uint32_t column;      // r2, and the next three
  uint32_t place;       // of that element in QuadTile::second
  uint32_t rows_place;  // and in QuadTile::second_rows

  __device__ __forceinline__ explicit QuadSecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;
    row = thread / 4 % 2 + thread / 32 % 2 * 2 + thread / 16 % 2 * 4 + thread / 8 % 2 * 8;
    j2 = thread / 64;
    column = 4 * v;
    // Vectors of a column: r1 % 4 = 0, 2, 1, 3. Column n is in line 8 (n % 2) + 2 (n / 2) from it.
    place =
        group_line_place(j2 % 2 * 16 + v % 2 * 4 + v / 2, j2 / 2 * 4 + row % 2 * 2 + row / 2 % 2) +
        row / 4 * 4;
    // Vector 2 n + e of a j2 has r2 = 8 n + 2 t + e.
    rows_place = j2 / 2 * QuadTile::kOperandBytes +
                 group_line_place(QuadTile::line_of(row), j2 % 2 * 4 + v / 2 * 2) + v % 2 * 8;
  }
  static constexpr __device__ __forceinline__ uint32_t row_step(uint32_t) { return 0; }
  // Of column `column` of the vector.
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t column) {
    return (place ^ column / 2 * 2 * 16) + (column / 2 * 2 + column % 2 * 8) * kGroupLineBytes;
  }
  // Of columns e and e + 2.
  static __device__ __forceinline__ uint32_t rows_place_at(uint32_t rows_place, uint32_t e) {
    return rows_place ^ e * 16;
  }
};

}  // namespace flowtt::cuda
