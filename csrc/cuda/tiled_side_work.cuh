// What the blocks of a preparing launch do that have no lookups: they pack cores, clear what rows
// are added to, and check the offsets.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_packing.cuh"

namespace flowtt::cuda {

// The blocks behind those that have lookups: `packing` that take pieces of packing in turn, then
// those that take pieces of clearing and clear `cleared`.
struct SideWork {
  ClearingPieces pieces;
  ClearedVectors cleared;
  int32_t packing;
  int32_t packing_pieces;
  int32_t clearing;

  int32_t blocks() const { return packing + clearing; }
};

// block: of them. scratch: shared memory for Packing::Scratch.
template <typename Packing>
__device__ __forceinline__ void do_side_work(const SideWork& work, const TiledGroup& group,
                                             const BagBatch& batch, const TiledRange& range,
                                             const TiledWorkspace& workspace,
                                             const PooledOutput& output, void* scratch,
                                             int32_t block) {
  if (block < work.packing) {
#pragma unroll 1
    for (int32_t piece = block; piece < work.packing_pieces; piece += work.packing) {
      pack_piece<Packing>(group, workspace, *static_cast<typename Packing::Scratch*>(scratch),
                          piece);
    }
    return;
  }
  const int32_t number = block - work.packing;
#pragma unroll 1
  for (int32_t piece = number; piece < work.pieces.count; piece += work.clearing) {
    clear_bags(group, batch, range, workspace, output, work.pieces, piece);
  }
  work.cleared.clear(number, work.clearing);
}

}  // namespace flowtt::cuda
