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
inline constexpr int kEntriesPerWarp = 4;
inline constexpr int kTileEntries = kBackwardWarps * kEntriesPerWarp;
// Lookups of an entry, at most: a heavy prefix is several, of any warps. Each lane of a warp looks
// after one of its lookups.
inline constexpr int kEntryLookups = 32 / kEntriesPerWarp;

// q1, q2 and q3, padded.
inline constexpr int kGradientQ = 4;
inline constexpr int kGradientColumns = 8;

// What the planning launch writes and the other reads, in device memory. Lookups of the range are
// numbered; from kCountShift on a word has how many follow each other from a number on.
inline constexpr uint32_t kCountShift = 24;

// In GradientLookup::third: the entry has no more lookups of this id.
inline constexpr uint32_t kLastOfId = 0x80000000u;

// Those of an entry follow each other, equal ids together. As large as a GroupedLookup, in whose
// place it is written.
struct __align__(16) GradientLookup {
  uint32_t row;    // of grad_output
  uint32_t third;  // i3, perhaps | kLastOfId
  float factor;
  uint32_t unused;
};

// A prefix, or a part of a heavy one; those of a tile follow each other.
struct __align__(8) GradientEntry {
  uint32_t lookups;
  uint32_t i1;
};

struct __align__(8) GradientTile {
  uint32_t entries;
  uint32_t second;  // i2 | feature of the group << 16
};

// Tiles come in classes, those that take longest first: what is left for the end, when blocks have
// to wait for the last one, is short. An entry costs 1 for each lookup and 2 for each distinct id,
// which is what a warp takes for them. Tiles of hot ids, which cost up to twice what full ones of
// others do, are not a class of their own: they do little but read rows, and take turns with those
// that multiply.
inline constexpr uint32_t kTileClasses = 6;
inline constexpr int64_t kMaxLookupCost = 3;

// The least cost of a class.
constexpr uint32_t tile_class_cost(uint32_t tile_class) {
  constexpr uint32_t kCosts[kTileClasses] = {180, 140, 100, 60, 30, 0};
  return kCosts[tile_class];
}

__device__ __forceinline__ uint32_t tile_class(uint32_t cost) {
  uint32_t found = 0;
#pragma unroll
  for (uint32_t i = 0; i + 1 < kTileClasses; ++i) found += cost < tile_class_cost(i);
  return found;
}

// Where the tiles of a class start, if there are so many lookups: there cannot be more of each than
// their cost allows. kTileClasses: where the last class ends.
constexpr int64_t first_tile_of_class(int64_t lookups, uint32_t tile_class) {
  int64_t first = 0;
  for (uint32_t i = 0; i < tile_class; ++i) {
    const int64_t least = tile_class_cost(i);
    first += least == 0 ? lookups : kMaxLookupCost * lookups / least;
  }
  return first;
}

struct BackwardWork {
  GradientLookup* lookups;
  GradientEntry* entries;
  GradientTile* tiles;
  uint32_t first_tiles[kTileClasses];  // first_tile_of_class
  // Zeros before the planning launch, and again when the gradients are there.
  uint32_t* tile_counts;  // of each class
  uint32_t* left_blocks;  // that have found no more tiles
  uint32_t* taken_tiles;  // beside the first of each block
  uint32_t blocks;        // of every table, see tiled_backward_block.cuh
};

// The rank in its tile of the entry that is in this slot of a warp.
__device__ __forceinline__ uint32_t entry_of_warp(uint32_t warp, uint32_t slot) {
  return slot * kBackwardWarps + (slot % 2 == 0 ? warp : kBackwardWarps - 1 - warp);
}

// In dynamic shared memory. Vectors of four floats are what tensor cores take, one a lane: of a
// left operand (a) a whole one, of a right operand (b) those of two products. Entry `slot` of warp
// w is number slot * kBackwardWarps + w. kRank: both ranks, padded.
//
// Places are in bytes. Those of a lane are computed once for many accesses, which then differ from
// them by constants: added, or where vectors are permuted, to keep lanes apart, combined by ^. g
// and t are lane / 4 and lane % 4.
template <int kRank>
struct __align__(128) BackwardTile {
  static_assert(kRank == 16 || kRank == 32);
  static constexpr int kHalves = kRank / 16;
  static constexpr int kProductElements = kGradientQ * kGradientQ * kRank;
  static constexpr int kSecondElements = kRank * kGradientQ * kRank;
  static constexpr uint32_t kVectorBytes = 16;
  static constexpr uint32_t kWarpBytes = 32 * kVectorBytes;  // a vector of each lane
  static constexpr uint32_t kEntryBytes = kProductElements * sizeof(float);

  // Of each entry P = G1[i1] G2[i2] first, as operand a of the product that gives dG3; then its
  // gradient.
  float products[kTileEntries * kProductElements];
  // G1[i1] of pairs of entries, as operand a of the product that gives dG2.
  float first[kTileEntries * kGradientQ * kRank];
  // G2[i2] as operand b of the product that gives P. That which gives dG1 reads it in pairs.
  float second[kSecondElements];
  // Of each warp, a row of grad_output, or a sum of some.
  float rows[kBackwardWarps][kGradientQ * kGradientQ * kGradientColumns];

  // P[(j1, j2), r2] of an entry: in the vector of lane 4 c + j2, r2 = c + 8 e, the elements
  // e = 2 m and + 1 of rows j1 = 2 k and + 1 for given m and k. Neighbouring lanes hold
  // neighbouring rows of dG3.
  static __device__ __forceinline__ uint32_t product_lane(uint32_t lane) {
    return (lane ^ (lane >> 3 & 1) << 1) * kVectorBytes;
  }
  static __device__ __forceinline__ uint32_t product_place(uint32_t lane_place, uint32_t k,
                                                           uint32_t m) {
    return (k * kHalves + m) * kWarpBytes + (lane_place ^ k * kVectorBytes);
  }
  // The pair of elements e of row (j1, j2 = u / 2) at r2 = c + 8 e, c = u % 2 * 4 + t.
  static __device__ __forceinline__ uint32_t product_pair_lane(uint32_t j1, uint32_t t) {
    const uint32_t k = j1 / 2;
    return k * kHalves * kWarpBytes + (4 * t + (t / 2 * 2 ^ k)) * kVectorBytes + j1 % 2 * 8;
  }
  static __device__ __forceinline__ uint32_t product_pair_place(uint32_t lane_place, uint32_t u,
                                                                uint32_t m) {
    return m * kWarpBytes + u % 2 * (kWarpBytes / 2) + (lane_place ^ u / 2 * kVectorBytes);
  }

  // The gradient of an entry's P, [(j1, j2), r2]: vector `vector` of a row. Lines of 128 bytes are
  // permuted vectors.
  static constexpr uint32_t kRowsOfLine = 32 / kRank;
  static constexpr uint32_t kLines = kGradientQ / kRowsOfLine;  // of a j1
  static constexpr uint32_t kLineBytes = 128;
  static __device__ __forceinline__ uint32_t gradient_place(uint32_t j1, uint32_t j2,
                                                            uint32_t vector) {
    return gradient_line(j1, j2) +
           ((j2 % kRowsOfLine * (kRank / 4) + vector) ^ gradient_permutation(j1, j2)) *
               kVectorBytes;
  }
  // That place differs from the one at j2 = 0 and vector % 4, and from that at j1 % 2 and vector %
  // 2, by these.
  static __device__ __forceinline__ uint32_t gradient_place_at(uint32_t lane_place, uint32_t j2,
                                                               uint32_t vectors) {
    return gradient_line(0, j2) + (lane_place ^ ((j2 % kRowsOfLine * (kRank / 4) + vectors) ^
                                                 gradient_permutation(0, j2)) *
                                                    kVectorBytes);
  }
  static __device__ __forceinline__ uint32_t gradient_place_of(uint32_t lane_place, uint32_t half,
                                                               uint32_t vectors) {
    return gradient_line(2 * half, 0) +
           (lane_place ^ (vectors ^ gradient_permutation(2 * half, 0)) * kVectorBytes);
  }

  // Of `second`, the vectors of part `half` of r1 of a column tile.
  static __device__ __forceinline__ uint32_t second_place(uint32_t lane_place, uint32_t column_tile,
                                                          uint32_t half) {
    return (column_tile * kHalves + half) * kWarpBytes +
           (lane_place ^ second_permutation(column_tile / kHalves, half) * kVectorBytes);
  }
  // Elements (r1, j2, r2) and (r1 + 1, j2, r2) of G2[i2], r1 = 16 m + 2 g, r2 = 16 v + 4 t + i.
  static __device__ __forceinline__ uint32_t second_pair_lane(uint32_t g, uint32_t t) {
    const uint32_t half = kHalves == 2 ? g % 4 / 2 : 0;
    const uint32_t quarter = kHalves == 2 ? g / 4 : g / 2;
    return (t % 2 * kHalves * kHalves + half) * kWarpBytes +
           ((t / 2 * 4 + quarter) ^ second_permutation(t, half)) * kVectorBytes + g % 2 * 8;
  }
  static __device__ __forceinline__ uint32_t second_pair_place(uint32_t lane_place, uint32_t m,
                                                               uint32_t j2, uint32_t v,
                                                               uint32_t i) {
    return (j2 * 2 * kHalves + v) * kHalves * kWarpBytes + i * 8 * kVectorBytes +
           (lane_place ^ m * 2 * kVectorBytes);
  }

  // Elements r1 = g + 16 m and g + 16 m + 8 of row j1 of `first`, of one and then the other of
  // entries 2 pair and 2 pair + 1: in the vector of lane 4 g + j1. Which is first alternates from
  // one slot of the warps to the next where lanes that write for two slots would meet in banks.
  static __device__ __forceinline__ uint32_t first_lane(uint32_t lane) {
    return (kHalves == 1 ? lane ^ lane >> 4 << 2 : lane) * kVectorBytes;
  }
  static __device__ __forceinline__ uint32_t first_place(uint32_t lane_place, uint32_t pair,
                                                         uint32_t m) {
    return (pair * kHalves + m) * kWarpBytes + (lane_place ^ m * 4 * kVectorBytes);
  }
  // 1 if the odd one of the pair of `entry` comes first.
  static __device__ __forceinline__ uint32_t odd_is_first(uint32_t entry) {
    return kHalves == 2 ? entry / kBackwardWarps % 2 : 0;
  }
  // Element r1 = kRank / 4 * t + i of row j1 of an entry.
  static __device__ __forceinline__ uint32_t first_element_lane(uint32_t entry, uint32_t j1,
                                                                uint32_t t) {
    const uint32_t r1 = kRank / 4 * t;
    return first_place(first_lane(4 * (r1 % 8) + j1), entry / 2, r1 / 16) +
           ((entry % 2 ^ odd_is_first(entry)) * 2 + r1 / 8 % 2) * sizeof(float);
  }
  static __device__ __forceinline__ uint32_t first_element_place(uint32_t lane_place, uint32_t i) {
    return lane_place ^ i * 4 * kVectorBytes;
  }

 private:
  static constexpr __device__ __forceinline__ uint32_t gradient_line(uint32_t j1, uint32_t j2) {
    return (j1 * kLines + j2 / kRowsOfLine) * kLineBytes;
  }
  static constexpr __device__ __forceinline__ uint32_t gradient_permutation(uint32_t j1,
                                                                            uint32_t j2) {
    return 2 * (j2 / kRowsOfLine) ^ (j1 & 1) << 2 ^ (j1 >> 1) << 1;
  }
  // Of neighbouring products u and parts of r1: lanes that read pairs of them meet in no bank.
  static constexpr __device__ __forceinline__ uint32_t second_permutation(uint32_t u,
                                                                          uint32_t half) {
    return kHalves == 2 ? half * 2 ^ u % 2 : u % 2 * 2;
  }
};

// `second` holds, for column tiles of 8 and parts of r1, vectors of lanes 4 g + t: the column
// (j2, r2) of G2[i2] that stands at g, with r2 = c + 8 e as for products, at four rows r1.
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

// The vectors of rows of G2[i2] that a thread loads, of a block of 32 x 32 ranks and q2 = 4, and
// where their elements go in `second`: lanes load 64 bytes of a row at a time, of such rows that
// what they store meets in no bank.
struct SecondRows {
  static constexpr int kRank = 32;
  uint32_t row;  // r1
  uint32_t j2;
  uint32_t column;  // r2
  uint32_t place;   // of that element, in bytes

  __device__ __forceinline__ explicit SecondRows(uint32_t thread) {
    const uint32_t v = thread % 4;  // of the vectors of a row
    const uint32_t i = thread / 4 % 4;
    const uint32_t t = thread / 16 % 2 * 2;
    const uint32_t r2_part = thread / 32 % 2;
    j2 = thread / 64;
    row = kRank / 4 * t + i;
    column = 16 * r2_part + 4 * v;
    const uint32_t column_tile = (2 * j2 + v % 2) * 2 + r2_part;
    place = column_tile * 2 * kWarpBytes + ((v / 2 * 4 + t) ^ v % 2) * kVectorBytes + i * 4;
  }
  // From the first vector to vector `step`: 4 and then 8 rows below.
  static constexpr __device__ __forceinline__ uint32_t row_step(uint32_t step) {
    return step % 2 * 4 + step / 2 * 8;
  }
  // Of column `column` of vector `step`.
  static __device__ __forceinline__ uint32_t place_at(uint32_t place, uint32_t step,
                                                      uint32_t column) {
    return (place ^ (step % 2 * 2 + step / 2) * kVectorBytes) + step % 2 * kWarpBytes +
           column * 8 * kVectorBytes;
  }

 private:
  static constexpr uint32_t kVectorBytes = BackwardTile<kRank>::kVectorBytes;
  static constexpr uint32_t kWarpBytes = BackwardTile<kRank>::kWarpBytes;
};

// In shared memory, so many bytes from `base` on.
template <typename T>
__device__ __forceinline__ const T& load_at(const float* base, uint32_t bytes) {
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + bytes);
}
template <typename T>
__device__ __forceinline__ void store_at(float* base, uint32_t bytes, const T& value) {
  *reinterpret_cast<T*>(reinterpret_cast<char*>(base) + bytes) = value;
}

// Products of fp32 operands on tensor cores. With one product operands are rounded to TF32 where
// they are stored or loaded; with three each is split into two such numbers.
template <bool kThreeProducts>
struct GradientProduct {
  // An operand as it is kept. The tensor core drops all bits of it but the 11 of TF32: three
  // eighths to three quarters of what the last of these is worth are added, which makes up for that
  // on average, in one instruction, and leaves infinities and what is not a number.
  static __device__ __forceinline__ float operand(float value) {
    return kThreeProducts ? value : fmaf(value, 0x1.8p-12f, value);
  }
  // The same of an operand whose products are kept as operands themselves, unchanged: rounded for
  // both, as what is added is in proportion to it, and so passes through the product.
  static __device__ __forceinline__ float operand_twice(float value) {
    return kThreeProducts ? value : fmaf(value, 0x1.8p-11f, value);
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

  // c += a (16 x 4) @ b (4 x 8): a is {row g, row g + 8} at element t.
  static __device__ __forceinline__ void multiply_add(float (&c)[4], float2 pair, float b) {
    const float a[2] = {pair.x, pair.y};
    if constexpr (kThreeProducts) {
      const float a_high[2] = {high(a[0]), high(a[1])};
      const float a_low[2] = {a[0] - a_high[0], a[1] - a_high[1]};
      multiply_add_tf32(c, a_low, high(b));
      multiply_add_tf32(c, a_high, b - high(b));
      multiply_add_tf32(c, a_high, high(b));
    } else {
      multiply_add_tf32(c, a, b);
    }
  }

 private:
  static __device__ __forceinline__ float high(float value) {
    return __uint_as_float(__float_as_uint(value) & 0xffffe000u);
  }
};

}  // namespace flowtt::cuda
