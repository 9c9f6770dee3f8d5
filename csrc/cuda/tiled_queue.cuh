// Which windows a warp works on. Every block owns a contiguous range of them, which its warps take
// one by one from the block's queue; a warp that finds its queue empty takes from another block's.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// Counters of `control`: how many windows of each block's range have been taken beside the first
// of each warp, which need no asking.
inline constexpr int kMaxQueues = 256;

class WindowQueue {
 public:
  // `windows` of the launch, `warps` of a block. For whole warps.
  __device__ __forceinline__ WindowQueue(uint32_t* counters, int windows, int warps,
                                         uint32_t disabled)
      : counters_(counters), windows_(windows), warps_(warps), owner_(blockIdx.x) {
    const int warp = threadIdx.x / 32;
    begin_ = begin_of(owner_);
    end_ = begin_of(owner_ + 1);
    window_ = begin_ + warp;
    takes_tickets_ = (disabled & kStealingDisabled) == 0 &&
                     windows > static_cast<int>(gridDim.x) * warps;
  }

  // False when there are no windows left. Otherwise the next ticket is on its way until advance.
  __device__ __forceinline__ bool take() {
    if (window_ >= end_ && !(takes_tickets_ && steal())) return false;
    if (takes_tickets_ && threadIdx.x % 32 == 0) ticket_ = atomicAdd(counters_ + owner_, 1u);
    return true;
  }
  __device__ __forceinline__ int window() const { return window_; }
  __device__ __forceinline__ void advance() {
    window_ = takes_tickets_ ? begin_ + warps_ +
                                   static_cast<int>(__shfl_sync(kAllLanes, ticket_, 0))
                             : window_ + warps_;
  }

 private:
  __device__ __forceinline__ int begin_of(int block) const {
    return static_cast<int>(static_cast<int64_t>(windows_) * block / gridDim.x);
  }

  // Takes a window of the block that has most left. One look at all queues; the warps of a block
  // that run dry together share what they find.
  __device__ __forceinline__ bool steal() {
    const int lane = threadIdx.x % 32;
    for (;;) {
      uint32_t best = 0;  // windows left << 8 | block
      for (int block = lane; block < static_cast<int>(gridDim.x); block += 32) {
        const int left = begin_of(block + 1) - begin_of(block) - warps_ -
                         static_cast<int>(__ldcg(counters_ + block));
        if (left > 0) best = max(best, static_cast<uint32_t>(left) << 8 | block);
      }
      best = __reduce_max_sync(kAllLanes, best);
      if (best == 0) return false;
      owner_ = best & 0xffu;
      begin_ = begin_of(owner_);
      end_ = begin_of(owner_ + 1);
      if (lane == 0) ticket_ = atomicAdd(counters_ + owner_, 1u);
      window_ = begin_ + warps_ + static_cast<int>(__shfl_sync(kAllLanes, ticket_, 0));
      if (window_ < end_) return true;
    }
  }

  uint32_t* counters_;
  int windows_;
  int warps_;
  int owner_;
  int begin_;
  int end_;
  int window_;
  uint32_t ticket_ = 0;
  bool takes_tickets_;
};

}  // namespace flowtt::cuda
