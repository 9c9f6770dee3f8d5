// Gradients of the cores of tables, seen as of three cores: persistent blocks that take tiles of
// prefixes with one i2 and recompute their prefix products on the chip. docs/kernels.md has the
// drawing.
//
//     row = P G3[i3], P = G1[i1] G2[i2]; g: gradient of the row, as a matrix [(j1, j2), j3]
//     dG3[i3] += P^T g     dP += g G3[i3]^T     dG1[i1] += dP G2[i2]^T     dG2[i2] += G1[i1]^T dP

#pragma once

#include "tiled_backward_groups.cuh"
#include "tiled_backward_loads.cuh"
#include "tiled_backward_lookups.cuh"
#include "tiled_backward_quads.cuh"
#include "tiled_backward_rows.cuh"
#include "tiled_backward_steps.cuh"
#include "tiled_backward_sums.cuh"
#include "tiled_backward_turns.cuh"
#include "tiled_backward_two_cores.cuh"

namespace flowtt::cuda {

// Blocks of a multiprocessor: while the lookups of one wait for their sums to leave, others
// multiply. As many as find registers.
template <int kRank, bool kThreeProducts, GradientShape kShape>
inline constexpr int kBackwardBlocks = kRank == 32                            ? 2
                                       : kThreeProducts || has_blocks(kShape) ? 3
                                                                              : 4;

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__global__ void __launch_bounds__(kBackwardThreads,
                                  (kBackwardBlocks<kRank, kThreeProducts, kShape>))
    tiled_backward_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BackwardPass pass) {
  using Gradients = TileGradients<core_t, kRank, kThreeProducts, kShape>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<kRank, kShape>*>(shared_bytes);
  const uint32_t warp = Gradients::uniform(threadIdx.x / 32);
  const bool leads = warp == 0;
  allow_dependent_launch();
  wait_for_previous_kernel();
  const auto gradients_of = [&](const TileSlot& slot) {
    const uint32_t f = Gradients::uniform(slot.feature());
    return Gradients(shared, slot, group.features[f], pass.targets[f], pass, warp);
  };
  TileQueue<has_blocks(kShape)> queue(pass.work, shared.classes);
  if (leads) queue.start(shared.slots[0]);
  __syncthreads();
  if (Gradients::uniform(shared.slots[0].count()) == 0) {
    if (leads) queue.leave();
    return;
  }
  typename Gradients::Ahead ahead;
  typename Gradients::FirstRows first;
  {
    const Gradients tile = gradients_of(shared.slots[0]);
    tile.store_places();
    tile.load_ahead(ahead, pass.work);
    first = tile.load_first();
    tile.store_second(ahead.second);
  }
#pragma unroll 1
  for (uint32_t number = 0;; number ^= 1) {
    Gradients tile = gradients_of(shared.slots[number]);
    TileSlot& next = shared.slots[number ^ 1];
    tile.start_lookups(ahead);
    if (leads) queue.ask();
    // The last tile has been read, and this one's slice of core 2 is there.
    __syncthreads();
    tile.compute_products(first);
    tile.compute_product_steps();
    if (leads) queue.find(next);
    __syncwarp();
    tile.work_on_lookups();
    if (leads) queue.fetch(next);
    __syncwarp();
    tile.add_gradient_steps();
    tile.add_first_gradients();
    wait_for_copies();
    __syncthreads();
    if (Gradients::uniform(next.count()) == 0) {
      if (leads) queue.leave();
      tile.add_second_gradient(tile.sum_second_gradient());
      return;
    }
    gradients_of(next).load_ahead(ahead, pass.work);
    const auto sums = tile.sum_second_gradient();
    first = gradients_of(next).load_first();
    tile.add_second_gradient(sums);
    gradients_of(next).store_second(ahead.second);
  }
}

}  // namespace flowtt::cuda
