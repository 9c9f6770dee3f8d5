// The backward pass, lookup by lookup, where rows are narrow and there is one product: what
// tiled_backward_lookups.cuh does one after the other is done in turns, of as many lookups as there
// are rows on their way. So each finds its row in the same registers, without a branch that chooses
// them, and what ends where is told by bits that all lanes know, in uniform registers.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::start_turns() {
  const bool has_lookup = (own_.third & kIsLookup) != 0;
  entries_ = __ballot_sync(kAllLanes, (own_.third & kLastOfEntry) != 0);
  is_weighted_ = __any_sync(kAllLanes, has_lookup && own_.factor != 1.0f);
  sender_ = hold(4 * t_ + g_ % 4);
  const uint32_t i3 = own_.third % 65536u;
  if (targets_.touched[2] != nullptr && has_lookup) targets_.touched[2][i3] = 1;
  own_.third = i3 * third_elements();
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_third_of(
    uint32_t number) {
  slice_.first = __shfl_sync(kAllLanes, own_.third, number);
  load_third(lane_third_ + slice_.first);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::work_in_turns() {
  if (lookups_ == 0) return;
  float* const target_of_lane = of_lane(gradient_of_core(2), element_of_lane());
  // Of the entry.
  uint32_t products;
  uint32_t gradients;
  if constexpr (kQuads) {
    const uint2 own = places(QuadTile::kProductAndGradient);
    products = own.x;
    gradients = own.y;
  } else {
    const uint32_t entry = entry_number(0) * Tile::kEntryBytes;
    products = hold(entry + Tile::product_lane(lane_));
    gradients = hold(entry + Tile::gradient_place(g_ / 4, g_ % 4, t_ / 2) + t_ % 2 * 8);
  }
  EntrySums sums;
  sums.row = {};
  ThirdSums third;
  third.first = kNoSlice;
  start_entry(sums, 0, products);
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
      add_id_in_turns(sums, third, target_of_lane);
      load_third_of(number + i + 1);
      if ((entries & 1u << i) == 0) continue;
      __syncwarp();  // all have read the product
      store_product_gradient(0, gradients, sums.dp);
      if (left == i + 1) {
        add_narrow_third(target_of_lane + third.first, third.rows);
        return;
      }
      products += kBackwardWarps * Tile::kEntryBytes;
      gradients += kBackwardWarps * Tile::kEntryBytes;
      if constexpr (kQuads) gradients ^= QuadTile::kOddSlot;
      start_entry(sums, 0, products);
    }
    ids >>= kRowsAhead;
    entries >>= kRowsAhead;
  }
}

// The sums of dG3 leave when the next id's are about to be computed: nothing waits for the
// products.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_id_in_turns(EntrySums& sums,
                                                                      ThirdSums& third,
                                                                      float* target_of_lane) const {
  const RowGradient row = take_row(sums);
  if (third.first != kNoSlice) add_narrow_third(target_of_lane + third.first, third.rows);
  third.first = slice_.first;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) third.rows[i] = 0.0f;
  Product::multiply_add(third.rows, sums.p[0][0], row.b[0], row.b[1]);
  Product::multiply_add(third.rows, sums.p[0][1], row.b[2], row.b[3]);
  add_product_gradient(sums, row);
}

}  // namespace flowtt::cuda
