// The two products of the wide kernel on tensor cores. wide_shape.h has the layouts.
//
// Stage 1:  P (16-row tiles of the stacked slices of core 1) x (R1) @ G2[i2] (R1 x q2 R2). A warp
//   keeps a chunk of G2[i2]'s columns in registers, all of R1 deep, and goes through the rows.
//   Chunks stay resident from tile to tile while i2 does, when there are no more than warps.
// Stage 2:  P_x (q1 q2 x R2) @ G3[i3] (R2 x 8 columns), by one warp for each distinct id.
//
// P lies in shared memory as 16-byte units: unit k / 8 of row m = j1 q2 + j2 of prefix x, swizzled
// so that neither the stores of stage 1 nor the loads of stage 2 meet in a bank.

#pragma once

#include "matrix_memory.cuh"
#include "wide_tile.cuh"

namespace flowtt::cuda {

constexpr int kWideWarps = 16;

// What a row's units are exclusive-ored with; units come in groups of 4 `steps`.
__device__ __forceinline__ uint32_t swizzle(int32_t row, int32_t steps) {
  return steps % 2 == 0 ? row & 7 : row >> 1 & 3;
}

// Where things lie in the arena of shared memory, as 32-bit addresses.
struct WideArena {
  uint32_t first;     // stacked slices of core 1
  uint32_t products;  // P
  uint32_t first_part_bytes;
  uint32_t product_part_bytes;
  uint32_t product_bytes;  // of one prefix and part
  int32_t capacity;        // prefixes
};

template <int kSteps, bool kThree>
struct WideProducts {
  static constexpr int kParts = kThree ? 2 : 1;
  static constexpr int kBlocks = kSteps == 1 ? 2 : 1;  // a multiprocessor
  static constexpr int kTiles = kThree ? 2 : 4;  // of 8 columns in a chunk
  static constexpr int kChunksPerGroup = 4 / kTiles;
  // Whether slices of core 3 are loaded a product ahead: where registers allow.
  static constexpr bool kLoadsAhead = !(kThree && kSteps == 4);

  struct Second {
    uint32_t words[kParts][kTiles][kSteps][4];
    uint32_t resident;  // offset of the chunk
  };
  struct Third {
    uint32_t words[kParts][kSteps][4];
  };

  static __device__ __forceinline__ const __half* packed(const TiledWorkspace& workspace,
                                                         int part) {
    return part == 0 ? workspace.packed_high : workspace.packed_low;
  }

  // A warp's share of stage 1: one chunk, and every parts-th tile of rows.
  struct Share {
    int32_t chunks;
    int32_t parts;

    __device__ __forceinline__ explicit Share(const WideShape& shape) {
      chunks = shape.groups * kChunksPerGroup;
      parts = max(1, kWideWarps / chunks);
    }
    __device__ __forceinline__ int32_t count() const { return chunks * parts; }
  };

  static __device__ __forceinline__ void load_second(Second& second,
                                                     const TiledWorkspace& workspace,
                                                     const TiledFeature& feature,
                                                     const WideShape& shape, int32_t i2,
                                                     int32_t chunk) {
    const uint32_t offset = feature.packed[1] + static_cast<uint32_t>(i2) * feature.slice_halves[1] +
                            chunk * kTiles * shape.steps1 * 32 * kVectorHalves;
    if (offset == second.resident) return;
    second.resident = offset;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* source = packed(workspace, i) + offset + lane * kVectorHalves;
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (s >= shape.steps1) continue;
          load_words(second.words[i][u][s],
                     source + (u * shape.steps1 + s) * 32 * kVectorHalves);
        }
      }
    }
  }

  // Rows tile_row .. tile_row + 15 of P, the warp's chunk of columns.
  static __device__ __forceinline__ void stage1_tile(const Second& second, const WideArena& arena,
                                                     const WideShape& shape, int32_t tile_row,
                                                     int32_t prefixes, int32_t chunk) {
    const int lane = threadIdx.x % 32;
    const int32_t row = tile_row + lane % 16;
    const uint32_t row_address = arena.first + row * shape.steps1 * 64;
    const uint32_t flip = (lane / 16 ^ swizzle(row, shape.steps1)) * 16;
    float p[kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= shape.steps1) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t first[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          load_matrices(first[i],
                        row_address + i * arena.first_part_bytes + ((4 * s + 2 * half) * 16 ^ flip));
        }
#pragma unroll
        for (int product = kThree ? 0 : 2; product < 3; ++product) {
#pragma unroll
          for (int u = 0; u < kTiles; ++u) {
            const uint32_t(&b)[4] = second.words[product == 0 ? kParts - 1 : 0][u][s];
            multiply_add(p[u], first[product == 1 ? kParts - 1 : 0], b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
    const int32_t group = chunk / kChunksPerGroup;
    const int32_t j2 = group / shape.steps2;
    const uint32_t unit = group % shape.steps2 * 4 + lane % 4;
    const uint32_t within = chunk % kChunksPerGroup * 8;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int32_t stacked = tile_row + lane / 4 + 8 * lower;
      const int32_t x = stacked >> shape.q1_shift;
      const int32_t j1 = stacked & ((1 << shape.q1_shift) - 1);
      if (x >= prefixes || j1 >= shape.q1) continue;
      const int32_t m = j1 * shape.q2 + j2;
      const uint32_t target = arena.products + (x * shape.rows + m) * shape.steps2 * 64 +
                              (unit ^ swizzle(m, shape.steps2)) * 16 + within;
      uint32_t high[kTiles];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) high[u] = round_pair(p[u][2 * lower], p[u][2 * lower + 1]);
      if constexpr (kThree) {
        store_shared(target, make_uint2(high[0], high[1]));
        store_shared(target + arena.product_part_bytes,
                     make_uint2(residual_pair(p[0][2 * lower], p[0][2 * lower + 1], high[0]),
                                residual_pair(p[1][2 * lower], p[1][2 * lower + 1], high[1])));
      } else {
        store_shared(target, make_uint4(high[0], high[1], high[2], high[3]));
      }
    }
  }

  static __device__ __forceinline__ void stage1(Second& second, const WideTile& tile,
                                                const WideArena& arena, const WideShape& shape,
                                                const TiledWorkspace& workspace,
                                                const TiledFeature& feature) {
    const Share share(shape);
    const int32_t rows = tile.prefixes << shape.q1_shift;
    for (int32_t i = threadIdx.x / 32; i < share.count(); i += kWideWarps) {
      const int32_t chunk = i % share.chunks;
      const int32_t first_row = i / share.chunks * 16;
      if (first_row >= rows) continue;
      load_second(second, workspace, feature, shape, tile.i2, chunk);
      for (int32_t row = first_row; row < rows; row += share.parts * 16) {
        stage1_tile(second, arena, shape, row, tile.prefixes, chunk);
      }
    }
  }

  // Columns 8 tile3 and up of core 3's slice.
  static __device__ __forceinline__ void load_third(Third& third, const TiledWorkspace& workspace,
                                                    const TiledFeature& feature,
                                                    const WideShape& shape, uint32_t i3,
                                                    int32_t tile3) {
    const int lane = threadIdx.x % 32;
    const uint32_t step = shape.columns * 4 * kVectorHalves;
    const uint32_t offset = feature.packed[2] + i3 * feature.slice_halves[2] +
                            tile3 * shape.steps2 * step + lane * kVectorHalves;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (lane < shape.columns * 4 && s < shape.steps2) {
          load_words(third.words[i][s], packed(workspace, i) + offset + s * step);
        } else {
#pragma unroll
          for (int word = 0; word < 4; ++word) third.words[i][s][word] = 0;
        }
      }
    }
  }

  // Rows 16 tile_row and up of a prefix's product, times the slice of core 3.
  static __device__ __forceinline__ void stage2_tile(float (&row)[4], const Third& third,
                                                     const WideArena& arena,
                                                     const WideShape& shape, int32_t x,
                                                     int32_t tile_row) {
    const int lane = threadIdx.x % 32;
    const int32_t m = min(tile_row + lane % 16, shape.rows - 1);
    const uint32_t row_address = arena.products + (x * shape.rows + m) * shape.steps2 * 64;
    const uint32_t flip = (lane / 16 ^ swizzle(m, shape.steps2)) * 16;
    float sums[2][4] = {};  // independent chains
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= shape.steps2) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t p[kParts][4];
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          load_matrices(p[i], row_address + i * arena.product_part_bytes +
                                  ((4 * s + 2 * half) * 16 ^ flip));
        }
        const uint32_t(&b)[4] = third.words[0][s];
        if constexpr (kThree) {
          const uint32_t(&b_low)[4] = third.words[kParts - 1][s];
          multiply_add(sums[1], p[0], b_low[2 * half], b_low[2 * half + 1]);
          multiply_add(sums[1], p[kParts - 1], b[2 * half], b[2 * half + 1]);
          multiply_add(sums[0], p[0], b[2 * half], b[2 * half + 1]);
        } else {
          multiply_add(sums[half], p[0], b[2 * half], b[2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = sums[0][i] + sums[1][i];
  }
};

}  // namespace flowtt::cuda
