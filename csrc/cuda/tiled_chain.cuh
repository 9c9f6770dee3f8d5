// The chain of four rows on one warp's tensor cores, from packed slices to fp32 values. No
// intermediate leaves the registers.
//
// Stage 1, for each b = j2:   P_b (16 x R2) = A (16 x R1) @ G2[i2][:, b, :] (R1 x R2)
//     A stacks the G1 slices of the tile's four lookups, q1 = 4 rows each; all share i2.
// Stage 2, for each b, transposed:   row_b^T = G3[i3]^T @ P_b^T
//     The summed indices are permuted (tiled_packing.cuh) such that the accumulators of stage 1,
//     once rounded to fp16, are the operand P_b^T as they stand. P_b^T has the columns of two
//     lookups, and so has G3^T the rows of two (Q3 = 8) or four (Q3 = 4): the tile computes every
//     pairing of them, and a lane keeps the one that is its lookup's own.
//
// With three products an operand is x = high + low, and high high + high low + low high is summed.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// One lookup of a warp's window, in shared memory.
struct PlannedLookup {
  char* target;  // the feature's first column of the row, or of the sum
  uint2 slices;  // where the packed slices of cores 1 and 3 start, in bytes
  float factor;
  int32_t bin;
};

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts>
struct TiledChain {
  static constexpr int kSteps1 = kRank1 / 16;
  static constexpr int kSteps2 = kRank2 / 16;
  static constexpr int kWords1 = kRank1 / 8;  // words of a lane's vector of summed index 1
  static constexpr int kWords2 = kRank2 / 8;
  static constexpr int kTiles = kRank2 / 8;  // n-tiles of a P_b
  static constexpr int kParts = kThreeProducts ? 2 : 1;
  static constexpr int kThirdSlices = kQ3 == 8 ? 4 : 2;  // slices of core 3 a lane holds of a tile
  static constexpr int kFirstSlice = kMaxTiledQ * kRank1;  // halves
  static constexpr int kSecondSlice = kMaxTiledQ * kTiles * 32 * (kRank1 / 4);
  static constexpr int kThirdSlice = kQ3 * kRank2;
  static constexpr uint32_t kHalfBytes = sizeof(__half);

  // A finished row in shared memory: 8 words of padding after 32 and a distance of kPaddedRow keep
  // the stores of a warp free of bank conflicts and every fourth column aligned to 16 bytes.
  static constexpr int kPaddedRow = kMaxTiledQ * kMaxTiledQ * kQ3 * 5 / 4 + (kQ3 == 8 ? 8 : 4);
  static __device__ __forceinline__ constexpr int row_offset(int column) {
    return column + column / 32 * 8;
  }

  // Whether the lane's results are its own lookup's: with Q3 = 4, G3^T has the rows of two lookups
  // in each half, and half of the results pair a row with the other lookup's columns.
  static __device__ __forceinline__ bool has_own_results() {
    return kQ3 == 8 || threadIdx.x % 32 / 16 == threadIdx.x % 4 / 2;
  }

  struct Second {
    uint32_t words[kParts][kMaxTiledQ][kTiles][kWords1];
  };
  // As loaded: first[0] has the rows of lookups 0 and 1, first[1] those of lookups 2 and 3.
  struct Loaded {
    uint32_t first[kParts][2][kWords1];
    uint32_t third[kParts][kThirdSlices][kWords2];
  };
  // As multiply_add wants them, four consecutive registers an instruction.
  struct Operands {
    uint32_t first[kParts][kSteps1][4];
    uint32_t third[kParts][kThirdSlices / 2][kSteps2][4];
  };

  // Where this lane's words lie in a slice, in bytes. With offsets of 32 bits from a pointer in a
  // kernel parameter, an address takes one register until its load is issued.
  struct LaneOffsets {
    uint32_t first;
    uint32_t second;
    uint32_t third;

    __device__ __forceinline__ explicit LaneOffsets(const TiledFeature& feature) {
      const int lane = threadIdx.x % 32;
      first = (lane / 4 % 4 * kRank1 + lane % 4 * (kRank1 / 4)) * kHalfBytes;
      second = feature.packed[1] * kHalfBytes + lane * (kRank1 / 4) * kHalfBytes;
      third = (lane / 4 % kQ3 * 4 + lane % 4) * (kRank2 / 4) * kHalfBytes;
    }
  };

  static __device__ __forceinline__ const __half* packed(const TiledWorkspace& workspace, int part,
                                                         uint32_t offset) {
    const __half* base = part == 0 ? workspace.packed_high : workspace.packed_low;
    return reinterpret_cast<const __half*>(reinterpret_cast<const char*>(base) + offset);
  }

  static __device__ __forceinline__ void load_second(Second& second,
                                                     const TiledWorkspace& workspace,
                                                     const LaneOffsets& lane, uint32_t i2) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* slice = packed(workspace, i, lane.second + i2 * (kSecondSlice * kHalfBytes));
#pragma unroll
      for (int b = 0; b < kMaxTiledQ; ++b) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          load_words(second.words[i][b][u], slice + (b * kTiles + u) * 32 * (kRank1 / 4));
        }
      }
    }
  }

  // Loads the slices of the tile's lookups first .. last of the warp's window.
  static __device__ __forceinline__ void load_tile(Loaded& loaded, const TiledWorkspace& workspace,
                                                   const LaneOffsets& lane,
                                                   const PlannedLookup* plan, int first, int last) {
    const int group = threadIdx.x % 32 / 16;
    const uint2 upper = plan[min(first + group, last)].slices;
    const uint2 lower = plan[min(first + 2 + group, last)].slices;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      load_words(loaded.first[i][0], packed(workspace, i, lane.first + upper.x));
      load_words(loaded.first[i][1], packed(workspace, i, lane.first + lower.x));
    }
#pragma unroll
    for (int x = 0; x < kThirdSlices; ++x) {
      const uint32_t offset =
          kQ3 == 4 ? (x == 0 ? upper.y : lower.y) : plan[min(first + x, last)].slices.y;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        load_words(loaded.third[i][x], packed(workspace, i, lane.third + offset));
      }
    }
  }

  // An operand's rows g and g + 8 come from different slices, so its registers have to be brought
  // together. `zero` is 0, but the compiler must not know: seeing plain copies, it repeats them at
  // every use (180 moves a tile instead of 24).
  static __device__ __forceinline__ void arrange(Operands& operands, const Loaded& loaded,
                                                 uint32_t zero) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          operands.first[i][k][word] = loaded.first[i][word % 2][2 * k + word / 2] ^ zero;
        }
      }
#pragma unroll
      for (int pair = 0; pair < kThirdSlices / 2; ++pair) {
#pragma unroll
        for (int k = 0; k < kSteps2; ++k) {
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            operands.third[i][pair][k][word] =
                loaded.third[i][2 * pair + word % 2][2 * k + word / 2] ^ zero;
          }
        }
      }
    }
  }

  // One P_b: lane (g, t) has rows g (sums 0 and 1) and g + 8 (2 and 3).
  static __device__ __forceinline__ void stage1(float (&p)[kTiles][4], const Operands& operands,
                                                const Second& second, int b, int first_part,
                                                int second_part) {
#pragma unroll
    for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        multiply_add(p[u], operands.first[first_part][k], second.words[second_part][b][u][2 * k],
                     second.words[second_part][b][u][2 * k + 1]);
      }
    }
  }

  static __device__ __forceinline__ void stage2(float (&row)[4], const Operands& operands, int pair,
                                                const uint32_t (&p)[kTiles], int third_part) {
#pragma unroll
    for (int k = 0; k < kSteps2; ++k) {
      multiply_add(row, operands.third[third_part][kQ3 == 8 ? pair : 0][k], p[2 * k], p[2 * k + 1]);
    }
  }

  // Calls emit(pair, b, value0, value1) for every element of the tile's rows: value0 and value1
  // are the columns (a, b, g % Q3) and (a + 1, b, g % Q3), a = 2 (t % 2), of lookup 2 pair + t / 2.
  template <typename Emit>
  static __device__ __forceinline__ void rows(const Operands& operands, const Second& second,
                                              int32_t q2, Emit&& emit) {
    // Within a pair of lookups, the lane's columns of P_b^T belong to the first for t < 2.
    const bool first_of_pair = threadIdx.x % 4 < 2;
#pragma unroll
    for (int b = 0; b < kMaxTiledQ; ++b) {
      if (b >= q2) break;
      float p[kTiles][4] = {};
      if constexpr (kThreeProducts) {
        stage1(p, operands, second, b, 0, 1);
        stage1(p, operands, second, b, 1, 0);
      }
      stage1(p, operands, second, b, 0, 0);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t high[kTiles];
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          high[u] = round_pair(p[u][2 * pair], p[u][2 * pair + 1]);
        }
        float row[4] = {};
        if constexpr (kThreeProducts) {
          uint32_t low[kTiles];
#pragma unroll
          for (int u = 0; u < kTiles; ++u) {
            low[u] = residual_pair(p[u][2 * pair], p[u][2 * pair + 1], high[u]);
          }
          stage2(row, operands, pair, low, 0);
          stage2(row, operands, pair, high, 1);
        }
        stage2(row, operands, pair, high, 0);
        // Rows g of the result belong to the first lookup (Q3 = 8) or pair (Q3 = 4) of G3^T.
        const bool upper = kQ3 == 8 ? first_of_pair : pair == 0;
        emit(pair, b, upper ? row[0] : row[2], upper ? row[1] : row[3]);
      }
    }
  }
};

}  // namespace flowtt::cuda
