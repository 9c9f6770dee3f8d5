// How tables are worked on that have larger q or ranks than a tile has room for: in blocks of
// columns of their matrices. All sums are linear, so a tile and a block of it are an item of work
// like a tile of a smaller table.
//
//     of q1 and q2  4 each     rows (j1, j2) of P and g
//     of q3         8          columns of g and of G3[i3]
//     of r2         kRank      columns of P, rows of G3[i3]
//     of r1         kRank      steps of one item: P is the sum over them

#pragma once

#include "tiled_backward_tile.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// How many blocks there are of each.
struct GradientBlocks {
  uint32_t q1;
  uint32_t q2;
  uint32_t q3;
  uint32_t r2;
  uint32_t steps;  // of r1

  __host__ __device__ GradientBlocks(const int16_t (&q)[kMaxCores],
                                     const int16_t (&r)[kMaxCores - 1], uint32_t rank)
      : q1(blocks_of(q[0], kGradientQ)),
        q2(blocks_of(q[1], kGradientQ)),
        q3(blocks_of(q[2], kGradientColumns)),
        r2(blocks_of(r[1], rank)),
        steps(blocks_of(r[0], rank)) {}

  __host__ __device__ int64_t all() const { return int64_t{q1} * q2 * q3 * r2; }

 private:
  static __host__ __device__ uint32_t blocks_of(int32_t size, uint32_t of_block) {
    return (static_cast<uint32_t>(size) + of_block - 1) / of_block;
  }
};

// Where one block begins.
struct GradientBlock {
  uint32_t first_q1;
  uint32_t first_q2;
  uint32_t first_q3;
  uint32_t first_r2;

  // number: of the blocks of a table.
  __device__ __forceinline__ GradientBlock(const GradientBlocks& blocks, uint32_t number,
                                           uint32_t rank) {
    first_r2 = number % blocks.r2 * rank;
    number /= blocks.r2;
    first_q3 = number % blocks.q3 * kGradientColumns;
    number /= blocks.q3;
    first_q2 = number % blocks.q2 * kGradientQ;
    first_q1 = number / blocks.q2 * kGradientQ;
  }
};

}  // namespace flowtt::cuda
