// The second launch of the tiled forward path: persistent blocks whose warps take windows of
// sorted lookups and compute their rows.

#pragma once

#include "tiled_emission.cuh"
#include "tiled_queue.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

// Windows do not cross features: first_window[f] is the number of the feature's first.
struct Windows {
  int32_t first_window[kTiledFeaturesPerLaunch + 1];
  int32_t size;  // lookups of all but a feature's last
};

// Full windows find most ids and prefixes in common, but small batches are better spread over all
// warps. Called by all threads; ends with a barrier.
__device__ __forceinline__ void divide_into_windows(Windows& windows, const Segments& segments,
                                                    int features, int warps) {
  constexpr int kMinWindow = 8;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const int total = segments.first_entry[features];
    const int all_warps = warps * gridDim.x;
    const int size = min(max((total + all_warps - 1) / all_warps, kMinWindow), kWindow);
    const int entries =
        lane < features ? segments.first_entry[lane + 1] - segments.first_entry[lane] : 0;
    int up_to = (entries + size - 1) / size;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    if (lane < features) windows.first_window[lane + 1] = up_to;
    if (lane == 0) {
      windows.first_window[0] = 0;
      windows.size = size;
    }
  }
  __syncthreads();
}

// A warp's shared memory.
template <typename Chain>
struct __align__(16) WarpStorage {
  char tile[Chain::kTile];  // P of up to four prefixes
  WindowPlan plan;
};

// Computes the rows of a planned window.
template <typename Chain, bool kExact>
__device__ __forceinline__ void contract_window(char* tile, const WindowPlan& plan,
                                                const WindowCounts& counts,
                                                typename Chain::Second& second, uint32_t& resident,
                                                const TiledWorkspace& workspace,
                                                const RowEmitter<Chain, kExact>& emitter) {
  constexpr int kAhead = 2;  // rows whose slices of core 3 are on their way
  const int lane = threadIdx.x % 32;
  const uint32_t first_lane = Chain::first_offset(lane);
  const uint32_t third_lane = Chain::third_offset(lane);
  const char* const prefix_lane = tile + Chain::prefix_offset(lane);

  // The slices of core 1 of a tile's prefixes. Places beyond the last repeat it.
  const auto load_first = [&](typename Chain::First& first, int number) {
    const uint32_t prefixes = plan.tiles[number].prefixes;
    const int x = min(static_cast<uint32_t>(lane / 8), (prefixes >> 16) - 1);
    Chain::load_first(first, workspace, plan.first[(prefixes & 0xffffu) + x] + first_lane);
  };

  typename Chain::First first;
  load_first(first, 0);
  typename Chain::Third third[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < counts.rows) Chain::load_third(third[i], workspace, plan.rows[i].third + third_lane);
  }
  typename Chain::Prefix prefix;
  int next_tile = 0;
  for (int base = 0; base < counts.rows; base += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int rank = base + i;
      if (rank >= counts.rows) break;
      const PlannedRow row = plan.rows[rank];
      if ((row.prefix & kFirstOfTile) != 0) {
        const uint32_t slice = plan.tiles[next_tile].second + Chain::second_offset(lane);
        if (slice != resident) {
          Chain::load_second(second, workspace, slice);
          resident = slice;
        }
        ++next_tile;
        __syncwarp();  // the last tile has been read
        Chain::compute_prefixes(tile, first, second, workspace, slice);
        if (next_tile < counts.tiles) load_first(first, next_tile);
        __syncwarp();
      }
      if ((row.prefix & kFirstOfPrefix) != 0) {
        Chain::load_prefix(prefix, prefix_lane + (row.prefix & kPrefixPlace));
      }
      float columns[4];
      Chain::compute_row(columns, prefix, third[i]);
      if (rank + kAhead < counts.rows) {
        Chain::load_third(third[i], workspace, plan.rows[rank + kAhead].third + third_lane);
      }
      emitter.emit(columns, row, plan);
    }
  }
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused,
          int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_contract_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts>;
  using Storage = WarpStorage<Chain>;
  __shared__ Segments segments;
  __shared__ Windows windows;
  __shared__ int32_t used_slots;
  extern __shared__ __align__(16) char warp_storage[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  Storage& storage = reinterpret_cast<Storage*>(warp_storage)[warp];

  allow_dependent_launch();
  if (threadIdx.x == 0) used_slots = 0;
  load_segments(segments, group, batch, range);
  // Offsets out of order can make features overlap; the preparation reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  divide_into_windows(windows, segments, group.count, kWarps);
  WindowQueue queue(workspace.control, windows.first_window[group.count], kWarps, range.disabled);
  wait_for_previous_kernel();

  typename Chain::Second second;
  uint32_t resident = ~0u;  // the slice in `second`
  while (queue.take()) {
    const int window = queue.window();
    const int f = __popc(__ballot_sync(
        kAllLanes, lane < group.count && windows.first_window[min(lane, kTiledFeaturesPerLaunch - 1) + 1] <= window));
    const TiledFeature& feature = group.features[f];
    const int first_entry =
        segments.first_entry[f] + (window - windows.first_window[f]) * windows.size;
    const int count = min(windows.size, segments.first_entry[f + 1] - first_entry);
    const uint4 entry = __ldg(reinterpret_cast<const uint4*>(workspace.entries) + first_entry +
                              min(lane, count - 1));
    const GroupedLookup lookup{entry.x, entry.y, entry.z, entry.w};
    // The large loads start first.
    const uint32_t slice = feature.packed[1] * static_cast<uint32_t>(sizeof(__half)) +
                           __shfl_sync(kAllLanes, lookup.i2, 0) * Chain::kSecondSlice +
                           Chain::second_offset(lane);
    if (slice != resident) {
      Chain::load_second(second, workspace, slice);
      resident = slice;
    }
    __syncwarp();  // the last window's plan has been read
    const WindowCounts counts = plan_window<Chain>(storage.plan, lookup, feature, range, workspace,
                                                   first_entry, count, &used_slots);
    __syncwarp();
    const RowEmitter<Chain, kExact> emitter(feature, range, workspace, output);
    contract_window<Chain, kExact>(storage.tile, storage.plan, counts, second, resident, workspace,
                                   emitter);
    queue.advance();
  }
}

}  // namespace flowtt::cuda
