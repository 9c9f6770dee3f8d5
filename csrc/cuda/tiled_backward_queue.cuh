// Which tiles a block of the backward pass works on. All blocks take them one by one from one
// queue, class after class, and each knows its next tile and that tile's entries before it has
// finished its last.

#pragma once

#include "matrix_memory.cuh"
#include "tiled_backward_tile.cuh"
#include "tiled_segments.cuh"

namespace flowtt::cuda {

// In shared memory: a tile with its entries in the order of their ranks.
struct TileSlot {
  GradientTile tile;
  GradientEntry entries[kTileEntries];

  // 0: there is no tile.
  __device__ __forceinline__ uint32_t count() const { return tile.entries >> kCountShift; }
  __device__ __forceinline__ uint32_t i2() const { return tile.second % 65536u; }
  __device__ __forceinline__ uint32_t feature() const { return tile.second / 65536u; }
};

// By the first warp of a block; one step after the other for each tile but the first.
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(const BackwardWork& work, uint2 (&classes)[32])
      : work_(work), classes_(classes), lane_(threadIdx.x % 32) {
    if (threadIdx.x >= 32) return;
    const uint32_t own = lane_ < kTileClasses ? __ldcg(work.tile_counts + lane_) : 0;
    const uint32_t up_to = inclusive_sum(own);
    const uint32_t first = lane_ < kTileClasses ? work.first_tiles[lane_] : 0;
    classes[lane_] = make_uint2(up_to, first - (up_to - own));
  }

  // The block's first tile. A barrier must follow.
  __device__ __forceinline__ void start(TileSlot& slot) {
    ask();
    find(blockIdx.x);
    fetch(slot);
    wait_for_copies();
  }
  // Starts to find out which tile is next, and asks for the number of the one after it.
  __device__ __forceinline__ void advance() {
    const uint32_t number = gridDim.x + __shfl_sync(kAllLanes, number_, 0);
    ask();
    find(number);
  }
  // Starts to fetch the next tile's entries. The slot has been read.
  __device__ __forceinline__ void fetch(TileSlot& slot) {
    if (lane_ == 0) slot.tile = tile_;
    if (lane_ < tile_.entries >> kCountShift) {
      const uint32_t first = tile_.entries % (1u << kCountShift);
      copy_async_8(shared_address(&slot.entries[lane_]), work_.entries + first + lane_);
    }
  }

 private:
  __device__ __forceinline__ void ask() {
    if (lane_ == 0) number_ = atomicAdd(work_.taken_tiles, 1u);
  }
  __device__ __forceinline__ void find(uint32_t number) {
    tile_ = {0, 0};
    const uint2 own = classes_[lane_];
    const uint32_t later = __ballot_sync(kAllLanes, number < own.x);
    const uint32_t place = number + __shfl_sync(kAllLanes, own.y, (__ffs(later) - 1) & 31);
    if (later != 0) {
      const uint2 words = __ldcg(reinterpret_cast<const uint2*>(work_.tiles) + place);
      tile_ = {words.x, words.y};
    }
  }

  const BackwardWork& work_;
  // Of the lane's class, or of all classes: {tiles up to its last, where its tiles are, less the
  // number of the first}.
  uint2 (&classes_)[32];
  const uint32_t lane_;
  uint32_t number_ = 0;  // of the tile after the next, beside the first of each block
  GradientTile tile_;
};

}  // namespace flowtt::cuda
