// The chain of rows on one warp's tensor cores, from packed slices to fp32 values.
//
// Stage 1, once a tile of up to four prefixes (i1, i2) with one i2, for each b = j2:
//     P_b (16 x R2) = A (16 x R1) @ G2[i2][:, b, :] (R1 x R2)
//     A stacks the G1 slices: row 2 x + a % 2 + 8 (a / 2) is row a of prefix x, so that a lane's
//     four sums belong to one prefix.
// Stage 2, once a distinct id:
//     row (16 x Q3) = P_x (16 x R2) @ G3[i3] (R2 x Q3)
//     Row 4 a + b of P_x is (j1, j2) = (a, b): the result lies as the table's row does.
//
// Between the stages P_x lies in shared memory as A operands of m16n8k16: one 16-byte vector a lane
// and step, written and read in one instruction. The summed indices are permuted when the cores
// are packed (tiled_packing.cuh), so that the sums of stage 1, rounded, are those vectors.
//
// With three products an operand is x = high + low, and high high + high low + low high is summed.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts>
struct TiledChain {
  static constexpr int kSteps1 = kRank1 / 16;
  static constexpr int kSteps2 = kRank2 / 16;
  static constexpr int kWords1 = kRank1 / 8;  // words of a lane's vector of summed index 1
  static constexpr int kWords2 = kRank2 / 8;
  static constexpr int kTiles = kRank2 / 8;  // n-tiles of a P_b
  static constexpr int kParts = kThreeProducts ? 2 : 1;
  // The low part of core 2 lies in registers only where there are enough of them; otherwise it is
  // read again for each tile, from the L1 cache as a rule.
  static constexpr int kResidentParts = kThreeProducts && kRank1 == 16 ? 2 : 1;
  // Bytes of packed slices, and of a P_x and of a tile's in one part.
  static constexpr uint32_t kFirstSlice = kMaxTiledQ * kRank1 * sizeof(__half);
  static constexpr uint32_t kSecondSlice = kMaxTiledQ * kRank1 * kRank2 * sizeof(__half);
  static constexpr uint32_t kThirdSlice = kQ3 * kRank2 * sizeof(__half);
  static constexpr uint32_t kPrefix = kSteps2 * 32 * sizeof(uint4);
  static constexpr uint32_t kPart = kTileLookups * kPrefix;
  static constexpr uint32_t kTile = kParts * kPart;
  // Pairs of neighbouring columns of a row that a lane has: with Q3 = 4 half of the products'
  // columns repeat the other half, and a lane keeps one pair of its two.
  static constexpr int kPairs = kQ3 == 8 ? 2 : 1;

  struct Second {
    uint32_t words[kResidentParts][kMaxTiledQ][kTiles][kWords1];
  };
  struct First {
    uint32_t words[kParts][2][kWords1];  // rows a and a + 2 of the lane's prefix
  };
  struct Third {
    uint32_t words[kParts][kWords2];
  };
  struct Prefix {
    OperandA steps[kParts][kSteps2];
  };

  static __device__ __forceinline__ const __half* packed(const TiledWorkspace& workspace, int part,
                                                         uint32_t offset) {
    const __half* base = part == 0 ? workspace.packed_high : workspace.packed_low;
    return reinterpret_cast<const __half*>(reinterpret_cast<const char*>(base) + offset);
  }

  // Where the lane's words lie in a slice, in bytes.
  static __device__ __forceinline__ uint32_t first_offset(int lane) {
    return (lane / 4 % 2 * kRank1 + lane % 4 * (kRank1 / 4)) * sizeof(__half);
  }
  static __device__ __forceinline__ uint32_t second_offset(int lane) {
    return lane * (kRank1 / 4) * sizeof(__half);
  }
  static __device__ __forceinline__ uint32_t third_offset(int lane) {
    return (lane / 4 % kQ3 * 4 + lane % 4) * (kRank2 / 4) * sizeof(__half);
  }
  static constexpr uint32_t kSecondStride = 32 * (kRank1 / 4) * sizeof(__half);  // to the next u

  // `offset`: of the slice plus second_offset, and so on.
  static __device__ __forceinline__ void load_second(Second& second,
                                                     const TiledWorkspace& workspace,
                                                     uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kResidentParts; ++i) {
#pragma unroll
      for (int b = 0; b < kMaxTiledQ; ++b) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          load_words(second.words[i][b][u],
                     packed(workspace, i, offset) +
                         (b * kTiles + u) * (kSecondStride / sizeof(__half)));
        }
      }
    }
  }

  static __device__ __forceinline__ void load_first(First& first, const TiledWorkspace& workspace,
                                                    uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_words(first.words[i][half], packed(workspace, i, offset) + half * 2 * kRank1);
      }
    }
  }

  static __device__ __forceinline__ void load_third(Third& third, const TiledWorkspace& workspace,
                                                    uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) load_words(third.words[i], packed(workspace, i, offset));
  }

  // Stage 1 of a tile into `tile`, a warp's kTile bytes. `second_offset` as in load_second.
  static __device__ __forceinline__ void compute_prefixes(char* tile, const First& first,
                                                          const Second& second,
                                                          const TiledWorkspace& workspace,
                                                          uint32_t second_offset) {
    OperandA a[kParts][kSteps1];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          a[i][k].words[word] = first.words[i][word % 2][2 * k + word / 2];
        }
      }
    }
    // Lane (g, t) writes rows 4 a + b and 4 a + b + 8 of prefix g / 2, a = g % 2, one vector; rows
    // with odd a are exchanged in pairs, or two of them would meet in the same banks.
    const int lane = threadIdx.x % 32;
    const int odd = lane / 4 % 2;
    char* const target = tile + lane / 8 * kPrefix + odd * 256 + lane % 4 * 16;
    char* const targets[2] = {target + odd * 64, target + (1 - odd) * 64};
#pragma unroll
    for (int b = 0; b < kMaxTiledQ; ++b) {
      float p[kTiles][4];
      if constexpr (kThreeProducts) {
#pragma unroll
        for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
          for (int u = 0; u < kTiles; ++u) {
            const uint32_t* words = second.words[0][b][u] + 2 * k;
            if (k == 0) {
              multiply(p[u], a[1][k], words[0], words[1]);
            } else {
              multiply_add(p[u], a[1][k], words[0], words[1]);
            }
          }
        }
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          uint32_t low[kWords1];
          if constexpr (kResidentParts == 1) {
            load_words(low, packed(workspace, 1, second_offset) +
                                (b * kTiles + u) * (kSecondStride / sizeof(__half)));
          } else {
#pragma unroll
            for (int i = 0; i < kWords1; ++i) low[i] = second.words[kResidentParts - 1][b][u][i];
          }
#pragma unroll
          for (int k = 0; k < kSteps1; ++k) {
            multiply_add(p[u], a[0][k], low[2 * k], low[2 * k + 1]);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const uint32_t* words = second.words[0][b][u] + 2 * k;
          if (k == 0 && !kThreeProducts) {
            multiply(p[u], a[0][k], words[0], words[1]);
          } else {
            multiply_add(p[u], a[0][k], words[0], words[1]);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const float(&p0)[4] = p[2 * k];
        const float(&p1)[4] = p[2 * k + 1];
        const uint4 high = make_uint4(round_pair(p0[0], p0[1]), round_pair(p0[2], p0[3]),
                                      round_pair(p1[0], p1[1]), round_pair(p1[2], p1[3]));
        char* const vector = targets[b % 2] + b / 2 * 128 + k * 512;
        *reinterpret_cast<uint4*>(vector) = high;
        if constexpr (kThreeProducts) {
          *reinterpret_cast<uint4*>(vector + kPart) = make_uint4(
              residual_pair(p0[0], p0[1], high.x), residual_pair(p0[2], p0[3], high.y),
              residual_pair(p1[0], p1[1], high.z), residual_pair(p1[2], p1[3], high.w));
        }
      }
    }
  }

  // Where the lane's vector of a P_x lies, as compute_prefixes writes it.
  static __device__ __forceinline__ uint32_t prefix_offset(int lane) {
    return (lane ^ lane / 16 * 4) * sizeof(uint4);
  }

  // `source`: the prefix's place plus prefix_offset.
  static __device__ __forceinline__ void load_prefix(Prefix& prefix, const char* source) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const uint4 words = *reinterpret_cast<const uint4*>(source + i * kPart + k * 512);
        prefix.steps[i][k] = {{words.x, words.y, words.z, words.w}};
      }
    }
  }

  // Stage 2: lane (g, t) gets columns 2 t and 2 t + 1 of rows g (0 and 1) and g + 8 (2 and 3).
  static __device__ __forceinline__ void compute_row(float (&row)[4], const Prefix& prefix,
                                                     const Third& third) {
    constexpr int kProducts = kThreeProducts ? 3 : 1;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const int prefix_part = kThreeProducts && product == 0 ? 1 : 0;
      const int third_part = kThreeProducts && product == 1 ? 1 : 0;
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const uint32_t* words = third.words[third_part] + 2 * k;
        if (product == 0 && k == 0) {
          multiply(row, prefix.steps[prefix_part][k], words[0], words[1]);
        } else {
          multiply_add(row, prefix.steps[prefix_part][k], words[0], words[1]);
        }
      }
    }
  }

  // The lane's pairs of columns, and where in a row whose q are the padded ones the first of them
  // lies; the second follows 64 columns later.
  static __device__ __forceinline__ int row_column(int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    return kQ3 == 8 ? 8 * g + 2 * t : 4 * (g + t / 2 * 8) + t % 2 * 2;
  }
  static __device__ __forceinline__ void own_pairs(float2 (&pairs)[kPairs], const float (&row)[4],
                                                   int lane) {
    if constexpr (kQ3 == 8) {
      pairs[0] = make_float2(row[0], row[1]);
      pairs[1] = make_float2(row[2], row[3]);
    } else {
      const bool lower = lane % 4 >= 2;
      pairs[0] = lower ? make_float2(row[2], row[3]) : make_float2(row[0], row[1]);
    }
  }
};

}  // namespace flowtt::cuda
