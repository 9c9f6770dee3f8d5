// The last launch of the preparation: some blocks write lookups to their places, the others check
// offsets, clear what will be added to, and pack cores. None waits for another.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_packing.cuh"
#include "tiled_scatter.cuh"

namespace flowtt::cuda {

constexpr int kPrepareBlocksPerMultiprocessor = 2;

template <typename Packing>
__device__ __forceinline__ void pack_piece(const TiledGroup& group, const TiledWorkspace& workspace,
                                           typename Packing::Scratch& scratch, int32_t piece) {
  int32_t f = 0;
  while (f + 1 < group.count && group.features[f + 1].first_pack_block <= piece) ++f;
  const TiledFeature& feature = group.features[f];
  Packing::pack(feature, workspace, scratch, piece - feature.first_pack_block);
}

// The grid: a block for each chunk, then the others, which take pieces of work in turn.
struct PrepareBlocks {
  int32_t scattering;
  int32_t packing_pieces;
  ClearingPieces clearing;
};

template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ PrepareBlocks blocks) {
  extern __shared__ __align__(16) char shared[];
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < blocks.scattering) {
    scatter_chunk(*reinterpret_cast<ScatterScratch*>(shared), group, batch, range, workspace,
                  block);
  } else {
    auto& scratch = *reinterpret_cast<typename Packing::Scratch*>(shared);
    const int32_t others = static_cast<int32_t>(gridDim.x) - blocks.scattering;
    for (int32_t piece = block - blocks.scattering;
         piece < blocks.packing_pieces + blocks.clearing.count; piece += others) {
      if (piece < blocks.packing_pieces) {
        pack_piece<Packing>(group, workspace, scratch, piece);
      } else {
        clear_bags(group, batch, range, workspace, output, blocks.clearing,
                   piece - blocks.packing_pieces);
      }
    }
  }
  // The end of this launch is to mean the end of those before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
