// The contraction of lookups that have been grouped and folded: rows of bags of several lookups are
// buffered while there are slots for them, and added to their bags' sums when there are none.

#pragma once

#include "tiled_bins.cuh"
#include "tiled_contract.cuh"

namespace flowtt::cuda {

// Neighbours in the overflow have little in common: a warp that had a whole window of them would be
// the last to finish.
inline constexpr int32_t kOverflowWindow = 8;

__device__ __forceinline__ int32_t overflow_windows(const BinIndex& bins, int f) {
  return (bins.overflow[f] + kOverflowWindow - 1) / kOverflowWindow;
}

// Slots of the block, in shared memory, for rows whose lookups have brought none.
struct BlockSlots {
  uint32_t first;
  uint32_t count;
  uint32_t used;

  // The slots that grouping has left are divided among the blocks. By one thread.
  __device__ __forceinline__ void start(const TiledWorkspace& workspace) {
    const uint32_t taken = min(__ldcg(workspace.control + kSharedSlotsWord), workspace.shared_slots);
    count = workspace.shared_slots == kAnySlots ? 0 : (workspace.row_slots - taken) / gridDim.x;
    first = taken + blockIdx.x * count;
    used = 0;
  }
};

// What a window's lookups have brought of slots, or found.
struct WindowSlots {
  int bringer;    // the lane whose lookup has brought the slot of the lane's row, or -1
  uint32_t slot;  // otherwise one of the block's, or kAddedRow
};

// Divides the lookups of a window into rows, each with one destination: those of one id that are to
// be buffered are one row if there is a slot for it, all others have rows of their own. brings:
// whether the lane's lookup has brought a slot; is_lone: its row is stored, not buffered.
__device__ __forceinline__ WindowSlots find_slots(WindowGroups& groups, bool brings, bool is_lone,
                                                  BlockSlots& slots,
                                                  const TiledWorkspace& workspace) {
  const int lane = threadIdx.x % 32;
  const uint32_t own = 1u << lane;
  const uint32_t lone = __ballot_sync(kAllLanes, is_lone);
  groups.id &= is_lone ? own : ~lone;
  WindowSlots found{-1, kAddedRow};
  if (workspace.shared_slots == kAnySlots) {
    if (!is_lone) found.bringer = lowest_lane(groups.id);
  } else {
    const uint32_t brought = __ballot_sync(kAllLanes, brings) & groups.id;
    found.bringer = lowest_lane(brought);
    const bool wants = brought == 0 && !is_lone && lowest_lane(groups.id) == lane;
    const uint32_t wanting = __ballot_sync(kAllLanes, wants);
    uint32_t first = 0;
    if (lane == 0 && wanting != 0) {
      first = atomicAdd(&slots.used, static_cast<uint32_t>(__popc(wanting)));
    }
    const uint32_t number =
        __shfl_sync(kAllLanes, first, 0) + __popc(wanting & lanes_before(lane));
    const uint32_t of_first = wants && number < slots.count ? slots.first + number : kAddedRow;
    found.slot = __shfl_sync(kAllLanes, of_first, lowest_lane(groups.id) & 31);
    if (brought == 0 && found.slot == kAddedRow) groups.id &= own;
  }
  groups.first_of_ids = __ballot_sync(kAllLanes, lowest_lane(groups.id) == lane);
  return found;
}

struct PooledWindow {
  int f;  // feature of the group
  bool in_overflow;
  int first;  // of its lookups, in the overflow or in the bins
  int count;
};

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused, int kHeld,
          int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_pooled_contract_kernel(const __grid_constant__ TiledGroup group,
                                 const __grid_constant__ BagBatch batch,
                                 const __grid_constant__ TiledRange range,
                                 const __grid_constant__ TiledWorkspace workspace,
                                 const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, kHeld>;
  using Storage = WarpStorage<Chain, kFused>;
  __shared__ Segments segments;
  __shared__ Windows windows;
  __shared__ BinIndex bins;
  __shared__ BlockSlots slots;
  extern __shared__ __align__(128) char warp_storage[];
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;  // kWarps where shared memory allows it
  Storage& storage = reinterpret_cast<Storage*>(warp_storage)[threadIdx.x / 32];
  uint32_t* const starts = reinterpret_cast<uint32_t*>(warp_storage + warps * sizeof(Storage));

  for (int i = lane; i < kWindow + kTileLookups; i += 32) storage.plan.first[i] = 0;
  load_segments(segments, group, batch, range);
  // Offsets out of order can make features overlap; grouping reports them.
  if (segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
  if (threadIdx.x < 32) {
    const int f = min(lane, group.count - 1);
    const BinPlaces places =
        find_bin_places(group, segments.first_entry[f + 1] - segments.first_entry[f]);
    if (lane < group.count) bins.places[lane] = places;
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_dependent_launch();
  if (threadIdx.x == blockDim.x - 1) slots.start(workspace);
  index_bins(bins, starts, group.count, range.bins, workspace.bin_counts);
  divide_into_windows(
      windows, group.count, warps, range.disabled, [&](int f) { return bins.in_bins[f]; },
      [&](int f) { return overflow_windows(bins, f); });
  WindowQueue queue(windows, workspace.control, warps);

  // Windows of a feature's overflow come first.
  const auto locate = [&](int32_t window) {
    int f = 0;
    while (windows.first_window[f + 1] <= window) ++f;
    const int number = window - windows.first_window[f];
    const int others = overflow_windows(bins, f);
    if (number < others) {
      const int begin = number * kOverflowWindow;
      return PooledWindow{f, true, begin, min(kOverflowWindow, bins.overflow[f] - begin)};
    }
    const int begin = (number - others) * windows.size;
    return PooledWindow{f, false, begin, min(windows.size, bins.in_bins[f] - begin)};
  };
  const auto find_own = [&](const PooledWindow& window) {
    const int32_t number = window.first + min(lane, window.count - 1);
    if (window.in_overflow) {
      const uint32_t place = static_cast<uint32_t>(segments.first_entry[window.f] + number);
      return BinnedPlace{workspace.overflow + place, -1, place};
    }
    return find_binned(bins, starts, workspace, window.f, range.bins, number);
  };
  const uint32_t unused = shared_address(&storage.plan.unused[lane]);
  typename Chain::Second second;
  uint32_t resident = ~0u;  // the slice in `second`
  while (queue.take()) {
    const PooledWindow window = locate(queue.window());
    const TiledFeature& feature = group.features[window.f];
    const int count = window.count;
    const BinnedPlace place = find_own(window);
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(place.lookup));
    queue.ask();
    const BinnedLookup binned{words.x, words.y};
    const uint32_t position = binned.place & kPositionMask;
    const GroupedLookup lookup{binned.outer, second_digit(binned, place, feature, workspace),
                               position, __ldg(workspace.samples + position)};
    const LookupScale scale = load_scale(lookup, feature, workspace, nullptr, 0);
    const bool exists = lane < count;
    const bool is_lone = (binned.place & kLoneBit) != 0;
    const bool brings = exists && (binned.place & kSharedBit) != 0;
    uint32_t own_slot = position;
    if (brings && workspace.shared_slots != kAnySlots) {
      own_slot = __ldcg(&workspace.row_of_lookup[position].x);
    }
    // That of the first tile, on its way during planning.
    const uint32_t slice = second_slice<Chain>(feature, __shfl_sync(kAllLanes, lookup.i2, 0));
    if (slice != resident) Chain::load_second(second, workspace, slice, lane, unused);
    __syncwarp();  // the last window's plan has been read
    WindowGroups groups = group_window(lookup, count, range.disabled);
    const WindowSlots found = find_slots(groups, brings, is_lone, slots, workspace);
    plan_window<Chain>(storage.plan, lookup, groups, feature, range, [&] {
      const uint32_t brought = __shfl_sync(kAllLanes, own_slot, found.bringer & 31);
      const uint32_t slot = found.bringer >= 0 ? brought : found.slot;
      const float factor = factor_of(scale);
      if (exists && !is_lone) {
        constexpr float kUnscale = Chain::kParts == 1 ? 1 << kBufferedRowShift : 1;
        workspace.row_of_lookup[position] =
            make_uint2(slot, slot == kAddedRow ? 0u : __float_as_uint(factor * kUnscale));
      }
      if (slot != kAddedRow) {
        return RowDestination{buffered_row<Chain>(workspace, slot), buffered_row_scale<Chain>(),
                              kBufferRow};
      }
      const float weight =
          workspace.factors != nullptr ? __ldg(workspace.factors + position) : 1.0f;
      return plan_lookup(lookup.sample, factor * weight, feature, range, workspace, output);
    });
    __syncwarp();
    queue.advance();
    if (queue.owns()) touch(unused, find_own(locate(queue.window())).lookup);
    contract_planned<Chain, kExact, kFused, true>(storage, feature, workspace, output, second,
                                                  resident);
  }
  wait_for_touched();
}

}  // namespace flowtt::cuda
