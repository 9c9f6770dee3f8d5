// Tables of two cores in the backward pass: a prefix is one slice of core 1, whose q1 x r elements
// are P itself as (q1 q2) x r2, so there is nothing to multiply before the lookups or behind them,
// and entries of a tile have nothing in common.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_products() const {
  const uint32_t j1 = g_ % 4;
  const uint32_t product =
      hold(entry_number(g_ / 4) * Tile::kEntryBytes + Tile::product_pair_lane(j1, t_));
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    const bool exists = has_entry(slot);
    const uint32_t i1 = exists ? entry(slot).i1 : 0;
    if (exists && targets_.touched[0] != nullptr && j1 == 0 && t_ == 0) targets_.touched[0][i1] = 1;
    const core_t* const rows =
        first_ + i1 * static_cast<int64_t>(first_elements()) + j1 * second_row();
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
      const uint32_t j2 = u / 2;
      const uint32_t r2 = u % 2 * 4 + t_;
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
        const auto element = [&](uint32_t at) {
          const bool is_there = exists && j1 < q1_ && j2 < q2_ && at < r2_;
          return is_there ? Product::operand(load(rows + j2 * second_columns() + at)) : 0.0f;
        };
        store_at(
            tile_.products,
            Tile::product_pair_place(product, u, m) + half * 2 * kBackwardWarps * Tile::kEntryBytes,
            make_float2(element(r2 + 16 * m), element(r2 + 16 * m + 8)));
      }
    }
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::add_product_gradients() const {
  constexpr uint32_t kRowPairs = kRank / 2;
#pragma unroll 1
  for (uint32_t slot = 0; slot < kEntriesPerWarp; ++slot) {
    if (!has_entry(slot)) return;
    float* const target =
        gradient_of_core(0) + entry(slot).i1 * static_cast<int64_t>(first_elements());
#pragma unroll
    for (uint32_t i = 0; i < kGradientQ * kGradientQ * kRowPairs / 32; ++i) {
      const uint32_t pair = 32 * i + lane_;
      const uint32_t j1 = pair / kRowPairs / kGradientQ;
      const uint32_t j2 = pair / kRowPairs % kGradientQ;
      const uint32_t r2 = pair % kRowPairs * 2;
      const float2 v =
          load_at<float2>(tile_.products, entry_number(slot) * Tile::kEntryBytes +
                                              Tile::gradient_place(j1, j2, r2 / 4) + r2 % 4 * 4);
      const bool has_row = j1 < q1_ && j2 < q2_;
      add(target + j1 * second_row() + j2 * second_columns() + r2, v.x, v.y, has_row && r2 < r2_,
          has_row && r2 + 1 < r2_);
    }
  }
}

}  // namespace flowtt::cuda
