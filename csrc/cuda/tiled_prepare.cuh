// The second launch of the preparation: some blocks find where the bins of each chunk start, the
// others pack cores. None waits for another.

#pragma once

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

// The grid: `starting` blocks that find starts, then those that take pieces of packing in turn.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace, int32_t starting,
                         int32_t packing_pieces) {
  __shared__ PrepareScratch<Packing> scratch;
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < starting) {
    find_starts(scratch.starts, group, batch, range, workspace, block);
    return;
  }
  const int32_t packing = static_cast<int32_t>(gridDim.x) - starting;
#pragma unroll 1
  for (int32_t piece = block - starting; piece < packing_pieces; piece += packing) {
    pack_piece<Packing>(group, workspace, scratch.packing, piece);
  }
  // The end of this launch is to mean the end of the one before.
  wait_for_previous_kernel();
}

}  // namespace flowtt::cuda
