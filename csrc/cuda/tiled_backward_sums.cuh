// The backward pass, a tile at a time: P = G1[i1] G2[i2] before its lookups are worked on, and then
// dG1[i1] += dP G2[i2]^T and dG2[i2] += G1[i1]^T dP.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_second(
    uint32_t i2) {
  const core_t* const slice = second_ + int64_t{i2} * r1_ * q2_ * r2_;
  const auto element = [&](uint32_t r1, uint32_t j2, uint32_t r2) {
    if (!kExact && (r1 >= r1_ || j2 >= q2_ || r2 >= r2_)) return 0.0f;
    return Product::operand(load(slice + (r1 * q2_ + j2) * r2_ + r2));
  };
  constexpr uint32_t kVectors = Tile::kSecondElements / 4;
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kVectors; i += kBackwardThreads) {
    const SecondVector<kRank> v(i);
    store_vector(tile_.second + 4 * i,
                 make_float4(element(v.r1, v.j2, v.r2), element(v.r1 + 1, v.j2, v.r2),
                             element(v.r1 + 2, v.j2, v.r2), element(v.r1 + 3, v.j2, v.r2)));
  }
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kVectors; i += kBackwardThreads) {
    const TransposedVector<kRank> v(i);
    store_vector(tile_.second_transposed + 4 * i,
                 make_float4(element(v.r1, v.j2, v.r2), element(v.r1 + 1, v.j2, v.r2),
                             element(v.r1, v.j2, v.r2 + 1), element(v.r1 + 1, v.j2, v.r2 + 1)));
  }
  if (threadIdx.x == 0 && targets_.touched[1] != nullptr) targets_.touched[1][i2] = 1;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::compute_products() {
  constexpr uint32_t kOwn = kRank / 4;
  float a[2][kOwn];  // rows g and g + 8, r1 = kOwn t + i
  bool has[2];       // otherwise zeros are stored: 0 times infinity is not a number
  const uint32_t j1 = g_ % 4;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    const bool exists = has_entry(slot);
    has[half] = exists;
    const uint32_t i1 = exists ? entry(slot).y : 0;
    const core_t* const row = first_ + (int64_t{i1} * q1_ + j1) * r1_ + kOwn * t_;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      const uint32_t r1 = kOwn * t_ + i;
      const bool is_there = exists && (kExact || (j1 < q1_ && r1 < r1_));
      a[half][i] = is_there ? Product::operand(load(row + i)) : 0.0f;
      tile_.first[Tile::first_place(entry_number(slot) / 2, r1 / 16, 4 * (r1 % 8) + j1) +
                  warp_ % 2 * 2 + r1 / 8 % 2] = a[half][i];
    }
    if (exists && j1 == 0 && t_ == 0 && targets_.touched[0] != nullptr) {
      targets_.touched[0][i1] = 1;
    }
  }
#pragma unroll
  for (uint32_t u = 0; u < 8; ++u) {
    float c[kHalves][4] = {};
#pragma unroll
    for (uint32_t n = 0; n < kHalves; ++n) {
#pragma unroll
      for (uint32_t half = 0; half < kHalves; ++half) {
        const float4 b =
            load_vector(tile_.second + (((u * kHalves + n) * kHalves + half) * 32 + lane_) * 4);
        const uint32_t i = 4 * half;
        Product::multiply_add(c[n], make_float4(a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]), b.x,
                              b.y);
        Product::multiply_add(c[n], make_float4(a[0][i + 2], a[1][i + 2], a[0][i + 3], a[1][i + 3]),
                              b.z, b.w);
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t number = entry_number(g_ / 4 + 2 * half);
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        store_pair(tile_.products +
                       Tile::product_place(number, j1 / 2, m, 4 * (u % 2 * 4 + t_) + u / 2) +
                       j1 % 2 * 2,
                   has[half] ? Product::operand(c[m][2 * half]) : 0.0f,
                   has[half] ? Product::operand(c[m][2 * half + 1]) : 0.0f);
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_first_gradients() {
  float c[kHalves][2][4] = {};  // [r1 = 16 m + 2 g and + 1][two slots, columns 2 t and + 1]
#pragma unroll
  for (uint32_t j2 = 0; j2 < kGradientQ; ++j2) {
#pragma unroll
    for (uint32_t v = 0; v < kHalves; ++v) {
      float4 b[2];
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n) {
        b[n] = load_vector(tile_.products + Tile::gradient_place(entry_number(g_ / 4 + 2 * n),
                                                                 g_ % 4, j2, 4 * v + t_));
      }
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        const float* const a =
            tile_.second_transposed + (((j2 * kHalves + v) * 2 * kHalves + m) * 32 + lane_) * 4;
        const float4 even = load_vector(a);
        const float4 odd = load_vector(a + kHalves * 32 * 4);
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
    float* const slice = targets_.gradients[0] + int64_t{entry(slot).y} * q1_ * r1_;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t j1 = t_ % 2 * 2 + i;
      if (!kExact && j1 >= q1_) continue;
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        const uint32_t r1 = 16 * m + 2 * g_;
        add(slice + j1 * r1_ + r1, c[m][n][i], c[m][n][i + 2], r1 < r1_, r1 + 1 < r1_);
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::sum_second_gradient() {
  const uint32_t column_tile = warp_ % kColumnTiles;
  const uint32_t j2 = column_tile / (kRank / 8);
  const uint32_t r2 = 8 * (column_tile % (kRank / 8)) + g_;
  constexpr uint32_t kStep = 2 * kBackwardWarps / kColumnTiles;
#pragma unroll 1
  for (uint32_t number = 0; number < count_; number += kBackwardWarps) {
#pragma unroll
    for (uint32_t pair = 0; pair < kBackwardWarps; pair += kStep) {
      const uint32_t i = pair + 2 * (warp_ / kColumnTiles);
      const float b0 = tile_.products[Tile::gradient_place(number + i, t_, j2, r2 / 4) + r2 % 4];
      const float b1 =
          tile_.products[Tile::gradient_place(number + i + 1, t_, j2, r2 / 4) + r2 % 4];
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        Product::multiply_add(
            second_gradient_[m],
            load_vector(tile_.first + Tile::first_place((number + i) / 2, m, lane_)), b0, b1);
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient(uint32_t i2) const {
  const uint32_t column_tile = warp_ % kColumnTiles;
  const uint32_t j2 = column_tile / (kRank / 8);
  const uint32_t r2 = 8 * (column_tile % (kRank / 8)) + 2 * t_;
  float* const slice = targets_.gradients[1] + int64_t{i2} * r1_ * q2_ * r2_;
#pragma unroll
  for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t r1 = g_ + 16 * m + 8 * half;
      const bool exists = r1 < r1_ && j2 < q2_;
      add(slice + (r1 * q2_ + j2) * r2_ + r2, second_gradient_[m][2 * half],
          second_gradient_[m][2 * half + 1], exists && r2 < r2_, exists && r2 + 1 < r2_);
    }
  }
}

}  // namespace flowtt::cuda
