// The backward pass: what a tile needs of the cores and of its lookups is loaded ahead, and stored
// in shared memory as the products take it.

#pragma once

#include "tiled_backward_gradients.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_ahead(
    Ahead& ahead, const BackwardWork& work) const {
  uint32_t before = 0;  // lookups of the warp's entries before
  uint32_t lookup = ~0u;
  ahead.flags = 0;
#pragma unroll
  for (uint32_t slot = 0; slot < kEntriesPerWarp; ++slot) {
    if (!has_entry(slot)) break;
    const uint32_t lookups = entry(slot).lookups;
    const uint32_t count = lookups >> kCountShift;
    if (lane_ - before < count) {
      lookup = lookups % (1u << kCountShift) + lane_ - before;
      ahead.flags =
          kIsLookup | slot << kSlotShift | (lane_ - before + 1 == count ? kLastOfEntry : 0);
    }
    before += count;
  }
  ahead.lookup = {};
  if (lookup != ~0u) {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(work.lookups) + lookup);
    ahead.lookup = {words.x, words.y, __uint_as_float(words.z), 0};
  }
  load_second(ahead.second);
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
template <typename Rows>
__device__ __forceinline__ void
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_second_rows(OwnSecond& loaded,
                                                                       const Rows& own) const {
  const core_t* const second = second_ + slot_.i2() * static_cast<int64_t>(second_elements()) +
                               own.row * second_row() + own.j2 * second_columns() + own.column;
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    loaded[i] = __ldg(reinterpret_cast<const float4*>(second + Rows::row_step(i) * second_row()));
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::load_second(
    OwnSecond& loaded) const {
  if constexpr (kQuads) return load_second_rows(loaded, QuadSecondRows(threadIdx.x));
  if constexpr (kGrouped) return load_second_by_group(loaded);
  if constexpr (kTwoCores) return;
  if constexpr (kSecondByRows) return load_second_rows(loaded, SecondRows(threadIdx.x));
  const SecondVector<kRank> v(threadIdx.x);
  const core_t* const second = second_ + slot_.i2() * static_cast<int64_t>(second_elements()) +
                               v.r1 * static_cast<int64_t>(second_row()) + v.j2 * second_columns() +
                               v.r2;
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    const SecondVector<kRank> step(i * kBackwardThreads);
    const bool is_there = kExact || (v.j2 + step.j2 < q2_ && v.r2 + step.r2 < r2_);
    const auto element = [&](uint32_t r1) {
      return kExact || (is_there && v.r1 + r1 < r1_)
                 ? load(second + r1 * second_row() + step.j2 * second_columns() + step.r2)
                 : 0.0f;
    };
    loaded[i] = make_float4(element(0), element(1), element(2), element(3));
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ typename TileGradients<core_t, kRank, kThreeProducts, kShape>::FirstRows
TileGradients<core_t, kRank, kThreeProducts, kShape>::load_first() const {
  FirstRows first;
  const uint32_t j1 = g_ % 4;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t slot = g_ / 4 + 2 * half;
    const bool exists = has_entry(slot);
    const uint64_t i1 = exists ? entry(slot).i1 : 0;
    const core_t* const row =
        first_ + i1 * first_elements() + j1 * first_row() + (kGrouped ? 4 : kOwnFirst) * t_;
    if constexpr (kExact && std::is_same_v<core_t, float>) {
#pragma unroll
      for (uint32_t i = 0; i < kOwnFirst; i += 4) {
        const uint32_t at = kGrouped ? 4 * i : i;
        const float4 v = exists ? __ldg(reinterpret_cast<const float4*>(row + at))
                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        first.rows[half][i] = v.x;
        first.rows[half][i + 1] = v.y;
        first.rows[half][i + 2] = v.z;
        first.rows[half][i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kOwnFirst; ++i) {
        const bool is_there = exists && (kExact || (j1 < q1_ && kOwnFirst * t_ + i < r1_));
        first.rows[half][i] = is_there ? load(row + i) : 0.0f;
      }
    }
  }
  return first;
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::store_second(
    const OwnSecond& loaded) const {
  if constexpr (kQuads) return store_second_of_quads(loaded);
  if constexpr (kGrouped) return store_second_by_group(loaded);
  if constexpr (kTwoCores) return;
  if constexpr (kSecondByRows) {
    const SecondRows own(threadIdx.x);
    const uint32_t place = hold(own.place);
#pragma unroll
    for (uint32_t i = 0; i < kOwnSecond; ++i) {
      const float4 v = loaded[i];
      const float columns[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        store_at(tile_.second, SecondRows::place_at(place, i, n), Product::operand(columns[n]));
      }
    }
    return;
  }
  const uint32_t place = hold(
      Tile::second_place(lane_ * Tile::kVectorBytes, warp_ / Tile::kHalves, warp_ % Tile::kHalves));
#pragma unroll
  for (uint32_t i = 0; i < kOwnSecond; ++i) {
    const float4 v = loaded[i];
    store_at(tile_.second, Tile::second_place(place, i * kBackwardWarps / Tile::kHalves, 0),
             make_float4(Product::operand(v.x), Product::operand(v.y), Product::operand(v.z),
                         Product::operand(v.w)));
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::store_first(
    const FirstRows& own_first) const {
  if constexpr (kGrouped) return store_first_by_group(own_first);
  const uint32_t first = hold(Tile::first_element_lane(entry_number(g_ / 4), g_ % 4, t_));
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnFirst; ++i) {
      store_at(tile_.first,
               Tile::first_element_place(first, i) + Tile::first_place(0, half * kBackwardWarps, 0),
               Product::operand(own_first.rows[half][i]));
    }
  }
}

}  // namespace flowtt::cuda
