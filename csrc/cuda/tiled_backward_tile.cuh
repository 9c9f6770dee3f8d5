// What a block of the backward pass has in shared memory while it works on a tile: up to 32 entries
// (prefixes, or parts of heavy ones) with one i2, four of each warp.
//
// Every operand is read by tensor cores twice or more, in fragments of different orientation. The
// places below let each lane read it as it is needed, in vectors of 16 bytes, without bank
// conflicts, and without moving registers to where the tensor core wants them.

#pragma once

#include "tensor_core.cuh"

namespace flowtt::cuda {

inline constexpr int kBackwardWarps = 8;
inline constexpr int kBackwardThreads = 32 * kBackwardWarps;
// Blocks of a multiprocessor: while the lookups of one wait for their sums to leave, the other
// multiplies.
inline constexpr int kBackwardBlocks = 2;
inline constexpr int kEntriesPerWarp = 4;
inline constexpr int kTileEntries = kBackwardWarps * kEntriesPerWarp;

// q1, q2 and q3, padded.
inline constexpr int kGradientQ = 4;
inline constexpr int kGradientColumns = 8;

// In dynamic shared memory. Vectors of four floats are what tensor cores take, one a lane: of a
// left operand (a) a whole one, of a right operand (b) those of two products. Entry `slot` of warp
// w is number slot * kBackwardWarps + w. kRank: both ranks, padded.
template <int kRank>
struct __align__(128) BackwardTile {
  static_assert(kRank == 16 || kRank == 32);
  static constexpr int kHalves = kRank / 16;
  static constexpr int kProductElements = kGradientQ * kGradientQ * kRank;
  static constexpr int kSecondElements = kRank * kGradientQ * kRank;

  // Of each entry P = G1[i1] G2[i2] first, as operand a of the product that gives dG3, see
  // product_place; then its gradient, [(j1, j2), r2], see gradient_place.
  float products[kTileEntries * kProductElements];
  // G1[i1] of pairs of entries, as operand a of the product that gives dG2, see first_place.
  float first[kTileEntries * kGradientQ * kRank];
  // G2[i2] as operand b of the product that gives P, see SecondVector. That which gives dG1 reads
  // it in pairs, see second_pair.
  float second[kSecondElements];

  // Where P[(j1, j2), r2] of an entry lies: in the vector of lane 4 c + j2, r2 = c + 8 e, the
  // elements e = 2 m and + 1 of rows j1 = 2 k and + 1 for given m and k. Neighbouring lanes hold
  // neighbouring rows of dG3. The permutation of the vectors keeps lanes that write apart.
  static __device__ __forceinline__ uint32_t product_place(uint32_t entry, uint32_t k, uint32_t m,
                                                           uint32_t lane) {
    const uint32_t vector = lane ^ (lane >> 3 & 1) << 1 ^ k;
    return entry * kProductElements + ((k * kHalves + m) * 32 + vector) * 4;
  }

  // Where vector `vector` of row (j1, j2) of the gradient of an entry's P lies. Lines of 32 floats
  // are permuted vectors, so that lanes that read or write the same vector of different rows meet
  // in no bank.
  static __device__ __forceinline__ uint32_t gradient_place(uint32_t entry, uint32_t j1,
                                                            uint32_t j2, uint32_t vector) {
    constexpr uint32_t kRowsOfLine = 32 / kRank;
    const uint32_t line = j2 / kRowsOfLine;
    const uint32_t permutation = 2 * line ^ (j1 & 1) << 2 ^ (j1 >> 1) << 1;
    return ((entry * kGradientQ + j1) * (kGradientQ / kRowsOfLine) + line) * 32 +
           4 * ((j2 % kRowsOfLine * (kRank / 4) + vector) ^ permutation);
  }

  // Where vector `number` of `second` lies, and elements (r1, j2, r2) and (r1 + 1, j2, r2) of
  // G2[i2], r1 even. The permutation keeps lanes that read pairs of different r1 apart.
  static __device__ __forceinline__ uint32_t second_place(uint32_t number) {
    return 4 * (number ^ number / 32 % kHalves << 1);
  }
  static __device__ __forceinline__ uint32_t second_pair(uint32_t r1, uint32_t j2, uint32_t r2) {
    constexpr uint32_t kOwn = kRank / 4;
    const uint32_t c = r2 % 8;
    const uint32_t e = r2 / 8;
    const uint32_t column_tile = (j2 * 2 + c / 4) * kHalves + e / 2;
    const uint32_t lane = 4 * (c % 4 * 2 + e % 2) + r1 / kOwn;
    return second_place((column_tile * kHalves + r1 % kOwn / 4) * 32 + lane) + r1 % 4;
  }

  // Where elements r1 = g + 16 m and g + 16 m + 8 of row j1 lie, of entries 2 pair and then
  // 2 pair + 1: in the vector of lane 4 g + j1.
  static __device__ __forceinline__ uint32_t first_place(uint32_t pair, uint32_t m, uint32_t lane) {
    return ((pair * kHalves + m) * 32 + (lane ^ m << 2)) * 4;
  }
};

// `second` holds, for column tiles of 8 and parts of r1, vectors of lanes 4 g + t: the column
// (j2, r2) of G2[i2] that stands at g, with r2 = c + 8 e as in product_place, at four rows r1.
template <int kRank>
struct SecondVector {
  uint32_t r1;
  uint32_t j2;
  uint32_t r2;

  __device__ __forceinline__ explicit SecondVector(uint32_t number) {
    constexpr uint32_t kHalves = kRank / 16;
    const uint32_t g = number / 4 % 8;
    const uint32_t column_tile = number / 32 / kHalves;
    const uint32_t c = column_tile / kHalves % 2 * 4 + g / 2;
    const uint32_t e = column_tile % kHalves * 2 + g % 2;
    r1 = kRank / 4 * (number % 4) + 4 * (number / 32 % kHalves);
    j2 = column_tile / (2 * kHalves);
    r2 = c + 8 * e;
  }
};

__device__ __forceinline__ float4 load_vector(const float* source) {
  return *reinterpret_cast<const float4*>(source);
}

__device__ __forceinline__ float2 load_pair(const float* source) {
  return *reinterpret_cast<const float2*>(source);
}

__device__ __forceinline__ void store_vector(float* target, float4 vector) {
  *reinterpret_cast<float4*>(target) = vector;
}

__device__ __forceinline__ void store_pair(float* target, float first, float second) {
  *reinterpret_cast<float2*>(target) = make_float2(first, second);
}

// Products of fp32 operands on tensor cores. With one product operands are rounded to TF32 where
// they are stored or loaded; with three each is split into two such numbers.
template <bool kThreeProducts>
struct GradientProduct {
  // An operand as it is kept.
  static __device__ __forceinline__ float operand(float value) {
    // 8193 v, rounded to 24 bits, less 8192 v: v rounded to the 11 bits of TF32. The tensor core
    // would drop the others. Beyond 2^114, where 8193 v overflows, it is not a number.
    if (kThreeProducts) return value;
    return fmaf(value, -8192.0f, fmaf(value, 8192.0f, value));
  }

  // c += a (16 x 8) @ b (8 x 8): a is {row g, row g + 8} x {element t, then element t + 4}.
  static __device__ __forceinline__ void multiply_add(float (&c)[4], const float4& vector, float b0,
                                                      float b1) {
    const float a[4] = {vector.x, vector.y, vector.z, vector.w};
    if constexpr (kThreeProducts) {
      float a_high[4];
      float a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a_high[i] = high(a[i]);
        a_low[i] = a[i] - a_high[i];
      }
      const float b_high[2] = {high(b0), high(b1)};
      multiply_add_tf32(c, a_low, b_high[0], b_high[1]);
      multiply_add_tf32(c, a_high, b0 - b_high[0], b1 - b_high[1]);
      multiply_add_tf32(c, a_high, b_high[0], b_high[1]);
    } else {
      multiply_add_tf32(c, a, b0, b1);
    }
  }

 private:
  static __device__ __forceinline__ float high(float value) {
    return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
  }
};

}  // namespace flowtt::cuda
