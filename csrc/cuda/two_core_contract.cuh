// Rows of tables of two cores: a lookup is one product, G1[i1] (q1 x r) @ G2[i2] (r x q2), computed
// transposed. A warp takes equal slices of the lookups sorted by i2 and keeps G2[i2] in registers
// while i2 stays; slices of core 1 are loaded a group of lookups ahead. All lookups cost the same,
// so there is nothing to steal, and there is no prefix to share.

#pragma once

#include "tiled_segments.cuh"
#include "two_core_products.cuh"
#include "wide_emission.cuh"

namespace flowtt::cuda {

// A distinct id of a warp's window of 32 lookups, in shared memory.
struct alignas(16) TwoCoreItem {
  uint32_t left;      // offset of the slice of core 1
  uint32_t right;     // of core 2
  uint32_t emitters;  // lookups of the window that the row is written for
  uint32_t unused;
};

struct TwoCoreWindow {
  const TwoCoreItem* items;
  const RowTarget* targets;
  int32_t count;      // of distinct ids
  uint32_t changes;   // items whose slice of core 2 is not the one before
};

// Writes a row: the lane has columns j2 = 2 g, 2 g + 1 of each tile, rows j1 = 2 t and 2 t + 1.
// kDirect: all rows are whole tiles of floats and stored, item k's at target k.
template <int kTiles, bool kDirect>
__device__ __forceinline__ void write_row(const float (&rows)[kTiles][4],
                                          const TwoCoreWindow& window, int32_t k,
                                          const TwoCoreShape& shape, int32_t tile) {
  const int lane = threadIdx.x % 32;
  const int32_t j1 = 8 * tile + 2 * (lane % 4);
  const int32_t j2 = lane / 4 * 2;
  const int32_t column = j1 * shape.q2 + j2;
  if constexpr (kDirect) {
    const RowTarget target = window.targets[k];
    float* const row = reinterpret_cast<float*>(target.row) + column;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      __stcs(reinterpret_cast<float2*>(row + 16 * m),
             make_float2(rows[m][0] * target.factor, rows[m][2] * target.factor));
      __stcs(reinterpret_cast<float2*>(row + shape.q2 + 16 * m),
             make_float2(rows[m][1] * target.factor, rows[m][3] * target.factor));
    }
  } else {
    ColumnPair pairs[2 * kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const bool exists = 16 * m + j2 < shape.q2;
      pairs[2 * m] = {column + 16 * m, exists && j1 < shape.q1, rows[m][0], rows[m][2]};
      pairs[2 * m + 1] = {column + shape.q2 + 16 * m, exists && j1 + 1 < shape.q1, rows[m][1],
                          rows[m][3]};
    }
    // Only the last pair of a row can lack its second column.
    const bool has_second = shape.q2 % 2 == 0 || kTiles == 1;
    for (uint32_t lanes = window.items[k].emitters; lanes != 0; lanes &= lanes - 1) {
      const RowTarget& target = window.targets[__ffs(lanes) - 1];
      if (has_second) {
        write_pairs(target, pairs, j2 + 1 < shape.q2);
      } else {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const ColumnPair own[2] = {pairs[2 * m], pairs[2 * m + 1]};
          write_pairs(target, own, 16 * m + j2 + 1 < shape.q2);
        }
      }
    }
  }
}

// Computes and writes rows 8 tile and up of G1[i1] for all items of a window.
template <typename Products, bool kDirect>
__device__ __forceinline__ void compute_window(const TwoCoreWindow& window,
                                               typename Products::Resident& right,
                                               const TwoCoreShape& shape, int32_t tile,
                                               const TiledWorkspace& workspace) {
  using Left = typename Products::Left;
  constexpr int kGroup = Products::kGroup;
  const uint32_t tile_offset = tile * shape.steps * 32 * kVectorHalves;
  const auto load = [&](Left(&group)[kGroup], int32_t first) {
    if (first >= window.count) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t left = window.items[min(first + i, window.count - 1)].left;
      Products::load_left(group[i], workspace, shape.steps, left + tile_offset);
    }
  };
  const auto compute = [&](const Left(&group)[kGroup], int32_t first) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int32_t k = first + i;
      if (k >= window.count) return;
      if ((window.changes >> k & 1) != 0) {
        const uint32_t later = k < 31 ? window.changes >> (k + 1) : 0;
        const int32_t next = later != 0 ? k + __ffs(later) : k;
        right.advance(workspace, shape, window.items[k].right, window.items[next].right);
      }
      float rows[Products::kTiles][4];
      Products::multiply(rows, right.current, group[i], shape.steps);
      write_row<Products::kTiles, kDirect>(rows, window, k, shape, tile);
    }
  };
  Left even[kGroup];
  Left odd[kGroup];
  load(even, 0);
  for (int32_t k = 0; k < window.count; k += 2 * kGroup) {
    load(odd, k + kGroup);
    compute(even, k);
    load(even, k + 2 * kGroup);
    compute(odd, k + kGroup);
  }
}

template <int kSteps, int kTiles, bool kThree>
__global__ void __launch_bounds__(TwoCoreProducts<kSteps, kTiles, kThree>::kWarps * 32,
                                  TwoCoreProducts<kSteps, kTiles, kThree>::kBlocks)
    two_core_kernel(const __grid_constant__ TiledGroup group,
                    const __grid_constant__ BagBatch batch,
                    const __grid_constant__ TiledRange range,
                    const __grid_constant__ TiledWorkspace workspace,
                    const __grid_constant__ PooledOutput output) {
  using Products = TwoCoreProducts<kSteps, kTiles, kThree>;
  __shared__ Segments segments;
  __shared__ RowTarget all_targets[Products::kWarps][32];
  __shared__ TwoCoreItem all_items[Products::kWarps][32];
  __shared__ int32_t rows_used;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  RowTarget* const targets = all_targets[warp];
  TwoCoreItem* const items = all_items[warp];
  if (threadIdx.x == 0) rows_used = 0;
  load_segments(segments, group, batch, range);
  const int64_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // offsets out of order, reported
  const int64_t slice = static_cast<int64_t>(blockIdx.x) * Products::kWarps + warp;
  const int64_t slices = static_cast<int64_t>(gridDim.x) * Products::kWarps;
  const int32_t warp_begin = static_cast<int32_t>(total * slice / slices);
  const int32_t warp_end = static_cast<int32_t>(total * (slice + 1) / slices);
  wait_for_previous_kernel();

  typename Products::Resident right;
  for (int32_t f = 0; f < group.count; ++f) {
    const int32_t begin = max(warp_begin, segments.first_entry[f]);
    const int32_t end = min(warp_end, segments.first_entry[f + 1]);
    if (begin >= end) continue;
    const TiledFeature& feature = group.features[f];
    const TwoCoreShape shape(feature);
    const bool paired = rows_are_paired(feature, output, shape.q2);
    const bool whole = shape.q1 % 8 == 0 && shape.q2 == 16 * kTiles;
    for (int32_t base = begin; base < end; base += 32) {
      const bool active = base + lane < end;
      const int32_t position = min(base + lane, end - 1);
      const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(workspace.entries + position));
      const GroupedLookup entry{loaded.x, loaded.y, loaded.z, loaded.w};
      const uint32_t i1 = entry.outer & 0xffffu;
      const int32_t exponent = __ldg(workspace.exponents + feature.exponents[0] + i1) +
                               __ldg(workspace.exponents + feature.exponents[1] + entry.i2);
      const float weight =
          workspace.factors != nullptr ? __ldg(workspace.factors + position) : 1.0f;
      const uint32_t actives = __ballot_sync(kAllLanes, active);
      uint32_t members = 1u << lane;
      if ((range.disabled & kFoldingDisabled) == 0) {
        members =
            __match_any_sync(kAllLanes, i1 | entry.i2 << 16) & actives;  // both below 2^16
      }
      const bool leads = active && __ffs(members) - 1 == lane;
      const uint32_t leaders = __ballot_sync(kAllLanes, leads);
      const int32_t count = __popc(leaders);
      const EmissionContext context{feature,
                                    range,
                                    workspace,
                                    output,
                                    !kThree,
                                    buffered_shift(32 * shape.steps, true),
                                    base,
                                    Products::kBlocks,
                                    paired};
      RowTarget target{};
      const uint32_t emitters =
          plan_row(target, context, entry, active, members, weight, exponent, &rows_used);
      const bool direct =
          __all_sync(kAllLanes, !active || target.write == RowWrite::kFloatPairs) && whole &&
          leaders == actives;
      __syncwarp();  // the last window is done
      targets[lane] = target;
      if (leads) {
        items[__popc(leaders & ((1u << lane) - 1))] =
            TwoCoreItem{feature.packed[0] + i1 * feature.slice_halves[0],
                        feature.packed[1] + entry.i2 * feature.slice_halves[1], emitters, 0};
      }
      __syncwarp();
      const uint32_t own_right = lane < count ? items[lane].right : 0;
      const uint32_t left_right = __shfl_up_sync(kAllLanes, own_right, 1);
      const TwoCoreWindow window{
          items, targets, count,
          __ballot_sync(kAllLanes, lane < count && (lane == 0 || own_right != left_right))};
      for (int32_t tile = 0; tile < shape.left_tiles; ++tile) {
        if (direct) {
          compute_window<Products, true>(window, right, shape, tile, workspace);
        } else {
          compute_window<Products, false>(window, right, shape, tile, workspace);
        }
      }
    }
  }
}

}  // namespace flowtt::cuda
