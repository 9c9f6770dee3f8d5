// The backward pass, a tile at a time: P = G1[i1] G2[i2] before its lookups are worked on, and then
// dG1[i1] += dP G2[i2]^T and dG2[i2] += G1[i1]^T dP.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_products(
    const FirstRows& own_first) const {
  if constexpr (kQuads) return compute_products_of_quads(own_first);
  if constexpr (kGrouped) return compute_products_by_group(own_first);
  if constexpr (kTwoCores) return load_products();
  const uint32_t j1 = g_ % 4;
  const uint32_t number = entry_number(g_ / 4);  // and that of the slot after the next
  constexpr uint32_t kTwoSlots = 2 * kBackwardWarps;
  float a[2][kOwnFirst];
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
  store_first(own_first);
  const uint32_t second = hold(lane_ * Tile::kVectorBytes);
  const uint32_t product = hold(number * Tile::kEntryBytes + Tile::product_pair_lane(j1, t_));
  const auto place_of_pair = [&](uint32_t u, uint32_t m, uint32_t half) {
    return Tile::product_pair_place(product, u, m) + half * kTwoSlots * Tile::kEntryBytes;
  };
#pragma unroll
  for (uint32_t u = 0; u < 8; ++u) {
    float c[kHalves][4] = {};
    if (!is_first_step()) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          const float2 before = load_at<float2>(tile_.products, place_of_pair(u, m, half));
          c[m][2 * half] = before.x;
          c[m][2 * half + 1] = before.y;
        }
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kHalves; ++n) {
#pragma unroll
      for (uint32_t half = 0; half < kHalves; ++half) {
        const float4 b =
            load_at<float4>(tile_.second, Tile::second_place(second, u * kHalves + n, half));
        const uint32_t i = 4 * half;
        Product::multiply_add(c[n], make_float4(a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]), b.x,
                              b.y);
        Product::multiply_add(c[n], make_float4(a[0][i + 2], a[1][i + 2], a[0][i + 3], a[1][i + 3]),
                              b.z, b.w);
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        const float2 pair = make_float2(c[m][2 * half], c[m][2 * half + 1]);
        store_at(tile_.products, place_of_pair(u, m, half),
                 is_last_step() ? make_float2(Product::operand(pair.x), Product::operand(pair.y))
                                : pair);
      }
    }
  }
  if (is_last_step()) clear_missing_products();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::clear_missing_products() const {
  if (has_entry(kEntriesPerWarp - 1)) return;
  // Rows of zeros times an infinite slice are not zeros.
  __syncwarp();
#pragma unroll 1
  for (uint32_t slot = 0; slot < kEntriesPerWarp; ++slot) {
    if (has_entry(slot)) continue;
#pragma unroll
    for (uint32_t i = 0; i < Tile::kEntryBytes / Tile::kWarpBytes; ++i) {
      store_at(tile_.products,
               entry_number(slot) * Tile::kEntryBytes + i * Tile::kWarpBytes +
                   lane_ * Tile::kVectorBytes,
               make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients() const {
  if constexpr (kQuads) return add_first_gradients_of_quads();
  if constexpr (kGrouped) return add_first_gradients_by_group();
  if constexpr (kTwoCores) return add_product_gradients();
  float c[kHalves][2][4] = {};  // [r1 = 16 m + 2 g and + 1][two slots, columns 2 t and + 1]
  const uint32_t gradient =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::gradient_place(g_ % 4, 0, t_));
  const uint32_t second = hold(Tile::second_pair_lane(g_, t_));
#pragma unroll
  for (uint32_t j2 = 0; j2 < kGradientQ; ++j2) {
#pragma unroll
    for (uint32_t v = 0; v < kHalves; ++v) {
      float4 b[2];
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n) {
        b[n] = load_at<float4>(tile_.products, Tile::gradient_place_at(gradient, j2, 4 * v) +
                                                   n * 2 * kBackwardWarps * Tile::kEntryBytes);
      }
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        float2 a[4];  // r2 = 16 v + 4 t + i
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          a[i] = load_at<float2>(tile_.second, Tile::second_pair_place(second, m, j2, v, i));
        }
        const float4 even = make_float4(a[0].x, a[0].y, a[1].x, a[1].y);
        const float4 odd = make_float4(a[2].x, a[2].y, a[3].x, a[3].y);
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n) {
          Product::multiply_add(c[m][n], even, b[n].x, b[n].y);
          Product::multiply_add(c[m][n], odd, b[n].z, b[n].w);
        }
      }
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < 2; ++n) {
    const uint32_t slot = 2 * n + t_ / 2;
    if (!has_entry(slot)) continue;
    const uint32_t j1 = t_ % 2 * 2;
    const uint32_t r1 = 2 * g_;
    float* const target = gradient_of_core(0) +
                          entry(slot).i1 * static_cast<int64_t>(first_elements()) +
                          j1 * first_row() + r1;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      if (!kExact && j1 + i >= q1_) continue;
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        add(target + i * first_row() + 16 * m, c[m][n][i], c[m][n][i + 2],
            kExact || r1 + 16 * m < r1_, kExact || r1 + 16 * m + 1 < r1_);
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::SecondSums
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient() const {
  if constexpr (kQuads) return sum_second_gradient_of_quads();
  if constexpr (kGrouped) return sum_second_gradient_by_group();
  SecondSums sums = {};
  if constexpr (kTwoCores) return sums;
  const ColumnTile columns(warp_, 0);
  static_assert(kRank / 8 % kOwnColumns == 0, "a warp's columns have one j2");
  uint32_t first = hold(Tile::first_lane(lane_));
  // Element r2 = columns.r2 + g of row (j1 = t, columns.j2).
  uint32_t gradient =
      hold(Tile::gradient_place(t_, columns.j2, (columns.r2 + g_) / 4) + g_ % 4 * 4);
#pragma unroll 1
  for (uint32_t number = 0; number < count_; number += kBackwardWarps) {
    const uint32_t swap = Tile::odd_is_first(number) * Tile::kEntryBytes;
    const uint32_t gradients[2] = {gradient + swap, gradient + Tile::kEntryBytes - swap};
#pragma unroll
    for (uint32_t pair = 0; pair < kBackwardWarps / 2; ++pair) {
      float4 a[kHalves];
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        a[m] = load_at<float4>(tile_.first, Tile::first_place(first, pair, m));
      }
#pragma unroll
      for (uint32_t n = 0; n < kOwnColumns; ++n) {
        float b[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          b[i] = load_at<float>(tile_.products, Tile::gradient_place_of(gradients[i], 0, 2 * n) +
                                                    2 * pair * Tile::kEntryBytes);
        }
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          Product::multiply_add(sums.columns[n][m], a[m], b[0], b[1]);
        }
      }
    }
    first += Tile::first_place(0, kBackwardWarps / 2, 0);
    gradient += kBackwardWarps * Tile::kEntryBytes;
  }
  return sums;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient(
    const SecondSums& sums) const {
  if constexpr (kQuads) return add_second_gradient_of_quads(sums);
  if constexpr (kGrouped) return add_second_gradient_by_group(sums);
  if constexpr (kTwoCores) return;
  const ColumnTile columns(warp_, 0);
  const uint32_t r2 = columns.r2 + 2 * t_;
  float* const target = gradient_of_core(1) + slot_.i2() * static_cast<int64_t>(second_elements()) +
                        g_ * second_row() + columns.j2 * second_columns() + r2;
#pragma unroll
  for (uint32_t n = 0; n < kOwnColumns; ++n) {
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r1 = 16 * m + 8 * half;
        const bool exists = kExact || (g_ + r1 < r1_ && columns.j2 < q2_);
        add(target + r1 * second_row() + 8 * n, sums.columns[n][m][2 * half],
            sums.columns[n][m][2 * half + 1], exists && (kExact || r2 + 8 * n < r2_),
            exists && (kExact || r2 + 8 * n + 1 < r2_));
      }
    }
  }
  if (targets_.touched[1] != nullptr && threadIdx.x == 0) targets_.touched[1][slot_.i2()] = 1;
}

}  // namespace flowtt::cuda
