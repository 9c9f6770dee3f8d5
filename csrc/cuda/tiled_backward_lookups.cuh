// The backward pass, lookup by lookup: dG3[i3] += P^T g and dP += g G3[i3]^T. A warp works on the
// lookups of its entries; what the next one needs is on its way meanwhile.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__
    typename TileGradients<core_t, kRank, kThreeProducts, kShape>::RowGradient
    TileGradients<core_t, kRank, kThreeProducts, kShape>::load_gradient(uint32_t row) const {
  RowGradient gradient;
  if constexpr (kPairs) {
    const int64_t offset = row * grad_.row_stride;
    const float* const b = gradient_b_ + offset;
    const float* const a = gradient_a_ + offset;
    const uint32_t row_of_j1 = q2_ * q3_;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const bool is_there = kExact || (i < q1_ && t_ < q2_ && g_ < q3_);
      gradient.b[i] = is_there ? __ldg(b + i * row_of_j1) : 0.0f;
    }
    float2 pairs[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const bool is_there = kExact || (g_ / 4 + 2 * half < q1_ && g_ % 4 < q2_ && 2 * t_ < q3_);
      pairs[half] = make_float2(0.0f, 0.0f);
      if (is_there) {
        pairs[half] = __ldg(reinterpret_cast<const float2*>(a + 2 * half * row_of_j1));
      }
    }
    gradient.a = make_float4(pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y);
  } else {
    const auto element = [&](uint32_t j1, uint32_t j2, uint32_t j3) {
      if (j1 >= q1_ || j2 >= q2_ || j3 >= q3_) return 0.0f;
      const int64_t column = column_ + (j1 * q2_ + j2) * q3_ + j3;
      return load_element<float>(grad_.data, grad_.type,
                                 row * grad_.row_stride + column * grad_.column_stride);
    };
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) gradient.b[i] = element(i, t_, g_);
    const uint32_t j1 = g_ / 4;
    gradient.a = make_float4(element(j1, g_ % 4, 2 * t_), element(j1 + 2, g_ % 4, 2 * t_),
                             element(j1, g_ % 4, 2 * t_ + 1), element(j1 + 2, g_ % 4, 2 * t_ + 1));
  }
  return gradient;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::ThirdSlice
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_third(uint32_t i3) const {
  ThirdSlice slice;
  const core_t* const source = own_third_ + int64_t{i3} * r2_ * q3_;
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    const bool is_there = kExact || (8 * n + g_ < r2_ && 2 * t_ < q3_);
    slice.rows[n] = make_float2(0.0f, 0.0f);
    if constexpr (kPairs && std::is_same_v<core_t, float>) {
      if (is_there) {
        slice.rows[n] = __ldg(reinterpret_cast<const float2*>(source + 8 * n * q3_));
      }
    } else {
      const bool next_is_there = kExact || (is_there && 2 * t_ + 1 < q3_);
      if (is_there) slice.rows[n].x = load(source + 8 * n * q3_);
      if (next_is_there) slice.rows[n].y = load(source + 8 * n * q3_ + 1);
    }
  }
  return slice;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_on_lookups() {
  if (!has_entry(0)) return;
  Fetched next[2];  // used in turn, so that nothing is moved
  uint32_t lookup = entry(0).x % 65536u;
  fetch(next[0], lookup);
#pragma unroll 1
  for (uint32_t slot = 0; slot < kEntriesPerWarp && has_entry(slot); ++slot) {
    const GradientEntry own = entry(slot);
    const uint32_t end = own.x % 65536u + own.x / 65536u;
    const bool has_next = slot + 1 < kEntriesPerWarp && has_entry(slot + 1);
    const uint32_t after_end = has_next ? entry(slot + 1).x % 65536u : end - 1;
    const uint32_t number = entry_number(slot);
    EntrySums sums;
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        sums.p[m][k] = load_vector(tile_.products + Tile::product_place(number, k, m, lane_));
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.dp[n][i] = 0.0f;
    }
    sums.row = {};
    const auto after = [&] { return lookup + 1 < end ? lookup + 1 : after_end; };
#pragma unroll 1
    while (true) {
      fetch(next[1], after());
      add_lookup(sums, next[0]);
      if (++lookup == end) {
        next[0] = next[1];
        break;
      }
      fetch(next[0], after());
      add_lookup(sums, next[1]);
      if (++lookup == end) break;
    }
    lookup = after_end;
    __syncwarp();
    store_product_gradient(number, sums.dp);
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::add_lookup(
    EntrySums& sums, const Fetched& fetched) const {
  const float factor = fetched.lookup.factor;
  RowGradient& row = sums.row;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.b[i] += factor * fetched.gradient.b[i];
  row.a.x += factor * fetched.gradient.a.x;
  row.a.y += factor * fetched.gradient.a.y;
  row.a.z += factor * fetched.gradient.a.z;
  row.a.w += factor * fetched.gradient.a.w;
  if ((fetched.lookup.third & kLastOfId) == 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.b[i] = Product::operand(row.b[i]);
  row.a = make_float4(Product::operand(row.a.x), Product::operand(row.a.y),
                      Product::operand(row.a.z), Product::operand(row.a.w));
  add_third_gradient(fetched.lookup.third & ~kLastOfId, sums.p, row.b);
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    Product::multiply_add(sums.dp[n], row.a, Product::operand(fetched.third.rows[n].x),
                          Product::operand(fetched.third.rows[n].y));
  }
  row = {};
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_third_gradient(
    uint32_t i3, const float4 (&p)[kHalves][2], const float (&b)[4]) const {
  float* const slice = third_gradient_ + int64_t{i3} * r2_ * q3_;
  const uint32_t column = 2 * t_;
#pragma unroll
  for (uint32_t m = 0; m < kHalves; ++m) {
    float c[4] = {};
    Product::multiply_add(c, p[m][0], b[0], b[1]);
    Product::multiply_add(c, p[m][1], b[2], b[3]);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t r2 = 16 * m + 8 * half;
      add(slice + r2 * q3_, c[2 * half], c[2 * half + 1], r2 + g_ < r2_ && column < q3_,
          r2 + g_ < r2_ && column + 1 < q3_);
    }
  }
  if (marks_third_) targets_.touched[2][i3] = 1;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_product_gradient(
    uint32_t number, const float (&dp)[kRank / 8][4]) {
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      store_pair(tile_.products +
                     Tile::gradient_place(number, g_ / 4 + 2 * half, g_ % 4, 2 * n + t_ / 2) +
                     t_ % 2 * 2,
                 Product::operand(dp[n][2 * half]), Product::operand(dp[n][2 * half + 1]));
    }
  }
}

}  // namespace flowtt::cuda
