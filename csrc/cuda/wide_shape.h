// Sizes of a table as the wide and the two-core kernels see them: ranks in steps of 32, which is
// what one 16-byte vector a lane feeds to the tensor cores, and how packed slices lie.
//
// Packed slices are vectors of 8 halves, one a lane, in the order in which a warp loads them. With
// lane (g, t) = (lane / 4, lane % 4), element e of a vector of summed step s is
//   k(e) = 32 s + 16 (e / 4) + 8 (e / 2 % 2) + 2 t + e % 2
// and the vectors are
//   first   [row j1 < Q1][R / 8]                    natural order (row j1, 8 consecutive elements)
//   second  [group][u < 4][s][lane]                 column 32 (group % S) + 8 (g / 2) + 2 u + g % 2
//                                                   of j2 = group / S
//   third   [tile of 8 columns][s][g < C][t]        column 8 tile + g
//   left    the same with C = 8                     row 8 tile + g of core 1, with two cores
//   right   [tile of 16 columns][s][half][lane]     column 16 tile + 2 g + e / 2 % 2 of core 2 and
//                                                   k = 32 s + 16 half + 8 (e / 4) + 2 t + e % 2

#pragma once

#include "tiled_params.h"

namespace flowtt::cuda {

inline constexpr int32_t kMaxWideRank = 128;
inline constexpr int32_t kMaxWideQ = 8;            // q1 and q2
inline constexpr int32_t kMaxWideColumns = 16;     // q3
inline constexpr int32_t kMaxTwoCoreRows = 64;     // q1
inline constexpr int32_t kMaxTwoCoreColumns = 32;  // q2
inline constexpr int kVectorHalves = 8;

// Which of the layouts above a slice has.
enum class PackedRole : int32_t { kFirst, kSecond, kThird, kLeft, kRight };

// Of three cores (or four, the last two contracted in pairs: suffix_pairs.cuh).
struct WideShape {
  int32_t q1;
  int32_t q2;
  int32_t q3;
  int32_t r1;
  int32_t r2;
  int32_t q1_shift;  // q1 is padded to 2^q1_shift rows
  int32_t steps;     // R1 / 32 and R2 / 32: both ranks are padded to the larger one
  int32_t rows;      // of a prefix product: q1 q2
  int32_t groups;    // of 32 columns of G2[i2]
  int32_t columns;   // C: of a packed tile of core 3
  int32_t tiles3;    // of 8 columns of core 3

  __host__ __device__ explicit WideShape(const TiledFeature& feature) {
    q1 = feature.q[0];
    q2 = feature.q[1];
    q3 = feature.q[2];
    r1 = feature.r[0];
    r2 = feature.r[1];
    q1_shift = q1 > 4 ? 3 : q1 > 2 ? 2 : q1 - 1;
    steps = ((r1 > r2 ? r1 : r2) + 31) / 32;
    rows = q1 * q2;
    groups = q2 * steps;
    columns = q3 > 4 ? 8 : q3 > 2 ? 4 : 2;
    tiles3 = (q3 + 7) / 8;
  }

  __host__ __device__ int32_t vectors(PackedRole role) const {
    switch (role) {
      case PackedRole::kFirst:
        return steps * 4 << q1_shift;
      case PackedRole::kSecond:
        return groups * 4 * steps * 32;
      default:
        return tiles3 * steps * columns * 4;
    }
  }

  // Bytes of shared memory that a prefix takes: its slice of core 1 and its product.
  __host__ __device__ int32_t prefix_bytes(int parts) const {
    return parts * ((steps * 64 << q1_shift) + rows * steps * 64);
  }
};

struct TwoCoreShape {
  int32_t q1;
  int32_t q2;
  int32_t r;
  int32_t steps;        // S: 1, 2 or 4
  int32_t left_tiles;   // of 8 rows of core 1
  int32_t right_tiles;  // of 16 columns of core 2

  __host__ __device__ explicit TwoCoreShape(const TiledFeature& feature) {
    q1 = feature.q[0];
    q2 = feature.q[1];
    r = feature.r[0];
    steps = r > 64 ? 4 : r > 32 ? 2 : 1;
    left_tiles = (q1 + 7) / 8;
    right_tiles = (q2 + 15) / 16;
  }

  __host__ __device__ int32_t vectors(PackedRole role) const {
    return role == PackedRole::kLeft ? left_tiles * steps * 32 : right_tiles * steps * 64;
  }
};

}  // namespace flowtt::cuda
