// Rows of tables of two cores: a lookup is one product, G1[i1] (q1 x r) @ G2[i2] (r x q2), computed
// transposed. A warp takes equal slices of the lookups sorted by i2 and keeps G2[i2] in registers
// while i2 stays; slices of core 1 are loaded a group of lookups ahead. All lookups cost the same,
// so there is nothing to steal, and there is no prefix to share.

#pragma once

#include "tiled_segments.cuh"
#include "wide_emission.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

// Ranks up to 32 kSteps, q2 up to 16 kTiles.
template <int kSteps, int kTiles, bool kThree>
struct TwoCoreChain {
  static constexpr int kParts = kThree ? 2 : 1;
  static constexpr int kGroup = kSteps == 1 ? 4 : kSteps == 2 ? 2 : 1;  // products loaded at a time
  static constexpr int kRegisters = kParts * kSteps * (8 * kTiles + 8 * kGroup);
  static constexpr int kWarps = kRegisters >= 96 || kRegisters <= 40 ? 8 : 16;
  static constexpr int kBlocks = kRegisters > 40 ? 1 : 3;

  struct Right {
    uint32_t words[kParts][kTiles][kSteps][2][4];
  };
  struct Left {
    uint32_t words[kParts][kSteps][4];
  };

  static __device__ __forceinline__ const __half* packed(const TiledWorkspace& workspace,
                                                         int part) {
    return part == 0 ? workspace.packed_high : workspace.packed_low;
  }

  static __device__ __forceinline__ void load_right(Right& right, const TiledWorkspace& workspace,
                                                    const TwoCoreShape& shape, uint32_t offset) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const __half* slice = packed(workspace, i) + offset + lane * kVectorHalves;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (m >= shape.right_tiles || s >= shape.steps) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            load_words(right.words[i][m][s][half],
                       slice + ((m * shape.steps + s) * 2 + half) * 32 * kVectorHalves);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void load_left(Left& left, const TiledWorkspace& workspace,
                                                   int32_t steps, uint32_t offset) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (s >= steps) continue;
        load_words(left.words[i][s], packed(workspace, i) + offset + s * 32 * kVectorHalves +
                                         lane * kVectorHalves);
      }
    }
  }

  static __device__ __forceinline__ void multiply(float (&row)[4], const Right& right, int m,
                                                  const Left& left, int32_t steps, int right_part,
                                                  int left_part) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s >= steps) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_add(row, right.words[right_part][m][s][half],
                     left.words[left_part][s][2 * half], left.words[left_part][s][2 * half + 1]);
      }
    }
  }
};

// One window of a warp: up to 32 lookups of a feature, a lane each.
template <typename Chain, int kSteps, int kTiles, bool kThree>
struct TwoCoreWindow {
  const EmissionContext& context;
  const TwoCoreShape& shape;
  const RowTarget* targets;
  uint32_t left_offset;
  uint32_t i2;
  uint32_t emitters;  // of the lane's id, if the lane is the first that has it
  bool paired;

  // Rows of 8 j1, for the distinct ids one after the other.
  struct Cursor {
    uint32_t todo;
    int tile;
  };

  // The number of a product: its lane and tile, or -1 behind the last one.
  __device__ __forceinline__ int take(Cursor& cursor) const {
    if (cursor.todo == 0) return -1;
    const int item = (__ffs(cursor.todo) - 1) | cursor.tile << 8;
    if (++cursor.tile == shape.left_tiles) {
      cursor.tile = 0;
      cursor.todo &= cursor.todo - 1;
    }
    return item;
  }

  __device__ __forceinline__ void load_group(typename Chain::Left (&left)[Chain::kGroup],
                                             int (&items)[Chain::kGroup], Cursor& cursor) const {
#pragma unroll
    for (int i = 0; i < Chain::kGroup; ++i) {
      items[i] = take(cursor);
      const uint32_t offset = __shfl_sync(kAllLanes, left_offset, items[i] & 31);
      if (items[i] < 0) continue;
      Chain::load_left(left[i], context.workspace, shape.steps,
                       offset + (items[i] >> 8) * shape.steps * 32 * kVectorHalves);
    }
  }

  __device__ __forceinline__ void multiply_group(const typename Chain::Left (&left)[Chain::kGroup],
                                                 const int (&items)[Chain::kGroup],
                                                 typename Chain::Right& right,
                                                 int32_t& resident) const {
#pragma unroll
    for (int i = 0; i < Chain::kGroup; ++i) {
      if (items[i] < 0) return;
      const int32_t second = __shfl_sync(kAllLanes, i2, items[i] & 31);
      if (second != resident) {
        Chain::load_right(right, context.workspace, shape,
                          context.feature.packed[1] + second * context.feature.slice_halves[1]);
        resident = second;
      }
      float rows[kTiles][4] = {};
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (kThree) {
          Chain::multiply(rows[m], right, m, left[i], shape.steps, 0, 1);
          Chain::multiply(rows[m], right, m, left[i], shape.steps, 1, 0);
        }
        Chain::multiply(rows[m], right, m, left[i], shape.steps, 0, 0);
      }
      emit(rows, items[i] >> 8, __shfl_sync(kAllLanes, emitters, items[i] & 31));
    }
  }

  // The lane has columns j2 = 2 g, 2 g + 1 of each tile, for rows j1 = 2 t and 2 t + 1.
  __device__ __forceinline__ void emit(const float (&rows)[kTiles][4], int tile,
                                       uint32_t lanes) const {
    const int lane = threadIdx.x % 32;
    const int j1 = 8 * tile + 2 * (lane % 4);
    for (; lanes != 0; lanes &= lanes - 1) {
      const RowTarget target = targets[__ffs(lanes) - 1];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const int j2 = 16 * m + lane / 4 * 2;
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          if (j2 >= shape.q2 || j1 + next >= shape.q1) continue;
          emit_pair(target, paired, j2 + 1 < shape.q2, context.output.type,
                    context.rows_are_half, (j1 + next) * shape.q2 + j2, rows[m][next],
                    rows[m][next + 2]);
        }
      }
    }
  }
};

template <int kSteps, int kTiles, bool kThree>
__global__ void __launch_bounds__(TwoCoreChain<kSteps, kTiles, kThree>::kWarps * 32,
                                  TwoCoreChain<kSteps, kTiles, kThree>::kBlocks)
    two_core_kernel(const __grid_constant__ TiledGroup group,
                    const __grid_constant__ BagBatch batch,
                    const __grid_constant__ TiledRange range,
                    const __grid_constant__ TiledWorkspace workspace,
                    const __grid_constant__ PooledOutput output) {
  using Chain = TwoCoreChain<kSteps, kTiles, kThree>;
  using Window = TwoCoreWindow<Chain, kSteps, kTiles, kThree>;
  __shared__ Segments segments;
  __shared__ RowTarget all_targets[Chain::kWarps][32];
  __shared__ int32_t rows_used;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  RowTarget* const targets = all_targets[warp];
  if (threadIdx.x == 0) rows_used = 0;
  load_segments(segments, group, batch, range);
  const int64_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // offsets out of order, reported
  const int64_t slice = static_cast<int64_t>(blockIdx.x) * Chain::kWarps + warp;
  const int64_t slices = static_cast<int64_t>(gridDim.x) * Chain::kWarps;
  const int32_t warp_begin = static_cast<int32_t>(total * slice / slices);
  const int32_t warp_end = static_cast<int32_t>(total * (slice + 1) / slices);
  wait_for_previous_kernel();

  typename Chain::Right right;
  for (int32_t f = 0; f < group.count; ++f) {
    const int32_t begin = max(warp_begin, segments.first_entry[f]);
    const int32_t end = min(warp_end, segments.first_entry[f + 1]);
    if (begin >= end) continue;
    const TiledFeature& feature = group.features[f];
    const TwoCoreShape shape(feature);
    const bool paired = rows_are_paired(feature, output, shape.q2);
    int32_t resident = -1;  // i2 of the slice in registers
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
        members = __match_any_sync(kAllLanes, static_cast<unsigned long long>(entry.i2) << 32 |
                                                  entry.outer) &
                  actives;
      }
      const bool leads = active && __ffs(members) - 1 == lane;
      __syncwarp();
      const EmissionContext context{feature,
                                    range,
                                    workspace,
                                    output,
                                    !kThree,
                                    buffered_shift(32 * shape.steps, true),
                                    base,
                                    Chain::kBlocks};
      const uint32_t emitters = plan_row(targets[lane], context, entry, active, members, weight,
                                         exponent, &rows_used);
      const Window window{context,
                          shape,
                          targets,
                          feature.packed[0] + i1 * feature.slice_halves[0],
                          entry.i2,
                          emitters,
                          paired};
      __syncwarp();
      typename Window::Cursor cursor{__ballot_sync(kAllLanes, leads), 0};
      typename Chain::Left even[Chain::kGroup];
      typename Chain::Left odd[Chain::kGroup];
      int even_items[Chain::kGroup];
      int odd_items[Chain::kGroup];
      window.load_group(even, even_items, cursor);
      while (even_items[0] >= 0) {
        window.load_group(odd, odd_items, cursor);
        window.multiply_group(even, even_items, right, resident);
        if (odd_items[0] < 0) break;
        window.load_group(even, even_items, cursor);
        window.multiply_group(odd, odd_items, right, resident);
      }
    }
  }
}

}  // namespace flowtt::cuda
