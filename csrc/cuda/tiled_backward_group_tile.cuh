// What a block of the backward pass has in shared memory where its warps multiply in groups of four
// (GradientShape::kGrouped): right operands are lines that the tensor core reads itself
// (warpgroup_product.cuh), left ones are registers.

#pragma once

#include "tiled_backward_tile.cuh"
#include "warpgroup_product.cuh"

namespace flowtt::cuda {

// Places are in bytes, as in BackwardTile.
struct __align__(1024) GroupTile {
  static constexpr int kRank = 32;
  using Products = BackwardTile<kRank>;
  static constexpr uint32_t kOperandBytes = 32 * kGroupLineBytes;
  static constexpr uint32_t kOperandElements = kOperandBytes / sizeof(float);

  // As in BackwardTile.
  float products[kTileEntries * Products::kProductElements];
  // G1[i1] as right operand of the product that gives dG2: an operand for each slot of the warps,
  // of lines r1, whose vectors are its entries.
  float first[kEntriesPerWarp * kOperandElements];
  // G2[i2] as right operand of the product that gives P: four times 32 lines, the columns of P.
  float second[kGradientQ * kOperandElements];
  // G2[i2] as right operand of the product that gives dG1: an operand for each j2, of lines r1.
  float second_rows[kGradientQ * kOperandElements];

  // Of `first`: element (j1, r1 = 16 h + 4 t + s) of the entry in a slot of a warp. Entries of odd
  // slots are swapped, so that lanes that store for two slots meet in no bank.
  static __device__ __forceinline__ uint32_t first_lane(uint32_t slot, uint32_t warp, uint32_t j1,
                                                        uint32_t t) {
    return slot * kOperandBytes + group_line_place(2 * t, warp ^ slot % 2) + j1 * 4;
  }
  static __device__ __forceinline__ uint32_t first_place(uint32_t lane_place, uint32_t h,
                                                         uint32_t s) {
    return (lane_place ^ s % 2 * (kGroupLineBytes + 16)) + (2 * h + s / 2) * 8 * kGroupLineBytes;
  }
};

// The vectors of rows of G2[i2] that a thread loads, 8 rows apart, and where their elements go.
struct GroupSecondRows {
  static constexpr int kRank = GroupTile::kRank;
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
    rows_place = j2 * GroupTile::kOperandBytes + group_line_place(row, r2_part) + v * 4;
  }
  static constexpr __device__ __forceinline__ uint32_t element_step(uint32_t step) {
    return step * 8 * kGradientQ * kRank;
  }
  // Of column `column` of vector `step`.
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t step,
                                                      uint32_t column) {
    return (place ^ (step / 2 ^ 2 * column) * 16) + 2 * column * kGroupLineBytes + step % 2 * 8;
  }
  static __device__ __forceinline__ uint32_t rows_place_at(uint32_t rows_place, uint32_t step,
                                                           uint32_t column) {
    return (rows_place ^ 2 * column * 16) + step * 8 * kGroupLineBytes;
  }
};

}  // namespace flowtt::cuda
