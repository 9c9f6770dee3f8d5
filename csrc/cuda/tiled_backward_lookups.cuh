// The backward pass, lookup by lookup: dG3[i3] += P^T g and dP += g G3[i3]^T. A warp works on the
// lookups of its entries; what the next ones need is on its way meanwhile.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::ThirdSlice
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_third(const core_t* own,
                                                                 uint32_t i3) const {
  ThirdSlice slice;
  const core_t* const source = own + uint64_t{i3} * third_elements();
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    const bool is_there = (kExact || 8 * n + g_ < r2_) && (kFullColumns || 2 * t_ < q3_);
    slice.rows[n] = make_float2(0.0f, 0.0f);
    if constexpr (kPairs && std::is_same_v<core_t, float>) {
      if (is_there) {
        slice.rows[n] = __ldg(reinterpret_cast<const float2*>(source + 8 * n * q3_));
      }
    } else {
      if (is_there) slice.rows[n].x = load(source + 8 * n * q3_);
      if (is_there && 2 * t_ + 1 < q3_) slice.rows[n].y = load(source + 8 * n * q3_ + 1);
    }
  }
  return slice;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::start_rows(
    const Ahead& ahead) {
  rows_.start();
#pragma unroll
  for (uint32_t i = 0; i < kRingRows; ++i) {
    const bool exists = __shfl_sync(kAllLanes, ahead.third, i) != kNoLookup;
    rows_.fetch(__shfl_sync(kAllLanes, ahead.row, i), exists);
    rows_.next();
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_on_lookups(const Ahead& ahead) {
  const uint32_t lookups = hold(__popc(__ballot_sync(kAllLanes, ahead.third != kNoLookup)));
  if (lookups == 0) return;
  if (targets_.touched[2] != nullptr && ahead.third != kNoLookup) {
    targets_.touched[2][ahead.third % 65536u] = 1;
  }
  const uint32_t lane_element = g_ * q3_ + 2 * t_;
  const core_t* const third_of_lane = reinterpret_cast<const core_t*>(
      hold(reinterpret_cast<uint64_t>(third_ + lane_element)));
  float* const target_of_lane = reinterpret_cast<float*>(
      hold(reinterpret_cast<uint64_t>(targets_.gradients[2] + lane_element)));
  const uint32_t products = hold(Tile::product_lane(lane_));
  const uint32_t gradients =
      hold(Tile::gradient_place(g_ / 4, g_ % 4, t_ / 2) + t_ % 2 * static_cast<uint32_t>(8));
  EntrySums sums;
  sums.row = {};
  uint32_t number = hold(0u);
  uint32_t lookup = __shfl_sync(kAllLanes, ahead.third, number);
  ThirdSlice third = load_third(third_of_lane, lookup % 65536u);
  bool starts_entry = true;
#pragma unroll 1
  while (true) {
    const uint32_t entry = entry_number(lookup >> kSlotShift & 3) * Tile::kEntryBytes;
    if (starts_entry) {
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          sums.p[m][k] =
              load_at<float4>(tile_.products, entry + Tile::product_place(products, k, m));
        }
      }
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.dp[n][i] = 0.0f;
      }
    }
    const RowGradient gradient = rows_.read();
    const uint32_t ahead_row = __shfl_sync(kAllLanes, ahead.row, number + kRingRows);
    rows_.fetch(ahead_row, number + kRingRows < lookups);
    rows_.next();
    const float factor = __shfl_sync(kAllLanes, ahead.factor, number);
    RowGradient& row = sums.row;
#pragma unroll
    for (int i = 0; i < 4; ++i) row.b[i] += factor * gradient.b[i];
    row.a.x += factor * gradient.a.x;
    row.a.y += factor * gradient.a.y;
    row.a.z += factor * gradient.a.z;
    row.a.w += factor * gradient.a.w;
    const uint32_t own = lookup;
    const bool is_last = ++number == lookups;
    // After the warp's last lookup, any slice.
    lookup = __shfl_sync(kAllLanes, ahead.third, number);
    if ((own & kLastOfId) != 0) {
      add_id(sums, target_of_lane + uint64_t{own % 65536u} * third_elements(), third);
      third = load_third(third_of_lane, lookup % 65536u);
    }
    starts_entry = (own & kLastOfEntry) != 0;
    if (starts_entry) store_product_gradient(entry, gradients, sums.dp);
    if (is_last) break;
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::add_id(
    EntrySums& sums, float* target, const ThirdSlice& third) const {
  RowGradient& row = sums.row;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.b[i] = Product::operand(row.b[i]);
  row.a = make_float4(Product::operand(row.a.x), Product::operand(row.a.y),
                      Product::operand(row.a.z), Product::operand(row.a.w));
  add_third_gradient(target, sums.p, row.b);
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    Product::multiply_add(sums.dp[n], row.a, Product::operand(third.rows[n].x),
                          Product::operand(third.rows[n].y));
  }
  row = {};
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_third_gradient(
    float* target, const float4 (&p)[kHalves][2], const float (&b)[4]) const {
#pragma unroll
  for (uint32_t m = 0; m < kHalves; ++m) {
    float c[4] = {};
    Product::multiply_add(c, p[m][0], b[0], b[1]);
    Product::multiply_add(c, p[m][1], b[2], b[3]);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t r2 = 16 * m + 8 * half;
      const bool exists = kExact || r2 + g_ < r2_;
      add(target + r2 * q3_, c[2 * half], c[2 * half + 1],
          exists && (kFullColumns || 2 * t_ < q3_), exists && (kFullColumns || 2 * t_ + 1 < q3_));
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_product_gradient(
    uint32_t entry_place, uint32_t lane_place, const float (&dp)[kRank / 8][4]) const {
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      store_at(tile_.products, entry_place + Tile::gradient_place_of(lane_place, half, 2 * n),
               make_float2(Product::operand(dp[n][2 * half]),
                           Product::operand(dp[n][2 * half + 1])));
    }
  }
}

}  // namespace flowtt::cuda
