// The second launch of the preparation: some blocks find where the bins of each chunk start, the
// others pack cores, check offsets and clear sums. None waits for another.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_packing.cuh"
#include "tiled_starts.cuh"

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

template <typename Packing>
union PrepareScratch {
  StartsScratch starts;
  typename Packing::Scratch packing;
};

// The grid: `others` blocks that take pieces of packing in turn and then pieces of clearing, and
// those that find starts, which have to wait for the launch before in any case.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ ClearingPieces clearing, int32_t others,
                         int32_t packing_pieces) {
  __shared__ PrepareScratch<Packing> scratch;
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block >= others) {
    find_starts(scratch.starts, group, batch, range, workspace, block - others);
    return;
  }
#pragma unroll 1
  for (int32_t piece = block; piece < packing_pieces; piece += others) {
    pack_piece<Packing>(group, workspace, scratch.packing, piece);
  }
  // Notes of long bags are cleared by the launch before. And the end of this launch is to mean its
  // end.
  wait_for_previous_kernel();
  // Beginning where packing has ended, so that blocks have as much to do.
  const int32_t packed = packing_pieces % others;
#pragma unroll 1
  for (int32_t piece = (block + others - packed) % others; piece < clearing.count;
       piece += others) {
    clear_bags(group, batch, range, workspace, output, clearing, piece);
  }
}

}  // namespace flowtt::cuda
