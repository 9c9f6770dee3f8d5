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
    uint32_t words[kOwnColumnsOfRow];
    load_words(words, lane_row_ + uint64_t{row} * 4);
#pragma unroll
    for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) share.columns[i] = __uint_as_float(words[i]);
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

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__
    typename TileGradients<core_t, kRank, kThreeProducts, kShape>::RowGradient
    TileGradients<core_t, kRank, kThreeProducts, kShape>::exchange(const LaneRow& own,
                                                                   uint32_t entry_place) const {
  if constexpr (kFourColumns) {
    // As below, by places that are computed once.
    float* const rows = tile_.rows[0];
    store_at(rows, row_a_ + lane_ * 4, own);
    __syncwarp();
    RowGradient gradient;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) gradient.b[i] = load_at<float>(rows, row_b_ + i * 64);
    gradient.a =
        make_float4(load_at<float>(rows, row_a_), load_at<float>(rows, row_a_ + 128), 0.0f, 0.0f);
    __syncwarp();
    return gradient;
  }
  float* row;
  if constexpr (kRowsInProducts) {
    row = tile_.products + entry_place / sizeof(float);
  } else {
    row = tile_.rows[warp_];
  }
  if constexpr (kExact) {
    store_at(row, lane_ * static_cast<uint32_t>(sizeof(LaneRow)), own);
  } else {
    const uint32_t columns = q1_ * q2_ * q3_;
#pragma unroll
    for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) {
      const uint32_t column = column_of_lane(i);
      if (column < columns) row[column] = own.columns[i];
    }
  }
  __syncwarp();
  RowGradient gradient;
  const uint32_t row_of_j1 = q2_ * q3_;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const bool is_there = kExact ? kFullColumns || g_ < q3_ : i < q1_ && t_ < q2_ && g_ < q3_;
    gradient.b[i] = is_there ? row[i * row_of_j1 + t_ * q3_ + g_] : 0.0f;
  }
  float2 pairs[2];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t j1 = g_ / 4 + 2 * half;
    const float* const pair = row + j1 * row_of_j1 + g_ % 4 * q3_ + 2 * t_;
    const bool is_there =
        kExact ? kFullColumns || 2 * t_ < q3_ : j1 < q1_ && g_ % 4 < q2_ && 2 * t_ < q3_;
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
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_next_third() {
  // After the last id, any slice.
  const uint32_t last_lookup = __ffs(static_cast<int>(ids_)) - 1;
  const uint32_t i3 = __shfl_sync(kAllLanes, own_.third, last_lookup % 32) % 65536u;
  ids_ &= ids_ - 1;
  const core_t* const source = lane_third_ + uint64_t{i3} * third_elements();
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    if constexpr (kFourColumns) {
      if constexpr (std::is_same_v<core_t, float>) {
        slice_.rows[n].x = __ldg(source + 8 * n * q3_);
      } else {
        slice_.rows[n].x = load(source + 8 * n * q3_);
      }
      continue;
    }
    const bool is_there = (kExact || 8 * n + g_ < r2_) && (kFullColumns || 2 * t_ < q3_);
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

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::start_lookups(
    const Ahead& ahead) {
  own_.row =
      kExact ? ahead.lookup.row * static_cast<uint32_t>(grad_.row_stride / 4) : ahead.lookup.row;
  own_.third = ahead.lookup.third | ahead.flags;
  own_.factor = ahead.lookup.factor;
  lookups_ = hold(__popc(__ballot_sync(kAllLanes, ahead.flags != 0)));
  ids_ = __ballot_sync(kAllLanes, (own_.third & kLastOfId) != 0);
  lane_third_ = of_lane(third_, g_ * q3_ + (kFourColumns ? 1 : 2) * t_);
  if constexpr (kPairs) {
    lane_row_ = of_lane(static_cast<const float*>(grad_.data) + column_, column_of_lane(0));
  }
#pragma unroll
  for (uint32_t i = 0; i < kRowsAhead; ++i) {
    const uint32_t row = __shfl_sync(kAllLanes, own_.row, i);
    if (i < lookups_) rows_[i] = load_row(row);
  }
  load_next_third();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_on_lookups() {
  if (lookups_ == 0) return;
  if (targets_.touched[2] != nullptr && lane_ < lookups_) {
    targets_.touched[2][own_.third % 65536u] = 1;
  }
  const uint32_t third_row = kQuads ? Group::row_of_third(g_) : g_;
  float* const target_of_lane = of_lane(targets_.gradients[2], third_row * q3_ + 2 * t_);
  uint32_t products;
  uint32_t gradients;
  // Columns that are not there are others: nobody asks for their sums.
  if constexpr (kQuads) {
    const uint2 own = places(kProductAndGradient);
    products = own.x;
    gradients = own.y;
    const uint2 row = places(kRowAndRow);
    row_a_ = row.x;
    row_b_ = row.y;
  } else {
    products = hold(Tile::product_lane(lane_));
    gradients = hold(Tile::gradient_place(g_ / 4, g_ % 4, t_ / 2) + t_ % 2 * 8);
    if constexpr (kFourColumns) {
      const uint32_t row = warp_ * static_cast<uint32_t>(sizeof(tile_.rows[0]));
      row_a_ = hold(row + lane_ * 4);
      row_b_ = hold(row + t_ * 16 + g_ % 4 * 4);
    }
  }
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
      if constexpr (kRowsInProducts) __syncwarp();  // all have read the product
    }
    add_id(sums, entry, target_of_lane + uint64_t{own % 65536u} * third_elements());
    load_next_third();
    starts_entry = (own & kLastOfEntry) != 0;
    if (starts_entry) {
      const uint32_t odd_slot = kQuads ? (own >> kSlotShift) % 2 * 32 : 0;  // see gradient_lane
      store_product_gradient(entry, gradients ^ odd_slot, sums.dp);
    }
  } while (number < lookups_);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::add_id(
    EntrySums& sums, uint32_t entry_place, float* target) const {
#pragma unroll
  for (uint32_t i = 0; i < kOwnColumnsOfRow; ++i) {
    sums.row.columns[i] = Product::operand(sums.row.columns[i]);
  }
  const RowGradient row = exchange(sums.row, entry_place);
  sums.row = {};
  add_third_gradient(target, sums.p, row.b);
#pragma unroll
  for (uint32_t n = 0; n < kRank / 8; ++n) {
    const float x = Product::operand_twice(slice_.rows[n].x);
    if constexpr (kFourColumns) {
      multiply_add_four_tf32(sums.dp[n], row.a.x, row.a.y, x);
    } else {
      Product::multiply_add(sums.dp[n], row.a, x, Product::operand_twice(slice_.rows[n].y));
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
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t r2 = 16 * m + 8 * half;
      if constexpr (kExact && !kFullColumns) {
        add_pair_if(2 * t_ < q3_, target + r2 * q3_, make_float2(c[2 * half], c[2 * half + 1]));
        continue;
      }
      const bool exists = kExact || r2 + g_ < r2_;
      add(target + r2 * q3_, c[2 * half], c[2 * half + 1], exists && (kFullColumns || 2 * t_ < q3_),
          exists && (kFullColumns || 2 * t_ + 1 < q3_));
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::store_product_gradient(
    uint32_t entry_place, uint32_t lane_place, const float (&dp)[kRank / 8][4]) const {
  if constexpr (kQuads) {
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
      store_at(tile_.products, entry_place + Group::gradient_place(lane_place, 0, n),
               make_float4(dp[n][0], dp[n][1], dp[n][2], dp[n][3]));
    }
  } else {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
        store_at(tile_.products, entry_place + Tile::gradient_place_of(lane_place, half, 2 * n),
                 make_float2(dp[n][2 * half], dp[n][2 * half + 1]));
      }
    }
  }
}

}  // namespace flowtt::cuda
