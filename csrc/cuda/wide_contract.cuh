// The contraction for tables of three cores that the tilings of tiled_contract.cuh do not take:
// ranks up to 128, q1 and q2 up to 8, q3 up to 16. A block works on one tile of lookups at a time
// (wide_tile.cuh); while it does stage 2, its first warps plan the next tile and copy the slices of
// core 1 that it needs to shared memory, and every warp loads its chunk of the next G2[i2].

#pragma once

#include "tiled_segments.cuh"
#include "wide_checkpoints.cuh"
#include "wide_products.cuh"

namespace flowtt::cuda {

struct WideShared {
  Segments segments;
  WideArena arenas[kTiledFeaturesPerLaunch];
  WideTile tiles[2];
  AheadEntries ahead;
  PlanningScratch planning;
  TileQueue queue;
  Checkpoints checkpoints;
  Claim claims[2];  // of each tile, within one feature
  int32_t claim_features[2];
  int32_t rows_used;
  PartialBarrier planners;  // of the planning warps
};

constexpr int32_t kWideSharedBytes = (sizeof(WideShared) + 127) / 128 * 128;

struct ArenaBytes {
  int32_t all;
  int32_t products;  // at most, which less than all only with fusion disabled
};

__device__ __forceinline__ WideArena make_arena(const TiledFeature& feature, uint32_t base,
                                                ArenaBytes bytes, int parts, bool paired) {
  const WideShape shape(feature);
  WideArena arena;
  arena.q1 = shape.q1;
  arena.q2 = shape.q2;
  arena.q3 = shape.q3;
  arena.q1_shift = shape.q1_shift;
  arena.rows = shape.rows;
  arena.tiles3 = shape.tiles3;
  arena.third_lanes = shape.columns * 4;
  arena.buffered_shift = buffered_shift(shape.r1 * shape.r2, false);
  arena.paired = paired;
  arena.product_bytes = shape.rows * shape.steps * 64;
  arena.capacity = min(min(kMaxTilePrefixes, kMaxStackedRows >> shape.q1_shift),
                       min(bytes.all / shape.prefix_bytes(parts),
                           bytes.products / static_cast<int32_t>(arena.product_bytes * parts)));
  const int32_t whole_tiles = arena.capacity >> (4 - shape.q1_shift) << (4 - shape.q1_shift);
  arena.capacity = whole_tiles > 0 ? whole_tiles : max(arena.capacity, 1);
  arena.first = base;
  arena.first_part_bytes = (arena.capacity << shape.q1_shift) * shape.steps * 64;
  arena.products = base + parts * arena.first_part_bytes;
  arena.product_part_bytes = arena.capacity * arena.product_bytes;
  return arena;
}

// Copies the slices of core 1 of the tile's prefixes, by the planning warps.
template <int kSteps, int kParts>
__device__ __forceinline__ void copy_first(const WideTile& tile, int32_t prefixes,
                                           const WideArena& arena, const TiledFeature& feature,
                                           const TiledWorkspace& workspace) {
  constexpr int kUnits = kSteps * 4;
  const int lane = threadIdx.x % 32;
  const int32_t vectors = kUnits << arena.q1_shift;  // of a slice
  // Small slices are copied several at a time.
  const int32_t together = vectors < 32 ? 32 / vectors : 1;
  const int32_t own = lane / vectors;  // which of them is the lane's; none if >= together
  const int32_t first_vector = lane - own * vectors;
  const int32_t step = kPlanningWarps * together;
#pragma unroll 2
  for (int32_t x = threadIdx.x / 32 * together + own; x < prefixes; x += step) {
    if (own >= together) break;
    const uint32_t offset =
        feature.packed[0] + tile.i1[x] * feature.slice_halves[0] + first_vector * kVectorHalves;
    for (int32_t v = first_vector; v < vectors; v += 32) {
      const int32_t stacked = (x << arena.q1_shift) + v / kUnits;
      const uint32_t target =
          arena.first + stacked * kUnits * 16 + (v % kUnits ^ swizzle<kSteps>(stacked)) * 16;
      const uint32_t source = offset + (v - first_vector) * kVectorHalves;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const __half* packed = i == 0 ? workspace.packed_high : workspace.packed_low;
        copy_async(target + i * arena.first_part_bytes, packed + source);
      }
    }
  }
}

// The rows of a tile's distinct ids, by all warps, each taking the next that is left.
template <int kSteps, bool kThree>
__device__ __forceinline__ void compute_rows(WideTile& tile, const WideArena& arena,
                                             const TiledWorkspace& workspace) {
  using Products = WideProducts<kSteps, kThree>;
  const int lane = threadIdx.x % 32;
  const int32_t count = tile.item_count;
  const int32_t lanes = arena.third_lanes;
  const int32_t rows = arena.rows;
  const int32_t q3 = arena.q3;
  const auto take = [&] {
    int32_t number = 0;
    if (lane == 0) number = atomicAdd(&tile.next_item, 1);
    return __shfl_sync(kAllLanes, number, 0);
  };
  typename Products::Third third = {};
  int32_t number = take();
  if (number >= count) return;
  WideItem item = tile.items[number];
  Products::load_third(third, workspace, item.third, lanes);
  while (number < count) {
    number = take();
    const WideItem next = tile.items[min(number, count - 1)];
    const int32_t j3 = item.column + lane % 4 * 2;
    for (int32_t tile_row = 0; tile_row < rows; tile_row += 16) {
      float row[4];
      Products::stage2_tile(row, third, arena, arena.products + item.product, tile_row);
      // The next slice arrives while this row is written.
      if (tile_row + 16 >= rows && number < count) {
        Products::load_third(third, workspace, next.third, lanes);
      }
      const int32_t m = tile_row + lane / 4;
      const ColumnPair pairs[2] = {{m * q3 + j3, m < rows && j3 < q3, row[0], row[1]},
                                   {(m + 8) * q3 + j3, m + 8 < rows && j3 < q3, row[2], row[3]}};
      for (uint32_t entries = item.emitters; entries != 0; entries &= entries - 1) {
        write_pairs(tile.targets[item.first + __ffs(entries) - 1], pairs, j3 + 1 < q3);
      }
    }
    item = next;
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
  constexpr int32_t kScratchBytes =
      static_cast<int32_t>(kScratchBytesPerMultiprocessor) / Products::kBlocks;
  extern __shared__ __align__(128) char dynamic[];
  WideShared& shared = *reinterpret_cast<WideShared*>(dynamic);
  const uint32_t arena_base = shared_address(dynamic) + kWideSharedBytes;
  const int warp = threadIdx.x / 32;
  const bool plans = warp < kPlanningWarps;
  const bool fused = (range.disabled & kFusionDisabled) == 0;
  const Segments& segments = shared.segments;

  if (plans) clear_prefixes(shared.planning.tables[0], threadIdx.x);
  if (threadIdx.x < group.count) {
    const TiledFeature& feature = group.features[threadIdx.x];
    shared.arenas[threadIdx.x] =
        make_arena(feature, arena_base, {arena_bytes, fused ? arena_bytes : kScratchBytes}, kParts,
                   rows_are_paired(feature, output, feature.q[2]));
  }
  load_segments(shared.segments, group, batch, range);
  const int32_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // offsets out of order, reported
  wait_for_previous_kernel();

  // The last planning warp, which has the fewest entries, takes the claims. In its lane 0: the
  // ticket of its last request.
  uint32_t ticket = 0;
  // By that warp, both. The claim of a tile ends with its feature.
  const auto publish_claim = [&](const TileQueue& queue, int tile) {
    Claim claim = queue.claim();
    int32_t f = 0;
    while (f + 1 < group.count && segments.first_entry[f + 1] <= claim.begin) ++f;
    claim.end = min(claim.end, segments.first_entry[f + 1]);
    if (threadIdx.x % 32 != 0) return;
    shared.queue = queue;
    shared.claims[tile] = claim;
    shared.claim_features[tile] = f;
  };
  const auto advance = [&](int32_t entries, int tile) {
    TileQueue queue = shared.queue;
    __syncwarp();
    queue.advance(entries, ticket);
    publish_claim(queue, tile);
  };
  // By the planning warps. products: where those of the tile that is being worked on begin.
  const auto plan_next = [&](int next, uint32_t products) {
    WideTile& tile = shared.tiles[next];
    const Claim claim = shared.claims[next];
    if (claim.begin >= claim.end) {
      if (threadIdx.x == 0) tile.entries = 0;
      return;
    }
    const int32_t f = shared.claim_features[next];
    const TiledFeature& feature = group.features[f];
    const WideArena& arena = shared.arenas[f];
    const TileExtent extent = find_extent(
        tile, shared.planning, shared.planners, next, shared.ahead, arena.capacity,
        (range.disabled & kSharingDisabled) == 0, claim,
        [&](int32_t prefixes, uint32_t i1, uint32_t i2, int32_t entries, int32_t* checkpoint) {
          return shared.checkpoints.find(workspace, range, segments, f, prefixes, i1, i2,
                                         claim.begin, entries, checkpoint);
        });
    const bool copies =
        tile.source == ProductSource::kComputed || tile.source == ProductSource::kPublished;
    // The slices of another feature may need the place of products that are still read.
    const bool waits = arena.first + kParts * arena.first_part_bytes > products;
    if (copies && !waits) {
      copy_first<kSteps, kParts>(tile, extent.prefixes, arena, feature, workspace);
    }
    plan_rows<kSteps>(
        tile, shared.ahead, arena,
        EmissionContext{feature, range, workspace, output, !kThree, arena.buffered_shift,
                        claim.begin + warp * 32, Products::kBlocks, arena.paired},
        extent, &shared.rows_used);
    if (threadIdx.x == 0) {
      tile.entries = extent.entries;
      tile.prefixes = extent.prefixes;
      tile.feature = f;
      tile.first_is_missing = copies && waits;
      tile.second_offset = feature.packed[1] + extent.i2 * feature.slice_halves[1];
    }
    if (warp == kPlanningWarps - 1) advance(extent.entries, next ^ 1);
  };

  if (warp == 0) {
    if (threadIdx.x == 0) {
      shared.rows_used = 0;
      shared.planners.start(kTileEntries);
      uint32_t largest = 0;
      for (int32_t f = 0; f < group.count; ++f) {
        largest = max(largest, shared.arenas[f].product_bytes);
      }
      shared.checkpoints.start(static_cast<int32_t>(largest) * kParts);
    }
  } else if (warp == kPlanningWarps - 1) {
    TileQueue queue;
    queue.start(workspace.control, total, (range.disabled & kStealingDisabled) == 0, ticket);
    publish_claim(queue, 0);
  }
  __syncthreads();
  if (plans) {
    shared.ahead.copy(workspace, shared.claims[0]);
    wait_for_copies();
    shared.planners.wait();
    plan_next(0, UINT32_MAX);
  }
  typename Products::Second second;
  second.resident = 0xffffffffu;
  for (int current = 0;; current ^= 1) {
    wait_for_copies();
    __syncthreads();  // the tile is planned, its slices are there, the products are free
    WideTile& tile = shared.tiles[current];
    if (tile.entries == 0) break;
    const WideArena& arena = shared.arenas[tile.feature];
    if (tile.first_is_missing) {
      if (plans) {
        copy_first<kSteps, kParts>(tile, tile.prefixes, arena, group.features[tile.feature],
                                   workspace);
      }
      wait_for_copies();
      __syncthreads();
    }
    if (threadIdx.x == 0) shared.checkpoints.announce(workspace);
    const int next_tile = current ^ 1;
    if (plans) shared.ahead.copy(workspace, shared.claims[next_tile]);
    if (tile.source == ProductSource::kReloaded) {
      shared.checkpoints.reload(workspace, tile.checkpoint, arena, kParts);
    } else if (tile.source != ProductSource::kLeftBehind) {
      Products::stage1(second, tile, arena, workspace);
    }
    wait_for_copies();
    __syncthreads();  // the products are there, the slices of core 1 are free
    if (tile.source == ProductSource::kPublished) {
      shared.checkpoints.publish(workspace, tile.checkpoint, arena, kParts);
      if (threadIdx.x == 0) shared.checkpoints.note_published();
    }
    if (!fused) pass_through_memory(workspace, arena, tile.prefixes, kParts, kScratchBytes);
    if (shared.claims[next_tile].begin < shared.claims[next_tile].end) {
      const TiledFeature& next = group.features[shared.claim_features[next_tile]];
      Products::load_first_chunk(
          second, workspace, next.q[1],
          next.packed[1] + shared.ahead.entries[0].i2 * next.slice_halves[1]);
    }
    if (plans) plan_next(next_tile, arena.products);
    compute_rows<kSteps, kThree>(tile, arena, workspace);
  }
}

}  // namespace flowtt::cuda
