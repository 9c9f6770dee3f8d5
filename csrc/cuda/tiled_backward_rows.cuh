// Rows of grad_output in the backward pass: each lane of a warp loads a share, and hands it to
// those that need it as operands.

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
    const int64_t first = row * grad_.row_stride;
#pragma unroll
    for (uint32_t i = 0; i < kOwnColumnsOfRow; i += kPairs ? 2 : 1) {
      const RowPlace place = row_place(i);
      const bool is_there = place.j1 < q1_ && place.j2 < q2_ && place.j3 < q3_;
      if constexpr (kPairs) {
        const float* const pair = lane_row_ + first + i * third_row() * whole_.q2;
        const float2 v =
            is_there ? __ldg(reinterpret_cast<const float2*>(pair)) : make_float2(0.0f, 0.0f);
        share.columns[i] = v.x;
        share.columns[i + 1] = v.y;
      } else {
        const int64_t column = column_ + row_column(place);
        share.columns[i] = is_there ? load_element<float>(grad_.data, grad_.type,
                                                          first + column * grad_.column_stride)
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
    const uint32_t source = kInTurns ? sender_ : 4 * t_ + g_ % 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      gradient.b[i] = __shfl_sync(kAllLanes, own.columns[i / 2], source + i % 2 * 16);
    }
    gradient.a = make_float2(own.columns[0], own.columns[1]);
  } else {
    const bool sends_odd = lane_ >= 16;
    const bool needs_odd = g_ % 2 != 0;
    const uint32_t source = 4 * t_ + g_ / 2 + g_ % 2 * 16;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const float even = own.columns[2 * half];
      const float odd = own.columns[2 * half + 1];
      const float first = __shfl_sync(kAllLanes, sends_odd ? odd : even, source);
      const float second = __shfl_sync(kAllLanes, sends_odd ? even : odd, source ^ 16);
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
#pragma unroll
  for (uint32_t i = 0; i < kOwnColumnsOfRow; i += kPairs ? 2 : 1) {
    if constexpr (kPairs) {
      store_at(row, i * 32 * sizeof(float) + lane_ * sizeof(float2),
               make_float2(own.columns[i], own.columns[i + 1]));
    } else {
      row[i * 32 + lane_] = own.columns[i];
    }
  }
  __syncwarp();
  RowGradient gradient;
  constexpr uint32_t kRowOfJ2 = kGradientColumns;
  constexpr uint32_t kRowOfJ1 = kGradientQ * kRowOfJ2;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    gradient.b[i] = row[i * kRowOfJ1 + t_ * kRowOfJ2 + g_];
  }
  float2 pairs[2];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t j1 = g_ / 4 + 2 * half;
    const float* const pair = row + j1 * kRowOfJ1 + g_ % 4 * kRowOfJ2 + 2 * t_;
    pairs[half] = load_at<float2>(pair, 0);
  }
  gradient.a = make_float4(pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y);
  __syncwarp();
  return gradient;
}

}  // namespace flowtt::cuda
