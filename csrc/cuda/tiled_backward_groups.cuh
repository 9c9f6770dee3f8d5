// The products of a tile in the backward pass where warps multiply in groups of four: what
// tiled_backward_sums.cuh does by single warps, which each read all of the right operand.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_second_by_group(
    OwnSecond& loaded) const {
  load_second_rows(loaded, GroupSecondRows(threadIdx.x));
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_second_by_group(
    const OwnSecond& loaded) const {
  const GroupSecondRows own(threadIdx.x);
  const uint32_t place = hold(own.place);
  const uint32_t rows_place = hold(own.rows_place);
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    const float4 v = loaded[i];
    const float columns[4] = {Product::operand(v.x), Product::operand(v.y), Product::operand(v.z),
                              Product::operand(v.w)};
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      store_at(tile_.second, GroupSecondRows::place_at(place, i, n), columns[n]);
      store_at(tile_.second_rows, GroupSecondRows::rows_place_at(rows_place, i, n), columns[n]);
    }
  }
  publish_group_operand();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_first_by_group(
    const FirstRows& own_first) const {
  const uint32_t first = hold(GroupTile::first_lane(g_ / 4, warp_, g_ % 4, t_));
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnFirst; ++i) {
      store_at(tile_.first,
               GroupTile::first_place(first, i / 4, i % 4) + half * 2 * GroupTile::kOperandBytes,
               Product::operand(own_first.rows[half][i]));
    }
  }
  publish_group_operand();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_products_by_group(
    const FirstRows& own_first) const {
  // Rows g and g + 8, elements r1 = 4 t + s and then 16 + 4 t + s.
  float a[2][kOwnFirst];
  const uint32_t j1 = g_ % 4;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnFirst; ++i) {
      a[half][i] = Product::operand(own_first.rows[half][i]);
    }
    const uint32_t slot = g_ / 4 + 2 * half;
    if (targets_.touched[0] != nullptr && has_entry(slot) && j1 == 0 && t_ == 0) {
      targets_.touched[0][entry(slot).i1] = 1;
    }
  }
  store_first_by_group(own_first);
  const uint32_t product =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(j1, t_));
  const auto place_of_pair = [&](uint32_t tile, uint32_t half) {
    return Tile::product_pair_place(product, tile / kHalves, tile % kHalves) +
           half * 2 * kBackwardWarps * Tile::kEntryBytes;
  };
#pragma unroll
  for (uint32_t columns = 0; columns < 2; ++columns) {
    constexpr uint32_t kTiles = 8;
    float c[kTiles][4] = {};
    if (!is_first_step()) {
#pragma unroll
      for (uint32_t tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const float2 before =
              load_at<float2>(tile_.products, place_of_pair(columns * kTiles + tile, half));
          c[tile][2 * half] = before.x;
          c[tile][2 * half + 1] = before.y;
        }
      }
    }
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const float left[4] = {a[0][s], a[1][s], a[0][4 + s], a[1][4 + s]};
      group_multiply_add(c, left,
                         shared_address(tile_.second) + columns * 2 * GroupTile::kOperandBytes, s);
    }
    finish_group_products();
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float2 pair = make_float2(c[tile][2 * half], c[tile][2 * half + 1]);
        store_at(tile_.products, place_of_pair(columns * kTiles + tile, half),
                 is_last_step() ? make_float2(Product::operand(pair.x), Product::operand(pair.y))
                                : pair);
      }
    }
  }
  if (is_last_step()) clear_missing_products();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients_by_group() const {
  float c[4][4] = {};  // rows g and g + 8 (slot, j1), columns r1 = 8 n + 2 t and + 1
  const uint32_t gradient =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::gradient_place(g_ % 4, 0, t_));
#pragma unroll
  for (uint32_t j2 = 0; j2 < kGradientQ; ++j2) {
    float left[2][2][4];  // [row g, row g + 8][r2 = 4 t, 16 + 4 t][r2 + s]
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
#pragma unroll
      for (uint32_t v = 0; v < 2; ++v) {
        const float4 vector =
            load_at<float4>(tile_.products, Tile::gradient_place_at(gradient, j2, 4 * v) +
                                                n * 2 * kBackwardWarps * Tile::kEntryBytes);
        left[n][v][0] = vector.x;
        left[n][v][1] = vector.y;
        left[n][v][2] = vector.z;
        left[n][v][3] = vector.w;
      }
    }
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const float step[4] = {left[0][0][s], left[1][0][s], left[0][1][s], left[1][1][s]};
      group_multiply_add(c, step, shared_address(tile_.second_rows) + j2 * GroupTile::kOperandBytes,
                         s);
    }
    finish_group_products();
  }
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    if (!has_entry(slot)) continue;
    float* const target = gradient_of_core(0) +
                          entry(slot).i1 * static_cast<int64_t>(first_elements()) +
                          g_ % 4 * first_row() + 2 * t_;
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      add_pair(target + 8 * n, make_float2(c[n][2 * half], c[n][2 * half + 1]));
    }
  }
}

// Of dG2 transposed: rows g and g + 8 are r2 = 2 g and + 1 of the warp's 16, columns of tile n are
// r1 = 16 (n / 2) + 4 t + 2 (n % 2) and + 1.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient_by_group() const {
  float c[4][4] = {};
  const uint32_t gradient =
      hold(Tile::gradient_place(t_, warp_ / 2, warp_ % 2 * 4 + g_ / 2) + g_ % 2 * 8);
#pragma unroll
  for (uint32_t slot = 0; slot < kEntriesPerWarp; ++slot) {
    if (slot * kBackwardWarps >= count_) break;
    float2 left[kBackwardWarps];
#pragma unroll
    for (uint32_t i = 0; i < kBackwardWarps; ++i) {
      const uint32_t number = slot * kBackwardWarps + (i ^ slot % 2);  // see first_lane
      left[i] = load_at<float2>(tile_.products, gradient + number * Tile::kEntryBytes);
    }
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const float step[4] = {left[2 * s].x, left[2 * s].y, left[2 * s + 1].x, left[2 * s + 1].y};
      group_multiply_add(c, step, shared_address(tile_.first) + slot * GroupTile::kOperandBytes, s);
    }
    finish_group_products();
  }
  SecondSums sums;
#pragma unroll
  for (uint32_t n = 0; n < 4; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums.columns[n / 2][n % 2][i] = c[n][i];
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient_by_group(
    const SecondSums& sums) const {
  float* const target = gradient_of_core(1) + slot_.i2() * static_cast<int64_t>(second_elements()) +
                        4 * t_ * second_row() + warp_ / 2 * second_columns() + warp_ % 2 * 16 +
                        2 * g_;
#pragma unroll
  for (uint32_t n = 0; n < 4; ++n) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t r1 = 16 * (n / 2) + 2 * (n % 2) + e;
      const float (&tile)[4] = sums.columns[n / 2][n % 2];
      add_pair(target + r1 * second_row(), make_float2(tile[e], tile[2 + e]));
    }
  }
  if (targets_.touched[1] != nullptr && threadIdx.x == 0) targets_.touched[1][slot_.i2()] = 1;
}

}  // namespace flowtt::cuda
