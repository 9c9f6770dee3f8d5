// The first launch of the preparation: some blocks partition lookups, one clears what later kernels
// count in, the others pack cores. None waits for another.

#pragma once

#include "tiled_clearing.cuh"
#include "tiled_packing.cuh"
#include "tiled_partition.cuh"

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

// Memory that is to be zeros.
struct ClearedVectors {
  uint4* first;
  int64_t count;

  // Clears every `parts`-th block's share of them. Called by all threads.
  __device__ __forceinline__ void clear(int32_t part, int32_t parts) const {
#pragma unroll 4
    for (int64_t i = int64_t{part} * kPrepareThreads + threadIdx.x; i < count;
         i += int64_t{parts} * kPrepareThreads) {
      first[i] = make_uint4(0, 0, 0, 0);
    }
  }
};

// The blocks after those that partition: what they do, one after the other.
struct OtherWork {
  int32_t packing_pieces;
  ClearedVectors counters;  // what later kernels count in
  ClearedVectors sums;
  int32_t first_clearing_block;  // of those that clear sums
  ClearingPieces bags;
};

// One of `parts` blocks' share.
template <typename Packing>
__device__ __forceinline__ void do_other_work(const TiledGroup& group,
                                              const TiledWorkspace& workspace, char* shared,
                                              const OtherWork& work, int32_t part, int32_t parts) {
#pragma unroll 1
  for (int32_t piece = part; piece < work.packing_pieces; piece += parts) {
    pack_piece<Packing>(group, workspace, *reinterpret_cast<typename Packing::Scratch*>(shared),
                        piece);
  }
  // Those that have packed least first.
  work.counters.clear(parts - 1 - part, parts);
}

// The grid: `chunks` blocks that partition, then those that divide the other work.
template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output,
                         const __grid_constant__ OtherWork work, int32_t chunks) {
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_kernel();
  // Only now: the next kernels read indices and offsets before they wait, and kernels ahead of the
  // call may have written them.
  allow_dependent_launch();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  if (block < chunks) {
    partition_chunk(*reinterpret_cast<PartitionScratch*>(shared), group, batch, range, workspace,
                    block);
  } else {
    do_other_work<Packing>(group, workspace, shared, work, block - chunks, blocks - chunks);
    clear_pieces(group, batch, range, workspace, output, work.bags, blocks - 1 - block,
                 blocks - chunks);
  }
  if (block >= work.first_clearing_block) {
    work.sums.clear(blocks - 1 - block, blocks - work.first_clearing_block);
  }
}

}  // namespace flowtt::cuda
