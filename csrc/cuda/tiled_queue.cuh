// Which windows a warp works on. Every block owns a contiguous range of them, which its warps take
// one by one from the block's queue; a warp that finds its queue empty takes from another block's.

#pragma once

#include "tiled_segments.cuh"

namespace flowtt::cuda {

inline constexpr int kWindow = 32;
inline constexpr int kMinWindow = 8;

// The counters of `control`, at most this many: how many windows of each block's range have been
// taken beside the first of each warp, which need no asking.
inline constexpr int kMaxQueues = 256;

// In shared memory. Windows do not cross features: first_window[f] is the first of feature f.
struct Windows {
  int32_t first_window[kTiledFeaturesPerLaunch + 1];
  int32_t entries[kTiledFeaturesPerLaunch];  // of each feature
  int32_t size;                              // lookups of all but a feature's last
  int32_t per_block;
  int32_t remainder;  // blocks [0, remainder) have one window more
  bool has_queues;    // otherwise the windows of a warp are known beforehand

  __device__ __forceinline__ int32_t begin_of(int32_t block) const {
    return per_block * block + min(block, remainder);
  }
};

// Full windows find most ids and prefixes in common, but small batches are better spread over all
// warps. count(f): entries of feature f; more(f): windows that it has ahead of theirs, of other
// entries. Called by all threads; ends with a barrier.
template <typename Count, typename More>
__device__ __forceinline__ void divide_into_windows(Windows& windows, int features, int warps,
                                                    uint32_t disabled, Count&& count, More&& more) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const int entries = lane < features ? count(lane) : 0;
    const int others = lane < features ? more(lane) : 0;
    const int total = __reduce_add_sync(kAllLanes, entries + others * kWindow);
    const int all_warps = warps * gridDim.x;
    // As many windows for each warp.
    const int rounds = max((total + all_warps * kWindow - 1) / (all_warps * kWindow), 1);
    const int size =
        min(max((total + all_warps * rounds - 1) / (all_warps * rounds), kMinWindow), kWindow);
    const int up_to = inclusive_sum(others + (entries + size - 1) / size);
    if (lane < features) {
      windows.first_window[lane + 1] = up_to;
      windows.entries[lane] = entries;
    }
    if (lane == features - 1) {
      const int blocks = gridDim.x;
      windows.first_window[0] = 0;
      windows.size = size;
      windows.per_block = up_to / blocks;
      windows.remainder = up_to % blocks;
      windows.has_queues = (disabled & kStealingDisabled) == 0 && up_to > blocks * warps;
    }
  }
  __syncthreads();
}

template <typename Count>
__device__ __forceinline__ void divide_into_windows(Windows& windows, int features, int warps,
                                                    uint32_t disabled, Count&& count) {
  divide_into_windows(windows, features, warps, disabled, count, [](int) { return 0; });
}

// One warp's view; called by whole warps.
class WindowQueue {
 public:
  __device__ __forceinline__ WindowQueue(const Windows& windows, uint32_t* counters, int warps)
      : windows_(windows), counters_(counters), warps_(warps), owner_(blockIdx.x) {
    window_ = windows.begin_of(owner_) + threadIdx.x / 32;
  }

  // False when there are no windows left.
  __device__ __forceinline__ bool take() { return owns() || (windows_.has_queues && steal()); }
  // Whether take will leave the window as it is.
  __device__ __forceinline__ bool owns() const { return window_ < windows_.begin_of(owner_ + 1); }
  // Draws the ticket of the next window, some time before it is needed by advance.
  __device__ __forceinline__ void ask() {
    if (windows_.has_queues && threadIdx.x % 32 == 0) ticket_ = atomicAdd(counters_ + owner_, 1u);
  }
  __device__ __forceinline__ int32_t window() const { return window_; }
  __device__ __forceinline__ void advance() {
    window_ = windows_.has_queues ? windows_.begin_of(owner_) + warps_ +
                                        static_cast<int32_t>(__shfl_sync(kAllLanes, ticket_, 0))
                                  : window_ + warps_;
  }

 private:
  // Takes a window of another block: the next one that has some left, so that not all warps that
  // run dry meet at the same queue.
  __device__ __forceinline__ bool steal() {
    const int32_t lane = threadIdx.x % 32;
    const int32_t blocks = gridDim.x;
    for (;;) {
      constexpr int32_t kRounds = kMaxQueues / 32;
      uint32_t taken[kRounds];
#pragma unroll
      for (int32_t i = 0; i < kRounds; ++i) {
        taken[i] = __ldcg(counters_ + min(32 * i + lane, blocks - 1));
      }
      uint32_t nearest = ~0u;  // distance << 8 | block
#pragma unroll
      for (int32_t i = 0; i < kRounds; ++i) {
        const int32_t block = min(32 * i + lane, blocks - 1);
        const int32_t windows = windows_.per_block + (block < windows_.remainder ? 1 : 0);
        const int32_t distance = block - owner_ + (block < owner_ ? blocks : 0);
        if (windows > warps_ + static_cast<int32_t>(taken[i])) {
          nearest = min(nearest, static_cast<uint32_t>(distance) << 8 | block);
        }
      }
      nearest = __reduce_min_sync(kAllLanes, nearest);
      if (nearest == ~0u) return false;
      owner_ = nearest & 0xffu;
      ask();
      advance();
      if (window_ < windows_.begin_of(owner_ + 1)) return true;
    }
  }

  const Windows& windows_;
  uint32_t* counters_;
  int32_t warps_;
  int32_t owner_;
  int32_t window_;
  uint32_t ticket_ = 0;
};

}  // namespace flowtt::cuda
