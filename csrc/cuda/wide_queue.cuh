// Which lookups a block of the wide kernel works on: its own equal part of the sorted entries,
// taken in granules from a queue of its own, then granules of the blocks that have most left.

#pragma once

#include "tensor_core.cuh"
#include "tiled_params.h"

namespace flowtt::cuda {

// control: one queue a block, then the tags of the checkpoints, 64 bits each.
constexpr int32_t kQueueWords = 1024;
constexpr int32_t kCheckpointTags = (kControlWords - kQueueWords) / 2;

constexpr int32_t kGranule = 64;  // entries

// Entries [begin, end) are taken.
struct Claim {
  int32_t begin;
  int32_t end;
};

// The queues as one warp sees them; its members are the same in every lane. It rests in shared
// memory, but for the ticket that the last request brings, which may still be under way.
class TileQueue {
 public:
  __device__ __forceinline__ void start(uint32_t* queues, int32_t entries, bool steals,
                                        uint32_t& ticket) {
    queues_ = queues;
    entries_ = entries;
    steals_ = steals;
    granules_ = (entries + kGranule - 1) / kGranule;
    claim_ = spare_ = {0, 0};
    own_first_ = first(blockIdx.x);
    own_count_ = first(blockIdx.x + 1) - own_first_;
    own_left_ = own_count_ > 0;
    requested_ = 0;
    request(ticket);
    while (claim_.begin == claim_.end && refill(ticket)) {
    }
    if (requested_ == 0) request(ticket);
  }

  __device__ __forceinline__ Claim claim() const { return claim_; }

  // The next `entries` of the claim are being worked on. Granules are asked for one call before
  // they are needed, so that nothing waits for an atomic operation.
  __device__ __forceinline__ void advance(int32_t entries, uint32_t& ticket) {
    claim_.begin += entries;
    accept(ticket);
    while (claim_.begin == claim_.end && refill(ticket)) {
    }
    if (requested_ == 0) request(ticket);
  }

 private:
  // Enough for this tile and the next.
  static constexpr int32_t kAhead = 4 * kGranule;

  __device__ __forceinline__ int32_t first(int32_t block) const {
    // At most 2^20 lookups in a range and kQueueWords blocks: below 2^25.
    return static_cast<int32_t>(static_cast<uint32_t>(granules_ * block) / gridDim.x);
  }
  __device__ __forceinline__ int32_t count(int32_t block) const {
    return first(block + 1) - first(block);
  }
  // `granules` from `ticket` on of the `count` that start at `first`.
  __device__ __forceinline__ Claim range(int32_t first, int32_t count, int32_t ticket,
                                         int32_t granules) const {
    const int32_t begin = first + min(ticket, count);
    const int32_t end = min(begin + granules, first + count);
    return {min(begin * kGranule, entries_), min(end * kGranule, entries_)};
  }

  __device__ __forceinline__ void request(uint32_t& ticket) {
    const int32_t missing = kAhead - (claim_.end - claim_.begin);
    if (!own_left_ || missing <= 0 || spare_.begin < spare_.end) return;
    requested_ = (missing + kGranule - 1) / kGranule;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(queues_ + blockIdx.x, requested_);
  }

  __device__ __forceinline__ void accept(uint32_t received) {
    if (requested_ == 0) return;
    const int32_t ticket = static_cast<int32_t>(__shfl_sync(kAllLanes, received, 0));
    own_left_ = ticket + requested_ < own_count_;
    const Claim taken = range(own_first_, own_count_, ticket, requested_);
    requested_ = 0;
    if (taken.begin >= taken.end) return;
    if (claim_.begin == claim_.end) {
      claim_ = taken;
    } else if (taken.begin == claim_.end) {
      claim_.end = taken.end;
    } else {
      spare_ = taken;
    }
  }

  // Takes more when nothing is left. False: there is nothing to take.
  __device__ __forceinline__ bool refill(uint32_t& ticket) {
    if (spare_.begin < spare_.end) {
      claim_ = spare_;
      spare_ = {0, 0};
      return true;
    }
    if (requested_ == 0) request(ticket);
    if (requested_ != 0) {
      accept(ticket);
      return true;
    }
    return steals_ && steal();
  }

  __device__ __forceinline__ bool steal() {
    constexpr int32_t kStolen = 2;
    uint32_t richest = 0;  // granules left << 10 | block
    for (int32_t block = threadIdx.x % 32; block < gridDim.x; block += 32) {
      const int32_t taken =
          static_cast<int32_t>(*reinterpret_cast<volatile uint32_t*>(queues_ + block));
      const int32_t left = count(block) - taken;
      if (left > 0) richest = max(richest, static_cast<uint32_t>(left) << 10 | block);
    }
    richest = __reduce_max_sync(kAllLanes, richest);
    if (richest == 0) return false;
    const int32_t victim = static_cast<int32_t>(richest & (kQueueWords - 1));
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(queues_ + victim, kStolen);
    ticket = __shfl_sync(kAllLanes, ticket, 0);
    claim_ = range(first(victim), count(victim), static_cast<int32_t>(ticket), kStolen);
    return true;
  }

  uint32_t* queues_;
  int32_t entries_;
  int32_t granules_;
  bool steals_;
  int32_t own_first_;
  int32_t own_count_;
  bool own_left_;
  Claim claim_;
  Claim spare_;  // own granules that do not follow the claim, because others took those between
  int32_t requested_;  // granules
};

}  // namespace flowtt::cuda
