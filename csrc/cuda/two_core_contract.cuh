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
  uint32_t left;      // where the slice of core 1 starts, in bytes
  uint32_t right;     // of core 2
  uint32_t emitters;  // lookups of the window that the row is written for
  int32_t run_end;    // behind the last of the items from this one on with its slice of core 2
};

// The items and targets of a window, by their addresses in shared memory: left to itself, the
// compiler derives these from the block's address before every access.
struct TwoCoreWindow {
  uint32_t items;
  uint32_t targets;
  int32_t count;  // of distinct ids

  __device__ __forceinline__ TwoCoreItem item(int32_t k) const {
    const uint4 words = load_shared_vector(items + k * sizeof(TwoCoreItem));
    return {words.x, words.y, words.z, static_cast<int32_t>(words.w)};
  }
  __device__ __forceinline__ uint32_t left(int32_t k) const {
    return load_shared_word(items + min(k, count - 1) * sizeof(TwoCoreItem));
  }
  __device__ __forceinline__ RowTarget target(int32_t lookup) const {
    const uint4 words = load_shared_vector(targets + lookup * sizeof(RowTarget));
    return {reinterpret_cast<char*>(static_cast<uint64_t>(words.y) << 32 | words.x),
            __uint_as_float(words.z), static_cast<RowWrite>(words.w)};
  }
};

// Writes a row: the lane has columns j2 = 2 g, 2 g + 1 of each tile, rows j1 = 2 t and 2 t + 1.
// kDirect: all rows are whole tiles of floats and stored, item k's at target k.
template <int kTiles, bool kDirect>
__device__ __forceinline__ void write_row(const float (&rows)[kTiles][4],
                                          const TwoCoreWindow& window, int32_t k, uint32_t emitters,
                                          const TwoCoreShape& shape, int32_t tile) {
  const int lane = threadIdx.x % 32;
  const int32_t j1 = 8 * tile + 2 * (lane % 4);
  const int32_t j2 = lane / 4 * 2;
  const int32_t column = j1 * shape.q2 + j2;
  if constexpr (kDirect) {
    const RowTarget target = window.target(k);
    constexpr int32_t kColumns = 16 * kTiles;
    float* const row = reinterpret_cast<float*>(target.row) + (j1 * kColumns + j2);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      __stcs(reinterpret_cast<float2*>(row + 16 * m),
             make_float2(rows[m][0] * target.factor, rows[m][2] * target.factor));
      __stcs(reinterpret_cast<float2*>(row + kColumns + 16 * m),
             make_float2(rows[m][1] * target.factor, rows[m][3] * target.factor));
    }
  } else {
    for (; emitters != 0; emitters &= emitters - 1) {
      const RowTarget target = window.target(__ffs(emitters) - 1);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const bool exists = 16 * m + j2 < shape.q2;
        const ColumnPair pairs[2] = {
            {column + 16 * m, exists && j1 < shape.q1, rows[m][0], rows[m][2]},
            {column + shape.q2 + 16 * m, exists && j1 + 1 < shape.q1, rows[m][1], rows[m][3]}};
        write_pairs(target, pairs, 16 * m + j2 + 1 < shape.q2);
      }
    }
  }
}

// Computes and writes rows 8 tile and up of G1[i1] for all items of a window: kGroup items of one
// slice of core 2 at a time, while the next ones are on their way.
template <typename Products, int kGroup, bool kDirect>
__device__ __forceinline__ void compute_window(const TwoCoreWindow& window,
                                               typename Products::Resident& right,
                                               const typename Products::Packed& packed,
                                               const TwoCoreShape& shape, int32_t tile) {
  using Left = typename Products::Left;
  const uint32_t tile_offset = tile * Products::kTileBytes;
  const auto load = [&](Left(&group)[kGroup], int32_t first) {
    if (first >= window.count) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      Products::load_left(group[i], packed, window.left(first + i) + tile_offset);
    }
  };
  TwoCoreItem item = window.item(0);
  const auto begin_run = [&] {
    right.use(packed, item.right);
    if (item.run_end < window.count) right.prepare(packed, window.item(item.run_end).right);
  };
  // Computes the group that starts with `item`; returns the start of the next one.
  const auto compute = [&](const Left(&group)[kGroup], int32_t first) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i >= item.run_end) break;
      const uint32_t emitters = kDirect  ? 0
                                : i == 0 ? item.emitters
                                         : window.item(first + i).emitters;
      float rows[Products::kTiles][4];
      Products::multiply(rows, right.current, group[i]);
      write_row<Products::kTiles, kDirect>(rows, window, first + i, emitters, shape, tile);
    }
  };
  const auto next_group = [&](int32_t first) { return min(first + kGroup, item.run_end); };
  Left even[kGroup];
  Left odd[kGroup];
  begin_run();
  load(even, 0);
  for (int32_t k = 0; k < window.count;) {
    const auto step = [&](const Left(&group)[kGroup], Left(&ahead)[kGroup]) {
      const int32_t next = next_group(k);
      load(ahead, next);
      compute(group, k);
      k = next;
      if (k >= window.count) return;
      item = window.item(k);
      begin_run();
    };
    step(even, odd);
    if (k >= window.count) break;
    step(odd, even);
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
  const uint32_t item_address = hold(shared_address(items));  // see TwoCoreWindow
  const uint32_t target_address = hold(shared_address(targets));
  constexpr uint32_t kHalfBytes = sizeof(__half);
  if (threadIdx.x == 0) rows_used = 0;
  load_segments(segments, group, batch, range);
  const int64_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // offsets out of order, reported
  const int64_t slice = static_cast<int64_t>(blockIdx.x) * Products::kWarps + warp;
  const int64_t slices = static_cast<int64_t>(gridDim.x) * Products::kWarps;
  const int32_t warp_begin = static_cast<int32_t>(total * slice / slices);
  const int32_t warp_end = static_cast<int32_t>(total * (slice + 1) / slices);
  wait_for_previous_kernel();

  const typename Products::Packed packed(workspace);
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
        members = __match_any_sync(kAllLanes, i1 | entry.i2 << 16) & actives;  // both below 2^16
      }
      const bool leads = active && __ffs(members) - 1 == lane;
      const uint32_t leaders = __ballot_sync(kAllLanes, leads);
      const EmissionContext context{feature,   range,
                                    workspace, output,
                                    !kThree,   buffered_shift(32 * shape.steps, true),
                                    base,      Products::kBlocks,
                                    paired};
      RowTarget target{};
      const uint32_t emitters =
          plan_row(target, context, entry, active, members, weight, exponent, &rows_used);
      const bool direct = __all_sync(kAllLanes, !active || target.write == RowWrite::kFloatPairs) &&
                          whole && leaders == actives;
      const uint32_t right_offset =
          (feature.packed[1] + entry.i2 * feature.slice_halves[1]) * kHalfBytes;
      // Ids of one i2 are neighbours but for those that come again; the last item of a run of
      // equal slices is where the next leader has another one.
      const uint32_t later = lane < 31 ? leaders & (kAllLanes << (lane + 1)) : 0;
      const uint32_t next_right =
          __shfl_sync(kAllLanes, right_offset, later != 0 ? __ffs(later) - 1 : lane);
      const uint32_t run_ends =
          __ballot_sync(kAllLanes, leads && (later == 0 || next_right != right_offset));
      __syncwarp();  // the last window is done
      targets[lane] = target;
      if (leads) {
        const int end = __ffs(run_ends & (kAllLanes << lane)) - 1;  // lane of the run's last item
        items[__popc(leaders & ((1u << lane) - 1))] =
            TwoCoreItem{(feature.packed[0] + i1 * feature.slice_halves[0]) * kHalfBytes,
                        right_offset, emitters, __popc(leaders & (kAllLanes >> (31 - end)))};
      }
      __syncwarp();
      const TwoCoreWindow window{item_address, target_address, __popc(leaders)};
      for (int32_t tile = 0; tile < shape.left_tiles; ++tile) {
        if (direct) {
          compute_window<Products, Products::kGroup, true>(window, right, packed, shape, tile);
        } else {
          compute_window<Products, 1, false>(window, right, packed, shape, tile);
        }
      }
    }
  }
}

}  // namespace flowtt::cuda
