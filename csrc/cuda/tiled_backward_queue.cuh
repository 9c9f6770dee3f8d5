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
  uint32_t block;  // of the table, see tiled_backward_block.cuh

  // 0: there is no tile.
  __device__ __forceinline__ uint32_t count() const { return tile.entries >> kCountShift; }
  __device__ __forceinline__ uint32_t i2() const { return tile.second % 65536u; }
  __device__ __forceinline__ uint32_t feature() const { return tile.second / 65536u; }
};

// By the first warp of a block. For each tile but the first: ask, find, fetch, with other work
// between them, so that what each step waits for arrives meanwhile. A number is drawn no earlier
// than that: the last tiles go to blocks that have nothing else.
// kHasBlocks: a tile comes as often as tables have blocks.
template <bool kHasBlocks>
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
    find(slot, blockIdx.x);
    fetch(slot);
    wait_for_copies();
  }
  // Asks for the number of the next tile.
  __device__ __forceinline__ void ask() {
    if (lane_ == 0) number_ = gridDim.x + atomicAdd(work_.taken_tiles, 1u);
  }
  // Starts to find out which tile that is. The slot has been read.
  __device__ __forceinline__ void find(TileSlot& slot) {
    find(slot, __shfl_sync(kAllLanes, number_, 0));
  }
  // Starts to fetch its entries.
  __device__ __forceinline__ void fetch(TileSlot& slot) {
    wait_for_copies();
    __syncwarp();
    if (lane_ < slot.count()) {
      const uint32_t first = slot.tile.entries % (1u << kCountShift);
      copy_async_8(shared_address(&slot.entries[lane_]), work_.entries + first + lane_);
    }
  }
  // There is no next tile. The last block to say so clears the counters, which nobody needs then.
  __device__ __forceinline__ void leave() {
    if (lane_ != 0 || atomicAdd(work_.left_blocks, 1u) + 1 < gridDim.x) return;
    for (uint32_t i = 0; i < kTileClasses; ++i) work_.tile_counts[i] = 0;
    *work_.left_blocks = 0;
    *work_.taken_tiles = 0;
  }

 private:
  __device__ __forceinline__ void find(TileSlot& slot, uint32_t number) {
    if constexpr (kHasBlocks) {
      const uint32_t item = number;
      number /= work_.blocks;
      if (lane_ == 0) slot.block = item - number * work_.blocks;
    }
    const uint2 own = classes_[lane_];
    const uint32_t later = __ballot_sync(kAllLanes, number < own.x);
    const uint32_t place = number + __shfl_sync(kAllLanes, own.y, (__ffs(later) - 1) & 31);
    if (lane_ != 0) return;
    if (later == 0) {
      slot.tile = {0, 0};
    } else {
      copy_async_8(shared_address(&slot.tile), work_.tiles + place);
    }
  }

  const BackwardWork& work_;
  // Of the lane's class, or of all classes: {tiles up to its last, where its tiles are, less the
  // number of the first}.
  uint2 (&classes_)[32];
  const uint32_t lane_;
  uint32_t number_ = 0;  // in lane 0
};

}  // namespace flowtt::cuda
