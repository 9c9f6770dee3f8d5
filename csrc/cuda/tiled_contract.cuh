// The second launch of the tiled forward path: persistent blocks whose warps take windows of
// sorted lookups and compute their rows.

#pragma once

#include <cstddef>

#include "tiled_checkpoints.cuh"
#include "tiled_emission.cuh"
#include "tiled_tile.cuh"

namespace flowtt::cuda {

// A warp's shared memory.
template <typename Chain, bool kFused>
struct __align__(128) WarpStorage {
  char tile[kFused ? Chain::kTile : 0];
  WindowPlan plan;
};

// Computes the rows of a planned window. `plan`: address of the WindowPlan.
template <typename Chain, bool kExact, typename Tile>
__device__ __forceinline__ void contract_window(const Tile& tile, uint32_t plan, uint32_t lane,
                                                typename Chain::Second& second, uint32_t& resident,
                                                const TiledWorkspace& workspace,
                                                const RowEmitter<Chain, kExact>& emitter) {
  const Tile read_tile = tile.at(Chain::read_offset(lane));
  const uint32_t third_lane = Chain::third_offset(lane);
  const auto first_slice = [&](uint32_t tile_number, uint32_t x) {
    return load_shared_word(plan + offsetof(WindowPlan, first) +
                            (tile_number * kTileLookups + x) * sizeof(uint32_t));
  };
  const auto load_first = [&](typename Chain::First& first, uint32_t tile_number) {
    Chain::load_first(
        first, workspace,
        first_slice(tile_number, Chain::own_prefix(lane)) + Chain::first_offset(lane));
  };
  uint32_t row_address = plan + offsetof(WindowPlan, rows);
  uint32_t place[kRowsAhead];
  typename Chain::Third third[kRowsAhead];
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) {
    const uint2 row = load_shared_pair(row_address + i * sizeof(PlannedRow));
    Chain::load_third(third[i], workspace, row.x + third_lane);
    place[i] = row.y;
  }
  typename Chain::First first;
  load_first(first, 0);
  typename Chain::Prefix prefix;
  const auto second_slice = [&](uint32_t number) {
    return load_shared_word(plan + offsetof(WindowPlan, second) + number * sizeof(uint32_t));
  };
  bool publishes = false;
  if ((place[0] & kHeavyPrefix) != 0) {
    const Checkpoint<Chain> checkpoint(workspace, first_slice(0, 0), second_slice(0));
    const CheckpointState state = checkpoint.find();
    publishes = state == CheckpointState::kOwned;
    if (state == CheckpointState::kReady) {
      checkpoint.load(prefix);
      place[0] &= ~(kFirstOfTile | kFirstOfPrefix);
    }
  }
  // Computes one row and replaces it by the one that far ahead. True after the last.
  const auto step = [&](uint32_t& place, typename Chain::Third& third) {
    const uint32_t own_place = place;
    if ((own_place & kFirstOfTile) != 0) {
      const uint32_t number = own_place >> 8 & 0xffu;
      const uint32_t slice = second_slice(number) + Chain::second_offset(lane);
      if (slice != resident) {
        Chain::load_second(second, workspace, slice);
        resident = slice;
      }
      __syncwarp();  // the last tile has been read
      Chain::compute_prefixes(tile, lane, first, second, workspace, slice);
      // After the last tile, those of an earlier window.
      load_first(first, number + 1);
      __syncwarp();
      // Here too, so that `prefix` needs no registers meanwhile.
      Chain::load_prefix(prefix, read_tile, own_place >> 16);
    } else if ((own_place & kFirstOfPrefix) != 0) {
      Chain::load_prefix(prefix, read_tile, own_place >> 16);
    }
    const uint2 target = load_shared_pair(row_address + offsetof(PlannedRow, target));
    const uint32_t factor = load_shared_word(row_address + offsetof(PlannedRow, factor));
    row_address += sizeof(PlannedRow);
    const uint2 next = load_shared_pair(row_address + (kRowsAhead - 1) * sizeof(PlannedRow));
    float columns[4];
    Chain::compute_row(columns, prefix, third);
    Chain::load_third(third, workspace, next.x + third_lane);
    place = next.y;
    emitter.emit(columns, own_place, static_cast<uint64_t>(target.y) << 32 | target.x,
                 __uint_as_float(factor));
    return (own_place & kLastRow) != 0;
  };
  // Each place of the unrolled loop has registers of its own for what is on its way.
  static_assert(kRowsAhead == 2);
  while (!step(place[0], third[0]) && !step(place[1], third[1])) {
  }
  if (publishes) {
    Checkpoint<Chain>(workspace, first_slice(0, 0), second_slice(0)).publish(prefix);
  }
}

// What a plan needs before the warp's first: slices that are loaded ahead of tiles that are not
// there.
__device__ __forceinline__ void clear_plan(WindowPlan& plan) {
  for (int tile = threadIdx.x % 32; tile <= kWindow; tile += 32) {
    for (int x = 0; x < kTileLookups; ++x) plan.first[tile][x] = 0;
  }
}

// Plans a window and computes its rows; see plan_window. queue: where the warp asks for the next.
template <typename Chain, bool kExact, bool kFused, typename Queue>
__device__ __forceinline__ void work_on_window(WarpStorage<Chain, kFused>& storage,
                                               const GroupedLookup& lookup, float weight,
                                               const TiledFeature& feature, const TiledRange& range,
                                               const TiledWorkspace& workspace,
                                               const PooledOutput& output, int first_entry,
                                               int count, int32_t* used_slots, Queue& queue,
                                               typename Chain::Second& second, uint32_t& resident) {
  using Storage = WarpStorage<Chain, kFused>;
  __syncwarp();  // the last window's plan has been read
  plan_window<Chain>(storage.plan, lookup, weight, feature, range, workspace, output, first_entry,
                     count, used_slots);
  __syncwarp();
  queue.ask();
  // Held from here on only: planning needs registers too.
  const uint32_t own_lane = hold(threadIdx.x % 32);
  const uint32_t own_storage = hold(shared_address(&storage));
  const uint32_t plan = own_storage + offsetof(Storage, plan);
  const RowEmitter<Chain, kExact> emitter(feature, range, workspace, output, storage.plan,
                                          own_lane);
  if constexpr (kFused) {
    contract_window<Chain, kExact>(SharedTile{own_storage}, plan, own_lane, second, resident,
                                   workspace, emitter);
  } else {
    char* const tile =
        static_cast<char*>(workspace.scratch) +
        (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * static_cast<uint32_t>(Chain::kTile);
    contract_window<Chain, kExact>(ScratchTile{reinterpret_cast<uint64_t>(tile)}, plan, own_lane,
                                   second, resident, workspace, emitter);
  }
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused, int kHeld,
          int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_contract_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  using Storage = WarpStorage<Chain, kFused>;
  __shared__ Segments segments;
  __shared__ Windows windows;
  __shared__ int32_t used_slots;
  extern __shared__ __align__(128) char warp_storage[];
  const int lane = threadIdx.x % 32;
  Storage& storage = reinterpret_cast<Storage*>(warp_storage)[threadIdx.x / 32];

  allow_dependent_launch();
  if (threadIdx.x == 0) used_slots = 0;
  clear_plan(storage.plan);
  load_segments(segments, group, batch, range);
  // Offsets out of order can make features overlap; the preparation reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  const int warps = blockDim.x / 32;  // kWarps where shared memory allows it
  divide_into_windows(windows, segments, group.count, warps, range.disabled);
  WindowQueue queue(windows, workspace.control, warps);
  wait_for_previous_kernel();

  typename Chain::Second second;
  uint32_t resident = ~0u;  // the slice in `second`
  while (queue.take()) {
    const int window = queue.window();
    int f = 0;
    while (windows.first_window[f + 1] <= window) ++f;
    const TiledFeature& feature = group.features[f];
    const int first_entry =
        segments.first_entry[f] + (window - windows.first_window[f]) * windows.size;
    const int count = min(windows.size, segments.first_entry[f + 1] - first_entry);
    const uint4 entry = __ldg(reinterpret_cast<const uint4*>(workspace.entries) + first_entry +
                              min(lane, count - 1));
    const GroupedLookup lookup{entry.x, entry.y, entry.z, entry.w};
    const float weight = workspace.factors != nullptr && lane < count
                             ? __ldg(workspace.factors + first_entry + lane)
                             : 1.0f;
    work_on_window<Chain, kExact, kFused>(storage, lookup, weight, feature, range, workspace,
                                          output, first_entry, count, &used_slots, queue, second,
                                          resident);
    queue.advance();
  }
}

}  // namespace flowtt::cuda
