// Gradients of the cores of tables with three cores: persistent blocks that take a granule of
// lookups, cut it into tiles of prefixes with one i2, and recompute the prefix products of a tile
// on the chip. docs/kernels.md has the drawing.
//
//     row = P G3[i3], P = G1[i1] G2[i2]; g: gradient of the row, as a matrix [(j1, j2), j3]
//     dG3[i3] += P^T g     dP += g G3[i3]^T     dG1[i1] += dP G2[i2]^T     dG2[i2] += G1[i1]^T dP

#pragma once

#include "tiled_backward_lookups.cuh"
#include "tiled_backward_sums.cuh"

namespace flowtt::cuda {

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__device__ __forceinline__ void TileGradients<core_t, kRank, kThreeProducts, kShape>::run() {
  const int32_t tiles = plan_.tile_count;
#pragma unroll 1
  for (int32_t number = 0; number < tiles; ++number) {
    const GradientTile tile = plan_.tiles[number];
    entries_ = plan_.entries + tile.x % 65536u;
    count_ = tile.x / 65536u;
    const uint32_t i2 = tile.y;
    // The last tile has been read.
    if (number > 0) __syncthreads();
    if (number == 0 || i2 != plan_.tiles[number - 1].y) {
      load_second(i2);
      clear_second_gradient();
      __syncthreads();
    }
    compute_products();
    __syncwarp();
    work_on_lookups();
    __syncwarp();
    add_first_gradients();
    __syncthreads();
    sum_second_gradient();
    if (number + 1 == tiles || i2 != plan_.tiles[number + 1].y) add_second_gradient(i2);
  }
}

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    tiled_backward_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ BackwardPass pass) {
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<kRank>*>(shared_bytes);
  allow_dependent_launch();
  load_segments(shared.segments, group, batch, range);
  wait_for_previous_kernel();
  // Offsets out of order can make features overlap; the preparation reports them.
  if (shared.segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
#pragma unroll 1
  for (int32_t number = blockIdx.x; number < pass.granules; number += gridDim.x) {
    const int32_t f = plan_granule(shared, group, workspace, pass, number);
    if (f < 0) continue;
    TileGradients<core_t, kRank, kThreeProducts, kShape>(
        shared.tile, shared.plan, group.features[f], pass.targets[f], pass.grad_output)
        .run();
  }
}

}  // namespace flowtt::cuda
