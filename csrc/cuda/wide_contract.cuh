// The contraction for tables of three cores that the tilings of tiled_contract.cuh do not take:
// ranks up to 128, q1 and q2 up to 8, q3 up to 16. A block works on one tile of lookups at a time
// (wide_tile.cuh); while it does stage 2, its first warps plan the next tile, copy the slices of
// core 1 that it needs to shared memory, and every warp loads its chunk of the next G2[i2].

#pragma once

#include "tiled_segments.cuh"
#include "wide_checkpoints.cuh"
#include "wide_products.cuh"
#include "wide_queue.cuh"

namespace flowtt::cuda {

struct WideShared {
  Segments segments;
  WideTile tiles[2];
  PlanningScratch planning;
  Claim claim;
  int32_t next_feature;  // -1: no further tile
  int32_t next_i2;
  int32_t rows_used;
  int32_t checkpoint_bytes;
};

__device__ __forceinline__ WideArena wide_arena(const WideShape& shape, uint32_t base,
                                                int32_t bytes, int32_t most_product_bytes,
                                                int parts) {
  WideArena arena;
  arena.product_bytes = shape.rows * shape.steps2 * 64;
  arena.capacity = min(min(kMaxTilePrefixes, kMaxStackedRows >> shape.q1_shift),
                       min(bytes / shape.prefix_bytes(parts),
                           most_product_bytes / static_cast<int32_t>(arena.product_bytes * parts)));
  const int32_t whole_tiles = arena.capacity >> (4 - shape.q1_shift) << (4 - shape.q1_shift);
  arena.capacity = whole_tiles > 0 ? whole_tiles : max(arena.capacity, 1);
  arena.first = base;
  arena.first_part_bytes = (arena.capacity << shape.q1_shift) * shape.steps1 * 64;
  arena.products = base + parts * arena.first_part_bytes;
  arena.product_part_bytes = arena.capacity * arena.product_bytes;
  return arena;
}

__device__ __forceinline__ int32_t feature_of_entry(const Segments& segments, int32_t count,
                                                    int32_t entry) {
  int32_t f = 0;
  while (f + 1 < count && segments.first_entry[f + 1] <= entry) ++f;
  return f;
}

// Copies the slices of core 1 of the tile's prefixes, by the planning warps.
template <int kParts>
__device__ __forceinline__ void copy_first(const WideTile& tile, const WideArena& arena,
                                           const WideShape& shape, const TiledFeature& feature,
                                           const TiledWorkspace& workspace) {
  const int lane = threadIdx.x % 32;
  const int32_t units = shape.steps1 * 4;
  for (int32_t x = threadIdx.x / 32; x < tile.prefixes; x += kPlanningWarps) {
    const uint32_t offset = feature.packed[0] + tile.i1[x] * feature.slice_halves[0];
    for (int32_t v = lane; v < units << shape.q1_shift; v += 32) {
      const int32_t row = v / units;
      const int32_t stacked = (x << shape.q1_shift) + row;
      const uint32_t target = arena.first + stacked * shape.steps1 * 64 +
                              ((v - row * units) ^ swizzle(stacked, shape.steps1)) * 16;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const __half* packed = i == 0 ? workspace.packed_high : workspace.packed_low;
        copy_async(target + i * arena.first_part_bytes, packed + offset + v * kVectorHalves);
      }
    }
  }
}

// The rows of a tile's distinct ids, by all warps, each taking the next that is left.
template <int kSteps, bool kThree>
__device__ __forceinline__ void compute_rows(WideTile& tile, const WideArena& arena,
                                             const WideShape& shape, const TiledFeature& feature,
                                             const TiledWorkspace& workspace,
                                             const PooledOutput& output) {
  using Products = WideProducts<kSteps, kThree>;
  using Third = typename Products::Third;
  const int lane = threadIdx.x % 32;
  const int32_t count = tile.distinct * shape.tiles3;
  const bool paired = rows_are_paired(feature, output, shape.q3);
  const auto take = [&] {
    int32_t product = 0;
    if (lane == 0) product = atomicAdd(&tile.next_product, 1);
    return __shfl_sync(kAllLanes, product, 0);
  };
  const auto load = [&](Third& third, int32_t product) {
    if (product >= count) return;
    const int32_t leader = tile.leaders[product / shape.tiles3];
    Products::load_third(third, workspace, feature, shape, tile.i3[leader],
                         product % shape.tiles3);
  };
  const auto emit = [&](const Third& third, int32_t product) {
    const int32_t leader = tile.leaders[product / shape.tiles3];
    const int32_t x = tile.prefix_of[leader];
    const int32_t j3 = product % shape.tiles3 * 8 + lane % 4 * 2;
    for (int32_t tile_row = 0; tile_row < shape.rows; tile_row += 16) {
      float row[4];
      Products::stage2_tile(row, third, arena, shape, x, tile_row);
      const int32_t m = tile_row + lane / 4;
      for (uint32_t lanes = tile.emitters[leader]; lanes != 0; lanes &= lanes - 1) {
        const RowTarget target = tile.targets[leader / 32 * 32 + __ffs(lanes) - 1];
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          if (m + 8 * lower >= shape.rows || j3 >= shape.q3) continue;
          emit_pair(target, paired, j3 + 1 < shape.q3, output.type, !kThree,
                    (m + 8 * lower) * shape.q3 + j3, row[2 * lower], row[2 * lower + 1]);
        }
      }
    }
  };
  Third third;
  int32_t product = take();
  load(third, product);
  while (product < count) {
    const int32_t next = take();
    if constexpr (Products::kLoadsAhead) {
      Third ahead;
      load(ahead, next);
      emit(third, product);
      third = ahead;
    } else {
      emit(third, product);
      load(third, next);
    }
    product = next;
  }
}

template <int kSteps, bool kThree>
__global__ void __launch_bounds__(kWideWarps * 32, WideProducts<kSteps, kThree>::kBlocks)
    wide_contract_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output, int32_t arena_bytes) {
  using Products = WideProducts<kSteps, kThree>;
  constexpr int kParts = Products::kParts;
  __shared__ WideShared shared;
  extern __shared__ __align__(128) char dynamic[];
  const uint32_t arena_base = shared_address(dynamic);
  const int warp = threadIdx.x / 32;
  const bool plans = warp < kPlanningWarps;
  const bool fused = (range.disabled & kFusionDisabled) == 0;
  const int32_t scratch_bytes =
      static_cast<int32_t>(kScratchBytesPerMultiprocessor) / Products::kBlocks;

  if (plans) clear_planning(shared.planning, threadIdx.x, kTileEntries);
  if (threadIdx.x == 0) {
    shared.rows_used = 0;
    shared.checkpoint_bytes = checkpoint_bytes(group, kParts);
  }
  load_segments(shared.segments, group, batch, range);
  const Segments& segments = shared.segments;
  const int32_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // offsets out of order, reported
  wait_for_previous_kernel();

  Checkpoints checkpoints(workspace, range, shared.checkpoint_bytes);
  TileQueue queue(workspace.control, warp == 0 ? total : 0,
                  warp == 0 && (range.disabled & kStealingDisabled) == 0);
  if (threadIdx.x == 0) shared.claim = queue.claim();
  __syncthreads();

  AheadEntry ahead;
  int32_t ahead_feature = 0;
  const auto arena_of = [&](const WideShape& shape) {
    return wide_arena(shape, arena_base, arena_bytes, fused ? arena_bytes : scratch_bytes, kParts);
  };
  // Both by the planning warps.
  const auto load_ahead = [&] {
    const Claim claim = shared.claim;
    ahead_feature = feature_of_entry(segments, group.count, claim.begin);
    ahead.load(workspace, claim.begin, min(claim.end, segments.first_entry[ahead_feature + 1]));
  };
  const auto plan_next = [&](WideTile& tile) {
    const Claim claim = shared.claim;
    if (claim.begin >= claim.end) {
      if (threadIdx.x == 0) tile.entries = 0;
      return;
    }
    const TiledFeature& feature = group.features[ahead_feature];
    const WideShape shape(feature);
    const WideArena arena = arena_of(shape);
    plan_tile(tile, shared.planning, ahead, feature, ahead_feature, range, workspace, output,
              !kThree, Products::kBlocks, claim.begin, arena.capacity, &shared.rows_used,
              [&](int32_t prefixes, uint32_t i1, int32_t entries, int32_t* checkpoint) {
                return checkpoints.find(segments, ahead_feature, prefixes, i1, ahead.lead_i2,
                                        claim.begin, entries, checkpoint);
              });
    if (tile.source == ProductSource::kComputed || tile.source == ProductSource::kPublished) {
      copy_first<kParts>(tile, arena, shape, feature, workspace);
    }
    if (warp == 0) {
      queue.advance(tile.entries);
      if (threadIdx.x == 0) shared.claim = queue.claim();
    }
  };

  typename Products::Second second;
  second.resident = 0xffffffffu;
  if (plans) {
    load_ahead();
    plan_next(shared.tiles[0]);
  }
  for (int current = 0;; current ^= 1) {
    wait_for_copies();
    __syncthreads();  // the tile is planned, its slices are there, the products are free
    WideTile& tile = shared.tiles[current];
    if (tile.entries == 0) break;
    checkpoints.announce();
    const TiledFeature& feature = group.features[tile.feature];
    const WideShape shape(feature);
    const WideArena arena = arena_of(shape);
    if (plans) load_ahead();
    if (tile.source == ProductSource::kReloaded) {
      checkpoints.reload(tile.checkpoint, arena, kParts);
    } else if (tile.source != ProductSource::kLeftBehind) {
      Products::stage1(second, tile, arena, shape, workspace, feature);
    }
    if (threadIdx.x == 0) {
      const bool more = shared.claim.begin < shared.claim.end;
      shared.next_feature = more ? ahead_feature : -1;
      shared.next_i2 = more ? ahead.lead_i2 : 0;
    }
    __syncthreads();  // the products are there, the slices of core 1 are free
    if (tile.source == ProductSource::kPublished) {
      checkpoints.publish(tile.checkpoint, arena, kParts);
    }
    if (!fused) pass_through_memory(workspace, arena, tile.prefixes, kParts, scratch_bytes);
    if (shared.next_feature >= 0) {
      const TiledFeature& next = group.features[shared.next_feature];
      const WideShape next_shape(next);
      const typename Products::Share share(next_shape);
      if (warp < share.count()) {
        Products::load_second(second, workspace, next, next_shape, shared.next_i2,
                              warp % share.chunks);
      }
    }
    if (plans) plan_next(shared.tiles[current ^ 1]);
    compute_rows<kSteps, kThree>(tile, arena, shape, feature, workspace, output);
  }
}

}  // namespace flowtt::cuda
