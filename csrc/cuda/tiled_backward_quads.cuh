// The products of a tile in the backward pass where warps multiply in groups of four and ranks are
// 16: as tiled_backward_groups.cuh, with operands that lie as QuadTile says.
//
// What becomes an operand of another product, P and dP, is rounded for that as one of its own
// factors is (GradientProduct::operand_twice).

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::store_places()
    const {
  if constexpr (kQuads) {
    const auto store = [&](QuadTile::PlaceWord word, uint32_t first, uint32_t second) {
      tile_.places[word][threadIdx.x] = first | second << 16;
    };
    store(QuadTile::kFirstAndProduct, QuadTile::first_lane(g_ / 4, warp_, g_ % 4, t_),
          entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(g_ % 4, t_));
    const uint32_t entry = entry_number(0) * Tile::kEntryBytes;
    store(QuadTile::kProductAndGradient, entry + Tile::product_lane(lane_),
          entry + QuadTile::gradient_lane(g_ / 4, g_ % 4, t_, 0));
    // Of the slot g / 2 and j1 = g % 2, for dG1. Of the group's first warp in slots 0 and 1, r2 =
    // 2 g and + 1, for dG2.
    store(QuadTile::kSums,
          entry_number(g_ / 2) * Tile::kEntryBytes + QuadTile::gradient_lane(g_ % 2, 0, t_, g_ / 2),
          (t_ / 2 * kBackwardWarps + warp_ / 4 * 4) * Tile::kEntryBytes +
              QuadTile::gradient_lane(t_ % 2, warp_ % 4, g_ % 4, t_ / 2) + g_ / 4 * 256);
    const QuadSecondRows second(threadIdx.x);
    store(QuadTile::kSecond, second.place, second.rows_place);
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_second_of_quads(
    const OwnSecond& loaded) const {
  const uint2 own = places(QuadTile::kSecond);
  const float v[4] = {loaded[0].x, loaded[0].y, loaded[0].z, loaded[0].w};
  float columns[4];
#pragma unroll
  for (uint32_t n = 0; n < 4; ++n) {
    store_at(tile_.second, QuadSecondRows::place_at(own.x, n), Product::operand_twice(v[n]));
    columns[n] = Product::operand(v[n]);
  }
#pragma unroll
  for (uint32_t e = 0; e < 2; ++e) {
    store_at(tile_.second_rows, QuadSecondRows::rows_place_at(own.y, e),
             make_float2(columns[e], columns[2 + e]));
  }
  publish_group_operand();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_products_of_quads(
    const FirstRows& own_first) const {
  float a[2][kOwnFirst];  // rows g and g + 8, r1 = 4 t + i
  const uint2 own = places(QuadTile::kFirstAndProduct);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnFirst; ++i) {
      a[half][i] = Product::operand(own_first.rows[half][i]);
      store_at(tile_.first,
               QuadTile::first_place(own.x, i) + half * QuadTile::kGroups * QuadTile::kOperandBytes,
               a[half][i]);
    }
    const uint32_t slot = g_ / 4 + 2 * half;
    if (targets_.touched[0] != nullptr && has_entry(slot) && g_ % 4 == 0 && t_ == 0) {
      targets_.touched[0][entry(slot).i1] = 1;
    }
  }
  publish_group_operand();
  const uint32_t second = shared_address(tile_.second);
#pragma unroll
  for (uint32_t piece = 0; piece < 2; ++piece) {  // j2 < 2, and the others
    constexpr uint32_t kTiles = 4;
    float c[kTiles][4] = {};
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < 2; ++s) {
      const float left[4] = {a[0][s], a[1][s], a[0][2 + s], a[1][2 + s]};
      group_multiply_add(c, left, second, 2 * piece + s);
    }
    finish_group_products();
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        store_at(tile_.products,
                 Tile::product_pair_place(own.y, piece * kTiles + tile, 0) +
                     half * 2 * kBackwardWarps * Tile::kEntryBytes,
                 make_float2(c[tile][2 * half], c[tile][2 * half + 1]));
      }
    }
  }
  clear_missing_products();
}

// Rows g and g + 8 are j1 = g % 2 and that + 2 of slot g / 2.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients_of_quads() const {
  float c[2][4] = {};  // columns r1 = 4 t to 4 t + 3
  const uint32_t slot = g_ / 2;
  const uint32_t gradient = places(QuadTile::kSums).x;
  constexpr uint32_t kTogether = 4;  // as many vectors as find registers
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {  // of j2
    float4 left[kTogether];
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      left[i] = load_at<float4>(tile_.products,
                                QuadTile::gradient_place(gradient, 2 * half + i / 2, i % 2));
    }
    start_group_products();
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      const float step[4] = {left[i].x, left[i].z, left[i].y, left[i].w};
      group_multiply_add(c, step,
                         shared_address(tile_.second_rows) + half * QuadTile::kOperandBytes, i);
    }
    finish_group_products();
  }
  if (!has_entry(slot)) return;
  float* const target = gradient_of_core(0) +
                        entry(slot).i1 * static_cast<int64_t>(first_elements()) +
                        g_ % 2 * first_row() + 4 * t_;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    add_vector(target + half * 2 * first_row(),
               make_float4(c[0][2 * half], c[0][2 * half + 1], c[1][2 * half], c[1][2 * half + 1]));
  }
}

// Of dG2 transposed, over the group's entries: rows g and g + 8 are r2 = 2 g and + 1 of j2 = the
// warp's number in its group, columns of tile n are r1 = 4 t + 2 n and + 1.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient_of_quads() const {
  float c[2][4] = {};
  const uint32_t gradient = places(QuadTile::kSums).y;
  const uint32_t first = shared_address(tile_.first) + warp_ / 4 * QuadTile::kOperandBytes;
#pragma unroll
  for (uint32_t slot = 0; slot < kEntriesPerWarp; slot += 2) {
    if (slot * kBackwardWarps >= count_) break;
    float4 left[4];
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      left[s] = load_at<float4>(tile_.products,
                                gradient + (slot * kBackwardWarps + s) * Tile::kEntryBytes);
    }
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const float step[4] = {left[s].x, left[s].y, left[s].z, left[s].w};
      group_multiply_add(c, step, first + slot / 2 * QuadTile::kGroups * QuadTile::kOperandBytes,
                         s);
    }
    finish_group_products();
  }
  SecondSums sums;
#pragma unroll
  for (uint32_t n = 0; n < 2; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums.columns[n][0][i] = c[n][i];
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient_of_quads(
    const SecondSums& sums) const {
  float* const target = gradient_of_core(1) + slot_.i2() * static_cast<int64_t>(second_elements()) +
                        4 * t_ * second_row() + warp_ % 4 * second_columns() + 2 * g_;
#pragma unroll
  for (uint32_t n = 0; n < 2; ++n) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const float (&tile)[4] = sums.columns[n][0];
      add_pair(target + (2 * n + e) * second_row(), make_float2(tile[e], tile[2 + e]));
    }
  }
  if (targets_.touched[1] != nullptr && threadIdx.x == 0) targets_.touched[1][slot_.i2()] = 1;
}

}  // namespace flowtt::cuda
