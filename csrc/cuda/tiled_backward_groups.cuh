// The products of a tile in the backward pass where warps multiply in groups of four: what
// tiled_backward_sums.cuh does by single warps, which each read all of the right operand.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::store_places()
    const {
  if constexpr (kQuads) {
    const auto store = [&](PlaceWord word, uint32_t first, uint32_t second) {
      tile_.places[word][threadIdx.x] = first | second << 16;
    };
    store(kFirstAndProduct, Group::first_lane(g_ / 4, warp_, g_ % 4, t_),
          entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(g_ % 4, t_));
    store(kProductAndGradient, Tile::product_lane(lane_),
          Group::gradient_lane(g_ / 4, g_ % 4, t_, 0));
    const uint32_t row = warp_ * static_cast<uint32_t>(sizeof(tile_.rows[0]));
    store(kRowAndRow, row + lane_ * 4, row + t_ * 16 + g_ % 4 * 4);
    // Of the slot g / 2 and j1 = g % 2, for dG1. Of the group's first warp in slots 0 and 1, r2 =
    // 2 g and + 1, for dG2.
    store(kSums,
          entry_number(g_ / 2) * Tile::kEntryBytes + Group::gradient_lane(g_ % 2, 0, t_, g_ / 2),
          (t_ / 2 * kBackwardWarps + warp_ / 4 * 4) * Tile::kEntryBytes +
              Group::gradient_lane(t_ % 2, warp_ % 4, g_ % 4, t_ / 2) + g_ / 4 * 256);
    const GroupSecondRows<kRank> second(threadIdx.x);
    store(kSecond, second.place, second.rows_place);
  }
}

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
  uint32_t place;
  uint32_t rows_place;
  if constexpr (kQuads) {
    const uint2 own = places(kSecond);
    place = own.x;
    rows_place = own.y;
  } else {
    const Rows own(threadIdx.x);
    place = hold(own.place);
    rows_place = hold(own.rows_place);
  }
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
  uint32_t first;
  uint32_t product;
  if constexpr (kQuads) {
    const uint2 own = places(kFirstAndProduct);
    first = own.x;
    product = own.y;
  } else {
    first = hold(Group::first_lane(g_ / 4, warp_, j1, t_));
    product = hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(j1, t_));
  }
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
  constexpr uint32_t kTiles = Group::kPieceTiles;
  const uint32_t second = group_operand(tile_.second);
  constexpr int kUnrolled = kRank == 16 ? 1 : 2;  // for want of registers
#pragma unroll kUnrolled
  for (uint32_t piece = 0; piece < kGradientQ * kRank / 8 / kTiles; ++piece) {
    float c[kTiles][4];
    start_group_products();
#pragma unroll
    for (uint32_t s = 0; s < kRank / 8; ++s) {
      const float left[4] = {a[0][s], a[1][s], a[0][kRank / 8 + s], a[1][kRank / 8 + s]};
      const uint32_t step = Group::piece_place(piece) + s * kGroupStepBytes;
      group_multiply_add(s > 0, c, left, second, step);
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
  if constexpr (kRank == 16) return add_first_gradients_of_quads();
  float c[4][4];  // rows g and g + 8 (slot, j1), columns r1 = 8 n + 2 t and + 1
  const uint32_t gradient =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::gradient_place(g_ % 4, 0, t_));
  const uint32_t second = group_operand(tile_.second_rows);
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
      group_multiply_add(j2 + s > 0, c, step, second,
                         j2 * Group::kOperandBytes + s * kGroupStepBytes);
    }
    finish_group_products();
  }
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    if (!has_entry(slot)) continue;
    float* const target =
        targets_.gradients[0] + (int64_t{entry(slot).i1} * kGradientQ + g_ % 4) * kRank + 2 * t_;
#pragma unroll
    for (uint32_t n = 0; n < 4; ++n) {
      add_pair(target + 8 * n, make_float2(c[n][2 * half], c[n][2 * half + 1]));
    }
  }
}

// Rows g and g + 8 are j1 = g % 2 and that + 2 of slot g / 2.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients_of_quads() const {
  float c[2][4] = {};  // columns r1 = 4 t to 4 t + 3
  const uint32_t slot = g_ / 2;
  const uint32_t b = g_ % 2;
  const uint32_t gradient = places(kSums).x;
  const uint32_t second = group_operand(tile_.second_rows);
  constexpr uint32_t kTogether = 4;  // as many vectors as find registers
#pragma unroll
  for (uint32_t first = 0; first < 2 * kGradientQ; first += kTogether) {
    float4 left[kTogether];
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      left[i] =
          load_at<float4>(tile_.products, Group::gradient_place(gradient, (first + i) / 2, i % 2));
    }
    start_group_products();
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      const float step[4] = {left[i].x, left[i].z, left[i].y, left[i].w};
      group_multiply_add(true, c, step, second,
                         (first + i) / 4 * Group::kOperandBytes + i % 4 * kGroupStepBytes);
    }
    finish_group_products();
  }
  if (!has_entry(slot)) return;
  float* const target =
      targets_.gradients[0] + (int64_t{entry(slot).i1} * kGradientQ + b) * kRank + 4 * t_;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    add_vector(target + half * 2 * kRank,
               make_float4(c[0][2 * half], c[0][2 * half + 1], c[1][2 * half], c[1][2 * half + 1]));
  }
}

// Of dG2 transposed. Rank 32: rows g and g + 8 are r2 = 2 g and + 1 of the warp's 16, columns of
// tile n are r1 = 16 (n / 2) + 4 t + 2 (n % 2) and + 1; rank 16: columns are r1 = 4 t + 2 n and
// + 1, over the group's entries.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient_by_group() const {
  if constexpr (kRank == 16) return sum_second_gradient_of_quads();
  SecondSums sums = {};
  const uint32_t gradient =
      hold(Tile::gradient_place(t_, warp_ / 2, warp_ % 2 * 4 + g_ / 2) + g_ % 2 * 8);
  const uint32_t first = group_operand(tile_.first);
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
      group_multiply_add(true, sums.tiles, step, first,
                         slot * Group::kOperandBytes + s * kGroupStepBytes);
    }
    finish_group_products();
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient_of_quads() const {
  SecondSums sums = {};
  const uint32_t group = warp_ / 4;
  const uint32_t gradient = places(kSums).y;
  const uint32_t first =
      __shfl_sync(kAllLanes, group_operand(tile_.first) + group * (Group::kOperandBytes / 16), 0);
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
      group_multiply_add(true, sums.tiles, step, first,
                         slot / 2 * Group::kGroups * Group::kOperandBytes + s * kGroupStepBytes);
    }
    finish_group_products();
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient_by_group(
    const SecondSums& sums) const {
  const uint32_t j2 = kRank == 32 ? warp_ / 2 : warp_ % 4;
  const uint32_t r2 = kRank == 32 ? warp_ % 2 * 16 + 2 * g_ : 2 * g_;
  float* const target = targets_.gradients[1] +
                        ((int64_t{slot_.i2()} * kRank + 4 * t_) * kGradientQ + j2) * kRank + r2;
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t r1 = 16 * (n / 2) + 2 * (n % 2) + e;
      add_pair(target + r1 * kGradientQ * kRank,
               make_float2(sums.tiles[n][e], sums.tiles[n][2 + e]));
    }
  }
  if (targets_.touched[1] != nullptr && threadIdx.x == 0) targets_.touched[1][slot_.i2()] = 1;
}

}  // namespace flowtt::cuda
