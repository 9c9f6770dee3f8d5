// The products of a tile in the backward pass where warps multiply in groups of four: what
// tiled_backward_sums.cuh does by single warps, which each read all of the right operand.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_second_by_group(Ahead& ahead) const {
  using Rows = GroupSecondRows<kRank>;
  const Rows own(threadIdx.x);
  const core_t* const second =
      second_ + slot_.i2() * static_cast<int64_t>(Tile::kSecondElements) + own.element;
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    ahead.second[i] = __ldg(reinterpret_cast<const float4*>(second + Rows::element_step(i)));
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_second_by_group(
    const Ahead& ahead) const {
  using Rows = GroupSecondRows<kRank>;
  const Rows own(threadIdx.x);
  const uint32_t place = hold(own.place);
  const uint32_t rows_place = hold(own.rows_place);
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    const float v[4] = {ahead.second[i].x, ahead.second[i].y, ahead.second[i].z, ahead.second[i].w};
    float columns[4];
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      store_at(tile_.second, Rows::place_at(place, i, n), Product::operand_twice(v[n]));
      columns[n] = Product::operand(v[n]);
    }
    Rows::store_rows(tile_.second_rows, rows_place, i, columns);
  }
  publish_group_operand();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_products_by_group(
    const FirstRows& own_first) const {
  float a[2][kOwnFirst];  // rows g and g + 8
  const uint32_t j1 = g_ % 4;
  const uint32_t first = hold(Group::first_lane(g_ / 4, warp_, j1, t_));
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnFirst; ++i) {
      a[half][i] = Product::operand(own_first.rows[half][i]);
      store_at(tile_.first, Group::first_place(first, i) + half * 2 * Group::kOperandBytes,
               a[half][i]);
    }
    const uint32_t slot = g_ / 4 + 2 * half;
    if (targets_.touched[0] != nullptr && has_entry(slot) && j1 == 0 && t_ == 0) {
      targets_.touched[0][entry(slot).i1] = 1;
    }
  }
  publish_group_operand();
  const uint32_t product =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(j1, t_));
#pragma unroll
  for (uint32_t piece = 0; piece < Group::kProductPieces; ++piece) {
    constexpr uint32_t kTiles = Group::kProductTiles;
    constexpr uint32_t kSteps = Group::kSteps;
    const uint32_t columns = shared_address(tile_.second) + Group::second_piece(piece);
    float c[kTiles][4] = {};
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {
      const float left[4] = {a[0][s], a[1][s], a[0][kSteps + s], a[1][kSteps + s]};
      group_multiply_add(c, left, columns + s * kGroupStepBytes);
    }
    finish_group_products();
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
      const uint32_t u = (piece * kTiles + tile) / kHalves;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        store_at(tile_.products,
                 Tile::product_pair_place(product, u, tile % kHalves) +
                     half * 2 * kBackwardWarps * Tile::kEntryBytes,
                 make_float2(c[tile][2 * half], c[tile][2 * half + 1]));
      }
    }
  }
  clear_missing_products();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients_by_group() const {
  float c[kRank / 8][4] = {};  // rows g and g + 8 (slot, j1), columns 2 t and + 1 of each tile
  const uint32_t gradient =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::gradient_place(g_ % 4, 0, t_));
#pragma unroll
  for (uint32_t j2 = 0; j2 < kGradientQ; ++j2) {
    float left[2][4 * kHalves];  // [row g, row g + 8][vectors t and t + 4]
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
#pragma unroll
      for (uint32_t v = 0; v < kHalves; ++v) {
        const float4 vector =
            load_at<float4>(tile_.products, Tile::gradient_place_at(gradient, j2, 4 * v) +
                                                n * 2 * kBackwardWarps * Tile::kEntryBytes);
        left[n][4 * v] = vector.x;
        left[n][4 * v + 1] = vector.y;
        left[n][4 * v + 2] = vector.z;
        left[n][4 * v + 3] = vector.w;
      }
    }
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < Group::kSteps; ++s) {
      const float step[4] = {left[0][s], left[1][s], left[0][Group::kSteps + s],
                             left[1][Group::kSteps + s]};
      group_multiply_add(
          c, step,
          shared_address(tile_.second_rows) + Group::second_rows_step(j2 * Group::kSteps + s));
    }
    finish_group_products();
  }
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    if (!has_entry(slot)) continue;
    float* const row =
        targets_.gradients[0] + (int64_t{entry(slot).i1} * kGradientQ + g_ % 4) * kRank;
    if constexpr (Group::kFirstByVectors) {
      add_vector(row + 4 * t_, make_float4(c[0][2 * half], c[0][2 * half + 1], c[1][2 * half],
                                           c[1][2 * half + 1]));
    } else {
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
        add_pair(row + 2 * t_ + 8 * n, make_float2(c[n][2 * half], c[n][2 * half + 1]));
      }
    }
  }
}

// Of dG2 transposed, see GroupTile::SummedRows and summed_column: tiles of its columns.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient_by_group() const {
  SecondSums sums = {};
  constexpr uint32_t kEntries = Group::kSummedEntries;
  const typename Group::SummedRows rows(warp_, g_);
  const uint32_t gradient =
      hold(Group::summed_entry(warp_, 0, 0) * Tile::kEntryBytes +
           Tile::gradient_place(t_, rows.j2, rows.vector) + g_ % 2 * static_cast<uint32_t>(8));
#pragma unroll
  for (uint32_t slot = 0; slot < kEntriesPerWarp; ++slot) {
    if (slot * kBackwardWarps >= count_) break;
    float2 left[kEntries];
#pragma unroll
    for (uint32_t i = 0; i < kEntries; ++i) {
      left[i] = load_at<float2>(tile_.products,
                                gradient + Group::summed_entry(0, slot, i) * Tile::kEntryBytes);
    }
    const uint32_t first = shared_address(tile_.first) + Group::summed_first(warp_, slot);
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < kEntries / 2; ++s) {
      const float step[4] = {left[2 * s].x, left[2 * s].y, left[2 * s + 1].x, left[2 * s + 1].y};
      group_multiply_add(sums.tiles, step, first + s * kGroupStepBytes);
    }
    finish_group_products();
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient_by_group(
    const SecondSums& sums) const {
  const typename Group::SummedRows rows(warp_, g_);
  float* const target =
      targets_.gradients[1] +
      ((int64_t{slot_.i2()} * kRank + Group::summed_column(t_)) * kGradientQ + rows.j2) * kRank +
      rows.r2;
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      add_pair(target + Group::summed_column_step(n, e) * kGradientQ * kRank,
               make_float2(sums.tiles[n][e], sums.tiles[n][2 + e]));
    }
  }
  if (targets_.touched[1] != nullptr && threadIdx.x == 0) targets_.touched[1][slot_.i2()] = 1;
}

}  // namespace flowtt::cuda
