// The backward pass, lookup by lookup: dG3[i3] += P^T g and dP += g G3[i3]^T. A warp works on the
// lookups of its entries; what the next ones need is on its way meanwhile.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_next_third() {
  // After the last id, any slice.
  const uint32_t last_lookup = __ffs(static_cast<int>(ids_)) - 1;
  const uint32_t i3 = __shfl_sync(kAllLanes, own_.third, last_lookup % 32) % 65536u;
  ids_ &= ids_ - 1;
  load_third(lane_third_ + uint64_t{i3} * third_elements());
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_third(
    const core_t* source) {
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    if constexpr (kNarrow) {
      if constexpr (std::is_same_v<core_t, float>) {
        slice_.rows[n] = __ldg(source + 8 * n * kExactColumns);
      } else {
        slice_.rows[n] = load(source + 8 * n * kExactColumns);
      }
    } else {
      const bool is_there = kExact || (8 * n + g_ < r2_ && 2 * t_ < q3_);
      slice_.rows[n] = make_float2(0.0f, 0.0f);
      if constexpr (kPairs && std::is_same_v<core_t, float>) {
        if (is_there) {
          slice_.rows[n] = __ldg(reinterpret_cast<const float2*>(source + 8 * n * third_row()));
        }
      } else {
        if (is_there) slice_.rows[n].x = load(source + 8 * n * third_row());
        if (is_there && (kExact || 2 * t_ + 1 < q3_)) {
          slice_.rows[n].y = load(source + 8 * n * third_row() + 1);
        }
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::start_lookups(
    const Ahead& ahead) {
  own_.row =
      kExact ? ahead.lookup.row * static_cast<uint32_t>(grad_.row_stride / 4) : ahead.lookup.row;
  own_.third = ahead.lookup.third | ahead.flags;
  own_.factor = ahead.lookup.factor;
  const uint32_t lookups = __popc(__ballot_sync(kAllLanes, ahead.flags != 0));
  lookups_ = kInTurns ? lookups : hold(lookups);
  ids_ = __ballot_sync(kAllLanes, (own_.third & kLastOfId) != 0);
  lane_third_ = of_lane(third_, kNarrow ? lane_ : g_ * third_row() + 2 * t_);
  if constexpr (kPairs) {
    const uint32_t column = kExact ? kOwnColumnsOfRow / 2 * lane_ : row_column(row_place(0));
    lane_row_ = of_lane(static_cast<const float*>(grad_.data) + column_, column);
  }
  if constexpr (kInTurns) start_turns();
#pragma unroll
  for (uint32_t i = 0; i < kRowsAhead; ++i) {
    const uint32_t row = __shfl_sync(kAllLanes, own_.row, i);
    if (i < lookups_) rows_[i] = load_row(row);
  }
  if constexpr (kInTurns) {
    load_third_of(0);
  } else {
    load_next_third();
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::start_entry(
    EntrySums& sums, uint32_t entry_place, uint32_t lane_place) const {
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
      sums.p[m][k] =
          load_at<float4>(tile_.products, entry_place + Tile::product_place(lane_place, k, m));
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.dp[n][i] = 0.0f;
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_on_lookups() {
  if constexpr (kInTurns) return work_in_turns();
  if (lookups_ == 0) return;
  if (targets_.touched[2] != nullptr && lane_ < lookups_) {
    targets_.touched[2][own_.third % 65536u] = 1;
  }
  float* const target_of_lane = of_lane(gradient_of_core(2), element_of_lane());
  const uint32_t products = hold(Tile::product_lane(lane_));
  const uint32_t gradients =
      hold(Tile::gradient_place(g_ / 4, g_ % 4, t_ / 2) + t_ % 2 * static_cast<uint32_t>(8));
  EntrySums sums;
  uint32_t number = hold(0u);
  bool starts_entry = true;
  sums.row = {};
#pragma unroll 1
  do {
    const uint32_t own = __shfl_sync(kAllLanes, own_.third, number);
    const float factor = __shfl_sync(kAllLanes, own_.factor, number);
    const uint32_t row_ahead = __shfl_sync(kAllLanes, own_.row, number + kRowsAhead);
    const bool has_ahead = number + kRowsAhead < lookups_;
    const auto take = [&](LaneRow& row) {
#pragma unroll
      for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) {
        sums.row.columns[i] += factor * row.columns[i];
      }
      if (has_ahead) row = load_row(row_ahead);
    };
    // Branches: to choose between registers is to wait for all of them.
    static_assert(kRowsAhead == 4);
    switch (number % kRowsAhead) {
      case 0:
        take(rows_[0]);
        break;
      case 1:
        take(rows_[1]);
        break;
      case 2:
        take(rows_[2]);
        break;
      default:
        take(rows_[3]);
    }
    ++number;
    if ((own & kLastOfId) == 0) continue;
    const uint32_t entry = entry_number(own >> kSlotShift & 3) * Tile::kEntryBytes;
    if (starts_entry) start_entry(sums, entry, products);
    add_id(sums, target_of_lane + uint64_t{own % 65536u} * third_elements());
    load_next_third();
    starts_entry = (own & kLastOfEntry) != 0;
    if (starts_entry) {
      __syncwarp();  // all have read the product
      store_product_gradient(entry, gradients, sums.dp);
    }
  } while (number < lookups_);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::add_id(
    EntrySums& sums, float* target) const {
  const RowGradient row = take_row(sums);
  add_third_gradient(target, sums.p, row.b);
  add_product_gradient(sums, row);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__
    typename TileGradients<core_t, kRank, kThreeProducts, kShape>::RowGradient
    TileGradients<core_t, kRank, kThreeProducts, kShape>::take_row(EntrySums& sums) const {
#pragma unroll
  for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) {
    sums.row.columns[i] = Product::operand(sums.row.columns[i]);
  }
  RowGradient row;
  if constexpr (kExact) {
    row = exchange_by_shuffles(sums.row);
  } else {
    row = exchange(sums.row);
  }
  sums.row = {};
  return row;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_product_gradient(
    EntrySums& sums, const RowGradient& row) const {
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    if constexpr (kNarrow) {
      const float b = kQuads ? Product::operand_twice(slice_.rows[n])  // see store_product_gradient
                             : Product::operand(slice_.rows[n]);
      Product::multiply_add(sums.dp[n], row.a, b);
    } else {
      Product::multiply_add(sums.dp[n], row.a, Product::operand(slice_.rows[n].x),
                            Product::operand(slice_.rows[n].y));
    }
  }
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
    if constexpr (kNarrow) {
      add_narrow_third(target, c);
    } else {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r2 = 16 * m + 8 * half;
        const bool exists = kExact || r2 + g_ < r2_;
        add(target + r2 * third_row(), c[2 * half], c[2 * half + 1],
            exists && (kExact || 2 * t_ < q3_), exists && (kExact || 2 * t_ + 1 < q3_));
      }
    }
  }
}

// Lanes with t >= 2 have the same sums as those two before: they add the second rows.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_narrow_third(float* target,
                                                                       const float (&c)[4]) const {
  const bool is_second = t_ >= 2;
  add_pair(target, make_float2(is_second ? c[2] : c[0], is_second ? c[3] : c[1]));
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_product_gradient(
    uint32_t entry_place, uint32_t lane_place, const float (&dp)[kRank / 8][4]) const {
  if constexpr (kQuads) {
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      store_at(tile_.products, entry_place + QuadTile::gradient_place(lane_place, 0, n),
               make_float4(dp[n][0], dp[n][1], dp[n][2], dp[n][3]));
    }
  } else {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
        store_at(
            tile_.products, entry_place + Tile::gradient_place_of(lane_place, half, 2 * n),
            make_float2(Product::operand(dp[n][2 * half]), Product::operand(dp[n][2 * half + 1])));
      }
    }
  }
}

}  // namespace flowtt::cuda
