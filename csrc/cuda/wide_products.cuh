// The two products of the wide kernel on tensor cores. wide_shape.h has the layouts.
//
// Stage 1:  P (16-row tiles of the stacked slices of core 1) x (R) @ G2[i2] (R x q2 R). A warp
//   keeps a chunk of G2[i2]'s columns in registers, all of R deep, and goes through the rows.
//   Chunks stay resident from tile to tile while i2 does, when there are no more than warps.
// Stage 2:  P_x (q1 q2 x R) @ G3[i3] (R x 8 columns), by one warp for each distinct id.
//
// P lies in shared memory as 16-byte units: unit k / 8 of row m = j1 q2 + j2 of prefix x, swizzled
// so that neither the stores of stage 1 nor the loads of stage 2 meet in a bank.

#pragma once

#include "matrix_memory.cuh"
#include "wide_tile.cuh"

namespace flowtt::cuda {

constexpr int kWideWarps = 16;

// What a row's units are exclusive-ored with; units come in groups of 4 kSteps.
template <int kSteps>
__device__ __forceinline__ uint32_t swizzle(int32_t row) {
  return kSteps % 2 == 0 ? row & 7 : row >> 1 & 3;
}

template <int kSteps, bool kThree>
struct WideProducts {
  static constexpr int kParts = kThree ? 2 : 1;
  static constexpr int kBlocks = kSteps == 1 ? 2 : 1;  // a multiprocessor
  static constexpr int kTiles = kThree ? 2 : 4;        // of 8 columns in a chunk
  static constexpr int kChunksPerGroup = 4 / kTiles;
  static constexpr int kRowBytes = kSteps * 64;
  static constexpr int kChunkHalves = kTiles * kSteps * 32 * kVectorHalves;

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

  static __device__ __forceinline__ void load_second(Second& second,
                                                     const TiledWorkspace& workspace,
                                                     uint32_t offset) {
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
          load_words(second.words[i][u][s], source + (u * kSteps + s) * 32 * kVectorHalves);
        }
      }
    }
  }

  // `row_address` and `flip` are the lane's row of the tile and its swizzle; see load_matrices.
  template <int kMatrixParts>
  static __device__ __forceinline__ void load_step(uint32_t (&words)[kMatrixParts][4], int step,
                                                   uint32_t row_address, uint32_t flip,
                                                   uint32_t part_bytes) {
#pragma unroll
    for (int i = 0; i < kMatrixParts; ++i) {
      load_matrices(words[i], row_address + i * part_bytes + (step * 32 ^ flip));
    }
  }

  // Rows tile_row .. tile_row + 15 of P, the warp's chunk of columns.
  static __device__ __forceinline__ void stage1_tile(const Second& second, const WideArena& arena,
                                                     int32_t tile_row, int32_t prefixes, int32_t j2,
                                                     uint32_t unit, uint32_t within) {
    const int lane = threadIdx.x % 32;
    const int32_t row = tile_row + lane % 16;
    const uint32_t row_address = arena.first + row * kRowBytes;
    const uint32_t flip = (lane / 16 ^ swizzle<kSteps>(row)) * 16;
    float p[kTiles][4] = {};
    uint32_t first[2][kParts][4];  // this step's and the next one's
    load_step(first[0], 0, row_address, flip, arena.first_part_bytes);
#pragma unroll
    for (int step = 0; step < 2 * kSteps; ++step) {
      if (step + 1 < 2 * kSteps) {
        load_step(first[(step + 1) % 2], step + 1, row_address, flip, arena.first_part_bytes);
      }
#pragma unroll
      for (int product = kThree ? 0 : 2; product < 3; ++product) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const uint32_t (&b)[4] = second.words[product == 0 ? kParts - 1 : 0][u][step / 2];
          multiply_add(p[u], first[step % 2][product == 1 ? kParts - 1 : 0], b[step % 2 * 2],
                       b[step % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int32_t stacked = tile_row + lane / 4 + 8 * lower;
      const int32_t x = stacked >> arena.q1_shift;
      const int32_t j1 = stacked & ((1 << arena.q1_shift) - 1);
      if (x >= prefixes || j1 >= arena.q1) continue;
      const int32_t m = j1 * arena.q2 + j2;
      const uint32_t target = arena.products + x * arena.product_bytes + m * kRowBytes +
                              (unit ^ swizzle<kSteps>(m)) * 16 + within;
      uint32_t high[kTiles];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) high[u] = round_pair(p[u][2 * lower], p[u][2 * lower + 1]);
      if constexpr (kThree) {
        store_shared_pair(target, make_uint2(high[0], high[1]));
        store_shared_pair(target + arena.product_part_bytes,
                          make_uint2(residual_pair(p[0][2 * lower], p[0][2 * lower + 1], high[0]),
                                     residual_pair(p[1][2 * lower], p[1][2 * lower + 1], high[1])));
      } else {
        store_shared_vector(target, make_uint4(high[0], high[1], high[2], high[3]));
      }
    }
  }

  // Chunks of a tile, and the warps that share one by taking every parts-th tile of rows.
  struct Share {
    int32_t chunks;
    int32_t parts;

    __device__ __forceinline__ explicit Share(int32_t q2) {
      chunks = q2 * kSteps * kChunksPerGroup;
      parts = max(1, kWideWarps / chunks);
    }
    __device__ __forceinline__ int32_t count() const { return chunks * parts; }
  };

  // Loads the first chunk that a warp will need for this slice of core 2.
  static __device__ __forceinline__ void load_first_chunk(Second& second,
                                                          const TiledWorkspace& workspace,
                                                          int32_t q2, uint32_t slice_offset) {
    const Share share(q2);
    const int32_t warp = threadIdx.x / 32;
    if (warp < share.count()) {
      load_second(second, workspace, slice_offset + warp % share.chunks * kChunkHalves);
    }
  }

  static __device__ __forceinline__ void stage1(Second& second, const WideTile& tile,
                                                const WideArena& arena,
                                                const TiledWorkspace& workspace) {
    const Share share(arena.q2);
    const int32_t rows = tile.prefixes << arena.q1_shift;
    for (int32_t i = threadIdx.x / 32; i < share.count(); i += kWideWarps) {
      const int32_t part = i / share.chunks;
      const int32_t chunk = i - part * share.chunks;
      if (part * 16 >= rows) continue;
      load_second(second, workspace, tile.second_offset + chunk * kChunkHalves);
      const int32_t group = chunk / kChunksPerGroup;
      const int32_t j2 = group / kSteps;
      const uint32_t unit = group % kSteps * 4 + threadIdx.x % 4;
      const uint32_t within = chunk % kChunksPerGroup * 8;
      for (int32_t row = part * 16; row < rows; row += share.parts * 16) {
        stage1_tile(second, arena, row, tile.prefixes, j2, unit, within);
      }
    }
  }

  // `lanes` hold columns of the slice, the others zeros.
  static __device__ __forceinline__ void load_third(Third& third, const TiledWorkspace& workspace,
                                                    uint32_t offset, int32_t lanes) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* source = packed(workspace, i) + offset + lane * kVectorHalves;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (lane < lanes) load_words(third.words[i][s], source + s * lanes * kVectorHalves);
      }
    }
  }

  // Rows 16 tile_row and up of the product at `product`, times the slice of core 3.
  static __device__ __forceinline__ void stage2_tile(float (&row)[4], const Third& third,
                                                     const WideArena& arena, uint32_t product,
                                                     int32_t tile_row) {
    const int lane = threadIdx.x % 32;
    const int32_t m = min(tile_row + lane % 16, arena.rows - 1);
    const uint32_t row_address = product + m * kRowBytes;
    const uint32_t flip = (lane / 16 ^ swizzle<kSteps>(m)) * 16;
    float sums[2][4] = {};  // independent chains
    uint32_t p[2][kParts][4];
    load_step(p[0], 0, row_address, flip, arena.product_part_bytes);
#pragma unroll
    for (int step = 0; step < 2 * kSteps; ++step) {
      if (step + 1 < 2 * kSteps) {
        load_step(p[(step + 1) % 2], step + 1, row_address, flip, arena.product_part_bytes);
      }
      const uint32_t (&a)[kParts][4] = p[step % 2];
      const uint32_t (&b)[4] = third.words[0][step / 2];
      const int pair = step % 2 * 2;
      if constexpr (kThree) {
        const uint32_t (&b_low)[4] = third.words[kParts - 1][step / 2];
        multiply_add(sums[1], a[0], b_low[pair], b_low[pair + 1]);
        multiply_add(sums[0], a[0], b[pair], b[pair + 1]);
        multiply_add(sums[1], a[kParts - 1], b[pair], b[pair + 1]);
      } else {
        multiply_add(sums[step % 2], a[0], b[pair], b[pair + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = sums[0][i] + sums[1][i];
  }
};

}  // namespace flowtt::cuda
