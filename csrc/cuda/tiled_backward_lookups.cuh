// The backward pass, lookup by lookup: dG3[i3] += P^T g and dP += g G3[i3]^T. A warp works on the
// lookups of its entries; what the next ones need is on its way meanwhile.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::LaneRow
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_row(uint32_t row) const {
  LaneRow share;
  if constexpr (kExact) {
    const float* const source = lane_row_ + uint64_t{row} * 4;
    if constexpr (kNarrow) {
      share.columns[0] = __ldg(source);
      share.columns[1] = __ldg(source + 32);
    } else {
      const float2 halves[2] = {__ldg(reinterpret_cast<const float2*>(source)),
                                __ldg(reinterpret_cast<const float2*>(source + 64))};
      share = {{halves[0].x, halves[0].y, halves[1].x, halves[1].y}};
    }
  } else {
    const uint32_t columns = q1_ * q2_ * q3_;
    const int64_t first = row * grad_.row_stride;
#pragma unroll
    for (uint32_t i = 0; i < kOwnColumnsOfRow; i += kPairs ? 2 : 1) {
      const uint32_t column = column_of_lane(i);
      if constexpr (kPairs) {
        const float2 pair = column < columns
                                ? __ldg(reinterpret_cast<const float2*>(lane_row_ + first + 32 * i))
                                : make_float2(0.0f, 0.0f);
        share.columns[i] = pair.x;
        share.columns[i + 1] = pair.y;
      } else {
        share.columns[i] =
            column < columns ? load_element<float>(grad_.data, grad_.type,
                                                   first + (column_ + column) * grad_.column_stride)
                             : 0.0f;
      }
    }
  }
  return share;
}

// Operand b has one column of a row where a has all rows of a few columns: a shuffle takes one
// element of each lane to another. Where a lane has two neighbouring columns, lanes below 16 send
// the even one first and the others the odd one, so that those that need either receive it at once.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__
    typename TileGradients<core_t, kRank, kThreeProducts, kShape>::RowGradient
    TileGradients<core_t, kRank, kThreeProducts, kShape>::exchange_by_shuffles(
        const LaneRow& own) const {
  RowGradient gradient;
  if constexpr (kNarrow) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      gradient.b[i] = __shfl_sync(kAllLanes, own.columns[i / 2], sender_ + i % 2 * 16);
    }
    gradient.a = make_float2(own.columns[0], own.columns[1]);
  } else {
    const bool sends_odd = lane_ >= 16;
    const bool needs_odd = g_ % 2 != 0;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float even = own.columns[2 * half];
      const float odd = own.columns[2 * half + 1];
      const float first = __shfl_sync(kAllLanes, sends_odd ? odd : even, sender_);
      const float second = __shfl_sync(kAllLanes, sends_odd ? even : odd, sender_ ^ 16);
      gradient.b[2 * half] = needs_odd ? second : first;
      gradient.b[2 * half + 1] = needs_odd ? first : second;
    }
    gradient.a = make_float4(own.columns[0], own.columns[2], own.columns[1], own.columns[3]);
  }
  return gradient;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__
    typename TileGradients<core_t, kRank, kThreeProducts, kShape>::RowGradient
    TileGradients<core_t, kRank, kThreeProducts, kShape>::exchange(const LaneRow& own) const {
  float* const row = tile_.rows[warp_];
  const uint32_t columns = q1_ * q2_ * q3_;
#pragma unroll
  for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) {
    const uint32_t column = column_of_lane(i);
    if (column < columns) row[column] = own.columns[i];
  }
  __syncwarp();
  RowGradient gradient;
  const uint32_t row_of_j1 = q2_ * q3_;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const bool is_there = i < q1_ && t_ < q2_ && g_ < q3_;
    gradient.b[i] = is_there ? row[i * row_of_j1 + t_ * q3_ + g_] : 0.0f;
  }
  float2 pairs[2];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t j1 = g_ / 4 + 2 * half;
    const float* const pair = row + j1 * row_of_j1 + g_ % 4 * q3_ + 2 * t_;
    const bool is_there = j1 < q1_ && g_ % 4 < q2_ && 2 * t_ < q3_;
    if constexpr (kPairs) {
      pairs[half] = is_there ? load_at<float2>(pair, 0) : make_float2(0.0f, 0.0f);
    } else {
      pairs[half] =
          make_float2(is_there ? pair[0] : 0.0f, is_there && 2 * t_ + 1 < q3_ ? pair[1] : 0.0f);
    }
  }
  gradient.a = make_float4(pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y);
  __syncwarp();
  return gradient;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_third(
    uint32_t number) {
  slice_.first = __shfl_sync(kAllLanes, own_.third, number);
  const core_t* const source = lane_third_ + slice_.first;
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
          slice_.rows[n] = __ldg(reinterpret_cast<const float2*>(source + 8 * n * q3_));
        }
      } else {
        if (is_there) slice_.rows[n].x = load(source + 8 * n * q3_);
        if (is_there && (kExact || 2 * t_ + 1 < q3_)) {
          slice_.rows[n].y = load(source + 8 * n * q3_ + 1);
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
  const uint32_t i3 = ahead.lookup.third % 65536u;
  own_.third = i3 * third_elements();
  own_.factor = ahead.lookup.factor;
  const bool has_lookup = ahead.flags != 0;
  if (targets_.touched[2] != nullptr && has_lookup) targets_.touched[2][i3] = 1;
  lookups_ = __popc(__ballot_sync(kAllLanes, has_lookup));
  is_weighted_ = __any_sync(kAllLanes, has_lookup && own_.factor != 1.0f);
  entries_ = __ballot_sync(kAllLanes, (ahead.flags & kLastOfEntry) != 0);
  ids_ = __ballot_sync(kAllLanes, (ahead.lookup.third & kLastOfId) != 0);
  lane_third_ = of_lane(third_, kNarrow ? lane_ : g_ * q3_ + 2 * t_);
  if constexpr (kPairs) {
    lane_row_ = of_lane(static_cast<const float*>(grad_.data) + column_, column_of_lane(0));
  }
  if constexpr (kExact) sender_ = hold(4 * t_ + (kNarrow ? g_ % 4 : g_ / 2 + g_ % 2 * 16));
#pragma unroll
  for (uint32_t i = 0; i < kRowsAhead; ++i) {
    const uint32_t row = __shfl_sync(kAllLanes, own_.row, i);
    if (i < lookups_) rows_[i] = load_row(row);
  }
  load_third(0);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::start_entry(
    EntrySums& sums, uint32_t products) const {
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
      sums.p[m][k] = load_at<float4>(tile_.products, Tile::product_place(products, k, m));
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.dp[n][i] = 0.0f;
  }
}

// Lookups are taken in turns of as many as there are rows ahead, so that each turn finds a row in
// the same registers: to choose between registers would be to wait for all of them. What ends where
// is told by bits that all lanes know.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_on_lookups() {
  if (lookups_ == 0) return;
  float* const target_of_lane = of_lane(targets_.gradients[2], element_of_lane());
  // Of the entry.
  uint32_t products = hold(warp_ * Tile::kEntryBytes + Tile::product_lane(lane_));
  uint32_t gradients =
      hold(warp_ * Tile::kEntryBytes + Tile::gradient_place(g_ / 4, g_ % 4, t_ / 2) + t_ % 2 * 8);
  EntrySums sums;
  sums.row = {};
  sums.third.first = kNoSlice;
  start_entry(sums, products);
  uint32_t ids = ids_;
  uint32_t entries = entries_;
#pragma unroll 1
  for (uint32_t number = 0;; number += kRowsAhead) {
    const uint32_t left = lookups_ - number;
    uint32_t next_rows[kRowsTold];
#pragma unroll
    for (uint32_t i = 0; i < kRowsAhead; ++i) {
      if (i % kRowsTold == 0 && left > kRowsAhead + i) {
        // Together, and before they are needed: there is one wait for all.
#pragma unroll
        for (uint32_t k = 0; k < kRowsTold; ++k) {
          next_rows[k] = __shfl_sync(kAllLanes, own_.row, number + kRowsAhead + i + k);
        }
      }
      const float factor = is_weighted_ ? __shfl_sync(kAllLanes, own_.factor, number + i) : 1.0f;
#pragma unroll
      for (uint32_t k = 0; k < kOwnColumnsOfRow; ++k) {
        sums.row.columns[k] += factor * rows_[i].columns[k];
      }
      if (left > kRowsAhead + i) rows_[i] = load_row(next_rows[i % kRowsTold]);
      if ((ids & 1u << i) == 0) continue;
      add_id(sums, target_of_lane);
      load_third(number + i + 1);
      if ((entries & 1u << i) == 0) continue;
      __syncwarp();  // all have read the product
      store_product_gradient(gradients, sums.dp);
      if (left == i + 1) {
        if constexpr (kDefersThird) add_third_gradient(sums.third, target_of_lane);
        return;
      }
      products += kBackwardWarps * Tile::kEntryBytes;
      gradients += kBackwardWarps * Tile::kEntryBytes;
      start_entry(sums, products);
    }
    ids >>= kRowsAhead;
    entries >>= kRowsAhead;
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::add_id(
    EntrySums& sums, float* target_of_lane) const {
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
  if (kDefersThird && sums.third.first != kNoSlice) {
    add_third_gradient(sums.third, target_of_lane);
  }
  sums.third.first = slice_.first;
#pragma unroll
  for (uint32_t m = 0; m < kHalves; ++m) {
    float (&c)[4] = sums.third.rows[m];
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = 0.0f;
    Product::multiply_add(c, sums.p[m][0], row.b[0], row.b[1]);
    Product::multiply_add(c, sums.p[m][1], row.b[2], row.b[3]);
  }
  if constexpr (!kDefersThird) add_third_gradient(sums.third, target_of_lane);
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    if constexpr (kNarrow) {
      Product::multiply_add(sums.dp[n], row.a, Product::operand(slice_.rows[n]));
    } else {
      Product::multiply_add(sums.dp[n], row.a, Product::operand(slice_.rows[n].x),
                            Product::operand(slice_.rows[n].y));
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_third_gradient(
    const ThirdSums& sums, float* target_of_lane) const {
  float* const target = target_of_lane + sums.first;
#pragma unroll
  for (uint32_t m = 0; m < kHalves; ++m) {
    const float (&c)[4] = sums.rows[m];
    if constexpr (kNarrow) {
      // Lanes with t >= 2 have the same sums as those two before: they add the second rows.
      const bool is_second = t_ >= 2;
      add_pair(target, make_float2(is_second ? c[2] : c[0], is_second ? c[3] : c[1]));
    } else {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r2 = 16 * m + 8 * half;
        const bool exists = kExact || r2 + g_ < r2_;
        add(target + r2 * q3_, c[2 * half], c[2 * half + 1], exists && (kExact || 2 * t_ < q3_),
            exists && (kExact || 2 * t_ + 1 < q3_));
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_product_gradient(
    uint32_t lane_place, const float (&dp)[kRank / 8][4]) const {
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      store_at(
          tile_.products, Tile::gradient_place_of(lane_place, half, 2 * n),
          make_float2(Product::operand(dp[n][2 * half]), Product::operand(dp[n][2 * half + 1])));
    }
  }
}

}  // namespace flowtt::cuda
