// The first launch of the tiled forward path. Clusters sort lookups; the other blocks check
// offsets, clear what will be added to, and pack cores. None waits for another kind.

#pragma once

#include "tiled_forward.h"
#include "tiled_grouping.cuh"
#include "tiled_packing.cuh"

namespace flowtt::cuda {

constexpr int kPrepareBlocksPerMultiprocessor = 2;

constexpr int32_t kMaxBagsPerPiece = 2 * kPrepareThreads;

// The grid: sorting blocks, then the others, which take pieces of work in turn.
struct PrepareBlocks {
  int32_t sorting;
  int32_t parts_shift;  // log2 of the clusters that sort one run
  int32_t clearing_pieces;
  int32_t packing_pieces;
  int32_t pieces_per_feature;  // of clearing
  int32_t bags_per_piece;      // that one looks at, a multiple of kPrepareWarps
  bool clears_sums;
};

inline __device__ __noinline__ void trap_on_bad_bag(const TiledFeature& feature, int64_t sample,
                                                    int64_t begin, int64_t end, int64_t nnz) {
  printf(
      "flowtt: offsets of feature %d (table %d), bag %lld: [%lld, %lld) is not a range of the "
      "%lld indices; offsets must start at 0, not decrease, and end at the number of indices\n",
      feature.feature, feature.table, static_cast<long long>(sample), static_cast<long long>(begin),
      static_cast<long long>(end), static_cast<long long>(nnz));
  __trap();
}

// Writes zeros to the elements of a row that start at `first`.
__device__ __forceinline__ void clear_row(void* data, ElementType type, int64_t first,
                                          int32_t columns) {
  const int lane = threadIdx.x % 32;
  const int64_t bytes = type == ElementType::kFloat32 ? 4 : 2;
  char* const row = static_cast<char*>(data) + first * bytes;
  const int32_t row_bytes = static_cast<int32_t>(columns * bytes);
  if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && row_bytes % 16 == 0) {
#pragma unroll 1
    for (int32_t at = lane * 16; at < row_bytes; at += 32 * 16) {
      *reinterpret_cast<uint4*>(row + at) = make_uint4(0, 0, 0, 0);
    }
  } else {
#pragma unroll 1
    for (int32_t at = lane * 2; at < row_bytes; at += 32 * 2) {
      *reinterpret_cast<uint16_t*>(row + at) = 0;
    }
  }
}

// One bag of each lane.
struct CheckedBag {
  bool exists;
  int64_t begin;
  int64_t end;
};

// Writes zeros to the rows of bags that do not have exactly one lookup, as their rows are sums, and
// notes which pieces long bags have. By a warp, for 32 samples from `warp_sample` on.
__device__ __forceinline__ void clear_warp_bags(const TiledFeature& feature, int32_t f,
                                                const TiledRange& range,
                                                const TiledWorkspace& workspace,
                                                const PooledOutput& output, bool clears_sums,
                                                int64_t warp_sample, const CheckedBag& bag) {
  const int lane = threadIdx.x % 32;
  if (workspace.piece_bags != nullptr) {
    const BagPieces pieces(range, bag.begin, bag.end);
#pragma unroll 1
    for (uint32_t bags = __ballot_sync(kAllLanes, bag.exists && pieces.is_long()); bags != 0;
         bags &= bags - 1) {
      const int source = __ffs(bags) - 1;
      const int32_t end_piece = __shfl_sync(kAllLanes, pieces.end, source);
#pragma unroll 1
      for (int32_t i = __shfl_sync(kAllLanes, pieces.first, source) + lane; i < end_piece;
           i += 32) {
        workspace.piece_bags[i] = make_uint2(f, static_cast<uint32_t>(warp_sample + source));
      }
    }
  }
  if (!clears_sums) return;
  const bool in_workspace = workspace.sums != nullptr;
#pragma unroll 1
  for (uint32_t rows = __ballot_sync(kAllLanes, bag.exists && bag.end - bag.begin != 1); rows != 0;
       rows &= rows - 1) {
    const int64_t row = warp_sample + __ffs(rows) - 1;
    clear_row(
        in_workspace ? workspace.sums : output.data,
        in_workspace ? ElementType::kFloat32 : output.type,
        (in_workspace ? row - range.first_sample : row) * output.row_stride + feature.output_column,
        feature.embedding_dim);
  }
}

// Checks the offsets of some bags, 32 a warp or twice as many.
__device__ __forceinline__ void clear_bags(const TiledGroup& group, const BagBatch& batch,
                                           const TiledRange& range, const TiledWorkspace& workspace,
                                           const PooledOutput& output, const PrepareBlocks& blocks,
                                           int32_t piece) {
  const int64_t samples = range.end_sample - range.first_sample;
  const int32_t f = piece / blocks.pieces_per_feature;
  const TiledFeature& feature = group.features[f];
  const int32_t bags_per_warp = blocks.bags_per_piece / kPrepareWarps;
  const int64_t first =
      static_cast<int64_t>(piece - f * blocks.pieces_per_feature) * blocks.bags_per_piece +
      threadIdx.x / 32 * bags_per_warp;
  const int64_t end = min(first + bags_per_warp, samples);
  const int64_t last_bag = batch.num_features * batch.batch_size - 1;
  constexpr int kBags = kMaxBagsPerPiece / kPrepareThreads;
  CheckedBag bags[kBags];
#pragma unroll
  for (int i = 0; i < kBags; ++i) {
    const int64_t within = first + i * 32 + threadIdx.x % 32;
    bags[i] = {within < end, 0, 0};
    if (!bags[i].exists) continue;
    const int64_t bag = feature.feature * batch.batch_size + range.first_sample + within;
    bags[i].begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    bags[i].end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
  }
#pragma unroll
  for (int i = 0; i < kBags; ++i) {
    const int64_t sample = range.first_sample + first + i * 32;
    if (bags[i].exists) {
      const int64_t bag = feature.feature * batch.batch_size + sample + threadIdx.x % 32;
      if (bags[i].begin < 0 || bags[i].begin > bags[i].end || bags[i].end > batch.nnz ||
          (bag == 0 && bags[i].begin != 0) || (bag == last_bag && bags[i].end != batch.nnz)) {
        trap_on_bad_bag(feature, sample + threadIdx.x % 32, bags[i].begin, bags[i].end, batch.nnz);
      }
    }
    clear_warp_bags(feature, f, range, workspace, output, blocks.clears_sums, sample, bags[i]);
  }
}

template <typename Packing>
__device__ __forceinline__ void pack_piece(const TiledGroup& group, const TiledWorkspace& workspace,
                                           typename Packing::Scratch& scratch, int32_t piece) {
  int32_t f = 0;
  while (f + 1 < group.count && group.features[f + 1].first_pack_block <= piece) ++f;
  const TiledFeature& feature = group.features[f];
  Packing::pack(feature, workspace, scratch, piece - feature.first_pack_block);
}

template <typename Packing>
struct PrepareScratch {
  GroupingScratch grouping;
  typename Packing::Scratch packing;
};

template <typename Packing>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocksPerMultiprocessor)
    tiled_prepare_kernel(const __grid_constant__ TiledGroup group,
                         const __grid_constant__ BagBatch batch,
                         const __grid_constant__ TiledRange range,
                         const __grid_constant__ TiledWorkspace workspace,
                         const __grid_constant__ PooledOutput output, PrepareBlocks blocks) {
  extern __shared__ __align__(16) char shared[];
  PrepareScratch<Packing>& scratch = *reinterpret_cast<PrepareScratch<Packing>*>(shared);
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (block < blocks.sorting) clear_counts(scratch.grouping);
  wait_for_previous_kernel();
  // Only now: the contraction reads offsets before it waits for this launch, and kernels ahead of
  // the call may have written them.
  allow_dependent_launch();
  if (block < blocks.sorting) {
    group_run(scratch.grouping, group, batch, range, workspace,
              block / static_cast<int32_t>(cluster_blocks()), blocks.parts_shift);
    return;
  }
  const int32_t others = static_cast<int32_t>(gridDim.x) - blocks.sorting;
  const int32_t thread = (block - blocks.sorting) * kPrepareThreads + threadIdx.x;
#pragma unroll 1
  for (int32_t word = thread; word < kControlWords; word += others * kPrepareThreads) {
    workspace.control[word] = 0;
  }
  if (workspace.piece_arrivals != nullptr) {
    const int64_t lookups = range.end_lookup - range.first_lookup;
#pragma unroll 1
    for (int32_t i = thread; i < lookups / kPoolPiece; i += others * kPrepareThreads) {
      workspace.piece_arrivals[i] = 0;
    }
  }
  for (int32_t piece = block - blocks.sorting;
       piece < blocks.packing_pieces + blocks.clearing_pieces; piece += others) {
    if (piece < blocks.packing_pieces) {
      pack_piece<Packing>(group, workspace, scratch.packing, piece);
    } else {
      clear_bags(group, batch, range, workspace, output, blocks, piece - blocks.packing_pieces);
    }
  }
}

}  // namespace flowtt::cuda
