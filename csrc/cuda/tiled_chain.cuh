// The chain of rows on one warp's tensor cores, from packed slices to fp32 values.
//
// Stage 1, once a tile of up to four prefixes (i1, i2) with one i2, for each b = j2:
//     P_b (16 x R2) = A (16 x R1) @ G2[i2][:, b, :] (R1 x R2)
//     A stacks the G1 slices: row x + 4 (a % 2) + 8 (a / 2) is row a of prefix x, so that a lane's
//     four sums belong to one prefix.
// Stage 2, once a distinct id:
//     row (16 x Q3) = P_x (16 x R2) @ G3[i3] (R2 x Q3)
//     Row 4 a + b of P_x is (j1, j2) = (a, b): the result lies as the table's row does.
//
// Between the stages P_x lies in shared memory as A operands of m16n8k16: one 16-byte vector a lane
// and step, written and read in one instruction. The summed indices are permuted when the cores
// are packed (tiled_slice_layout.cuh), so that the sums of stage 1, rounded, are those vectors.
//
// With three products an operand is x = high + low, and high high + high low + low high is summed.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// Of the four b of a slice of core 2, the first kHeld stay in registers from tile to tile; the
// others are read again for each tile, from the L1 cache as a rule, and so is the low part.
template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, int kHeld>
struct TiledChain {
  static constexpr int kSteps1 = kRank1 / 16;
  static constexpr int kSteps2 = kRank2 / 16;
  static constexpr int kWords1 = kRank1 / 8;  // words of a lane's vector of summed index 1
  static constexpr int kWords2 = kRank2 / 8;
  static constexpr int kTiles = kRank2 / 8;  // n-tiles of a P_b
  static constexpr int kParts = kThreeProducts ? 2 : 1;
  static constexpr bool kHolds = kHeld > 0;
  // Bytes of packed slices, and of a P_x and of a tile's in one part.
  static constexpr uint32_t kFirstSlice = kMaxTiledQ * kRank1 * sizeof(__half);
  static constexpr uint32_t kSecondSlice = kMaxTiledQ * kRank1 * kRank2 * sizeof(__half);
  static constexpr uint32_t kThirdSlice = kQ3 * kRank2 * sizeof(__half);
  static constexpr uint32_t kPrefixData = kSteps2 * 32 * sizeof(uint4);
  // From one P_x to the next: lanes that write two of them at once meet in no bank.
  static constexpr uint32_t kPrefix = kPrefixData + 64;
  static constexpr uint32_t kPart = kTileLookups * kPrefix;
  static constexpr uint32_t kTile = kParts * kPart;
  // Pairs of neighbouring columns of a row that a lane has: with Q3 = 4 half of the products'
  // columns repeat the other half, and a lane keeps one pair of its two.
  static constexpr int kPairs = kQ3 == 8 ? 2 : 1;

  struct FirstPart {
    uint32_t words[kSteps1][4];
  };
  struct SecondPart {  // of one b
    uint32_t words[kTiles][kWords1];
  };
  struct Second {
    SecondPart parts[kHeld == 0 ? 1 : kHeld];
  };
  struct Third {
    uint32_t words[kParts][kWords2];
  };
  struct Prefix {
    uint32_t words[kParts][kSteps2][4];
  };

  // Which of a tile's prefixes the lane works on in stage 1, and where its words lie in a slice, in
  // bytes.
  static __device__ __forceinline__ uint32_t own_prefix(uint32_t lane) { return lane / 4 % 4; }
  static __device__ __forceinline__ uint32_t first_offset(uint32_t lane) {
    return (lane / 16 * 4 + lane % 4) * 16;
  }
  static __host__ __device__ __forceinline__ constexpr uint32_t second_offset(uint32_t lane) {
    return lane * (kRank1 / 4) * sizeof(__half);
  }
  static __device__ __forceinline__ uint32_t third_offset(uint32_t lane) {
    return (kQ3 == 8 ? lane : lane % 16) * (kRank2 / 4) * sizeof(__half);
  }
  // Where the lane's vector of a P_x lies when stage 2 reads it.
  static __device__ __forceinline__ uint32_t read_offset(uint32_t lane) {
    return lane * sizeof(uint4);
  }

  static __device__ __forceinline__ const char* packed(const TiledWorkspace& workspace, int part,
                                                       uint32_t offset) {
    return reinterpret_cast<const char*>(part == 0 ? workspace.packed_high : workspace.packed_low) +
           offset;
  }

  // `offset`: of the slice plus first_offset, and so on.
  static __device__ __forceinline__ void load_first_part(FirstPart& first,
                                                         const TiledWorkspace& workspace, int part,
                                                         uint32_t offset) {
#pragma unroll
    for (int k = 0; k < kSteps1; ++k) {
      load_words(first.words[k], packed(workspace, part, offset) + k * 128);
    }
  }

  static __device__ __forceinline__ void load_second_part(SecondPart& second,
                                                          const TiledWorkspace& workspace, int part,
                                                          uint32_t offset, int b) {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      load_words(second.words[u],
                 packed(workspace, part, offset) + (b * kTiles + u) * second_offset(32));
    }
  }

  // What the lane holds of a slice; nothing held, the slice's way to the L1 cache begins. `unused`:
  // see touch.
  static __device__ __forceinline__ void load_second(Second& second,
                                                     const TiledWorkspace& workspace,
                                                     uint32_t slice, uint32_t lane,
                                                     uint32_t unused) {
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
      load_second_part(second.parts[b], workspace, 0, slice + second_offset(lane), b);
    }
    if constexpr (kHeld == 0) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        for (uint32_t line = lane * 128; line < kSecondSlice; line += 32 * 128) {
          touch(unused, packed(workspace, part, slice + line));
        }
      }
    }
  }

  static __device__ __forceinline__ void load_third(Third& third, const TiledWorkspace& workspace,
                                                    uint32_t offset) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) load_words(third.words[i], packed(workspace, i, offset));
  }

  // p = or += one product.
  template <bool kStarts>
  static __device__ __forceinline__ void stage1(float (&p)[kTiles][4], const FirstPart& first,
                                                const SecondPart& second) {
#pragma unroll
    for (int k = 0; k < kSteps1; ++k) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        if (kStarts && k == 0) {
          multiply(p[u], first.words[k], second.words[u][2 * k], second.words[u][2 * k + 1]);
        } else {
          multiply_add(p[u], first.words[k], second.words[u][2 * k], second.words[u][2 * k + 1]);
        }
      }
    }
  }

  // Stage 1 of a tile. `first`: high parts of the prefixes' slices; `first_offset`: where those
  // slices start; `offset`: as in load_second.
  template <typename Tile>
  static __device__ __forceinline__ void compute_prefixes(const Tile& tile, uint32_t lane,
                                                          const FirstPart& first,
                                                          const Second& second,
                                                          const TiledWorkspace& workspace,
                                                          uint32_t first_offset, uint32_t offset) {
    // Lane (g, t) writes rows 4 a + b and 4 a + b + 8 of its prefix, a = g / 4, in one vector.
    const uint32_t written = own_prefix(lane) * kPrefix + lane / 16 * 256 + lane % 4 * 16;
    // Read for b, and for the next one as soon as the products with them are under way.
    SecondPart high;
    SecondPart low;
    if constexpr (kHeld == 0) load_second_part(high, workspace, 0, offset, 0);
    FirstPart first_low;
    if constexpr (kThreeProducts) {
      load_second_part(low, workspace, 1, offset, 0);
      load_first_part(first_low, workspace, 1, first_offset);
    }
    // What is held needs the loop unrolled; otherwise that only takes registers and instructions.
#pragma unroll(kHolds ? kMaxTiledQ : 1)
    for (int b = 0; b < kMaxTiledQ; ++b) {
      const SecondPart& second_high = b < kHeld ? second.parts[b < kHeld ? b : 0] : high;
      float p[kTiles][4];
      // In the order in which the operands arrive.
      if constexpr (kThreeProducts) {
        stage1<true>(p, first, low);
        if (b + 1 < kMaxTiledQ) load_second_part(low, workspace, 1, offset, b + 1);
      }
      stage1<!kThreeProducts>(p, first, second_high);
      if constexpr (kThreeProducts) stage1<false>(p, first_low, second_high);
      if (b + 1 < kMaxTiledQ && b + 1 >= kHeld) {
        load_second_part(high, workspace, 0, offset, b + 1);
      }
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const float (&p0)[4] = p[2 * k];
        const float (&p1)[4] = p[2 * k + 1];
        const uint4 high = make_uint4(round_pair(p0[0], p0[1]), round_pair(p0[2], p0[3]),
                                      round_pair(p1[0], p1[1]), round_pair(p1[2], p1[3]));
        const uint32_t vector = written + b * 64 + k * 512;
        tile.store(vector, high);
        if constexpr (kThreeProducts) {
          tile.store(
              vector + kPart,
              make_uint4(residual_pair(p0[0], p0[1], high.x), residual_pair(p0[2], p0[3], high.y),
                         residual_pair(p1[0], p1[1], high.z), residual_pair(p1[2], p1[3], high.w)));
        }
      }
    }
  }

  // `tile`: from read_offset on; `place`: of the prefix in it.
  template <typename Tile>
  static __device__ __forceinline__ void load_prefix(Prefix& prefix, const Tile& tile,
                                                     uint32_t place) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const uint4 v = tile.load(place + i * kPart + k * 512);
        prefix.words[i][k][0] = v.x, prefix.words[i][k][1] = v.y;
        prefix.words[i][k][2] = v.z, prefix.words[i][k][3] = v.w;
      }
    }
  }

  // Leaves a P_x where load_prefix of place 0 finds it.
  template <typename Tile>
  static __device__ __forceinline__ void store_prefix(const Prefix& prefix, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
        const uint32_t (&words)[4] = prefix.words[i][k];
        tile.store(i * kPart + k * 512, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }

  // Stage 2: lane (g, t) gets columns 2 t and 2 t + 1 of rows g (0 and 1) and g + 8 (2 and 3). The
  // products of several rows alternate, so that none waits for the one before it.
  template <int kRows>
  static __device__ __forceinline__ void compute_rows(float (&rows)[kRows][4],
                                                      const Prefix (&prefixes)[kRows],
                                                      const Third (&thirds)[kRows]) {
    constexpr int kProducts = kThreeProducts ? 3 : 1;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const int prefix_part = kThreeProducts && product == 0 ? 1 : 0;
      const int third_part = kThreeProducts && product == 1 ? 1 : 0;
#pragma unroll
      for (int k = 0; k < kSteps2; ++k) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const uint32_t* words = thirds[i].words[third_part] + 2 * k;
          if (product == 0 && k == 0) {
            multiply(rows[i], prefixes[i].words[prefix_part][k], words[0], words[1]);
          } else {
            multiply_add(rows[i], prefixes[i].words[prefix_part][k], words[0], words[1]);
          }
        }
      }
    }
  }

  // The lane's pairs of columns, and where in a row whose q are the padded ones the first of them
  // lies; the second follows 64 columns later.
  static __device__ __forceinline__ uint32_t row_column(uint32_t lane) {
    const uint32_t g = lane / 4;
    const uint32_t t = lane % 4;
    return kQ3 == 8 ? 2 * lane : 4 * (g + t / 2 * 8) + t % 2 * 2;
  }
  static __device__ __forceinline__ void own_pairs(float2 (&pairs)[kPairs], const float (&row)[4],
                                                   uint32_t lane) {
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
