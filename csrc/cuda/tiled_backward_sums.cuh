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
    store_vector(tile_.second + Tile::second_place(i),
                 make_float4(element(v.r1, v.j2, v.r2), element(v.r1 + 1, v.j2, v.r2),
                             element(v.r1 + 2, v.j2, v.r2), element(v.r1 + 3, v.j2, v.r2)));
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
        const float4 b = load_vector(
            tile_.second + Tile::second_place(((u * kHalves + n) * kHalves + half) * 32 + lane_));
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
        float2 a[4];  // r2 = 16 v + 4 t + i
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          a[i] =
              load_pair(tile_.second + Tile::second_pair(16 * m + 2 * g_, j2, 16 * v + 4 * t_ + i));
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
#pragma unroll 1
  for (uint32_t number = 0; number < count_; number += kBackwardWarps) {
#pragma unroll
    for (uint32_t pair = 0; pair < kBackwardWarps; pair += 2) {
      const uint32_t i = number + pair;
      float4 a[kHalves];
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        a[m] = load_vector(tile_.first + Tile::first_place(i / 2, m, lane_));
      }
#pragma unroll
      for (uint32_t n = 0; n < kOwnColumns; ++n) {
        const ColumnTile columns(warp_, n);
        const uint32_t r2 = columns.r2 + g_;
        const uint32_t element = r2 % 4;
        const float b0 = tile_.products[Tile::gradient_place(i, t_, columns.j2, r2 / 4) + element];
        const float b1 =
            tile_.products[Tile::gradient_place(i + 1, t_, columns.j2, r2 / 4) + element];
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          Product::multiply_add(second_gradient_[n][m], a[m], b0, b1);
        }
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_second_gradient(uint32_t i2) const {
  float* const slice = targets_.gradients[1] + int64_t{i2} * r1_ * q2_ * r2_;
#pragma unroll
  for (uint32_t n = 0; n < kOwnColumns; ++n) {
    const ColumnTile columns(warp_, n);
    const uint32_t r2 = columns.r2 + 2 * t_;
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r1 = g_ + 16 * m + 8 * half;
        const bool exists = r1 < r1_ && columns.j2 < q2_;
        add(slice + (r1 * q2_ + columns.j2) * r2_ + r2, second_gradient_[n][m][2 * half],
            second_gradient_[n][m][2 * half + 1], exists && r2 < r2_, exists && r2 + 1 < r2_);
      }
    }
  }
}

}  // namespace flowtt::cuda
