// What the preparation does besides sorting and packing: it clears what later kernels count in or
// add to, and checks the offsets.

#pragma once

#include <cstdio>

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

// How the bags of a launch are cut into pieces, a warp's work each.
struct ClearingPieces {
  int32_t count;
  int32_t pieces_per_feature;
  int32_t bags_per_piece;  // at most 32
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

// The bags of a piece, one of each lane. By a warp.
struct PieceBags {
  int32_t f;  // feature of the group
  int64_t sample;
  CheckedBag bag;

  __device__ __forceinline__ PieceBags(const TiledGroup& group, const BagBatch& batch,
                                       const TiledRange& range, const ClearingPieces& pieces,
                                       int32_t piece)
      : f(piece / pieces.pieces_per_feature) {
    const int32_t lane = threadIdx.x % 32;
    const int64_t first =
        static_cast<int64_t>(piece - f * pieces.pieces_per_feature) * pieces.bags_per_piece;
    sample = range.first_sample + first;
    bag = {lane < pieces.bags_per_piece && sample + lane < range.end_sample, 0, 0};
    if (bag.exists) {
      const int64_t number = group.features[f].feature * batch.batch_size + sample + lane;
      bag.begin = load_index(batch.offsets, batch.offsets_are_int64, number);
      bag.end = load_index(batch.offsets, batch.offsets_are_int64, number + 1);
    }
  }
};

// Checks the offsets of the bags of a piece, and writes zeros to the sums of those that do not have
// exactly one lookup. By a warp.
inline __device__ __noinline__ void clear_bags(const TiledGroup& group, const BagBatch& batch,
                                               const TiledRange& range,
                                               const TiledWorkspace& workspace,
                                               const PooledOutput& output,
                                               const ClearingPieces& pieces, int32_t piece) {
  const PieceBags own(group, batch, range, pieces, piece);
  const TiledFeature& feature = group.features[own.f];
  const CheckedBag& bag = own.bag;
  if (bag.exists) {
    const int64_t sample = own.sample + threadIdx.x % 32;
    const bool is_first = feature.feature == 0 && sample == 0;
    const bool is_last =
        feature.feature == batch.num_features - 1 && sample == batch.batch_size - 1;
    if (bag.begin < 0 || bag.begin > bag.end || bag.end > batch.nnz ||
        (is_first && bag.begin != 0) || (is_last && bag.end != batch.nnz)) {
      trap_on_bad_bag(feature, sample, bag.begin, bag.end, batch.nnz);
    }
  }
  if (!pieces.clears_sums) return;
  const bool in_workspace = workspace.sums != nullptr;
#pragma unroll 1
  for (uint32_t rows = __ballot_sync(kAllLanes, bag.exists && bag.end - bag.begin != 1); rows != 0;
       rows &= rows - 1) {
    const int64_t row = own.sample + __ffs(rows) - 1;
    clear_row(
        in_workspace ? workspace.sums : output.data,
        in_workspace ? ElementType::kFloat32 : output.type,
        (in_workspace ? row - range.first_sample : row) * output.row_stride + feature.output_column,
        feature.embedding_dim);
  }
}

// Notes which pieces the long bags of a piece have. By a warp.
inline __device__ __noinline__ void note_long_bags(const TiledGroup& group, const BagBatch& batch,
                                                   const TiledRange& range,
                                                   const TiledWorkspace& workspace,
                                                   const ClearingPieces& pieces, int32_t piece) {
  const PieceBags own(group, batch, range, pieces, piece);
  const BagPieces long_bag(range, own.bag.begin, own.bag.end);
#pragma unroll 1
  for (uint32_t bags = __ballot_sync(kAllLanes, own.bag.exists && long_bag.is_long()); bags != 0;
       bags &= bags - 1) {
    const int source = __ffs(bags) - 1;
    const int32_t end_piece = __shfl_sync(kAllLanes, long_bag.end, source);
#pragma unroll 1
    for (int32_t i = __shfl_sync(kAllLanes, long_bag.first, source) + threadIdx.x % 32;
         i < end_piece; i += 32) {
      workspace.piece_bags[i] = make_uint2(own.f + 1, static_cast<uint32_t>(own.sample + source));
    }
  }
}

// Checks all bags, and clears their sums. By block `part` of `parts`.
__device__ __forceinline__ void clear_pieces(const TiledGroup& group, const BagBatch& batch,
                                             const TiledRange& range,
                                             const TiledWorkspace& workspace,
                                             const PooledOutput& output,
                                             const ClearingPieces& pieces, int32_t part,
                                             int32_t parts) {
  const int32_t warps = static_cast<int32_t>(blockDim.x / 32);
#pragma unroll 1
  for (int32_t piece = part * warps + static_cast<int32_t>(threadIdx.x / 32); piece < pieces.count;
       piece += parts * warps) {
    clear_bags(group, batch, range, workspace, output, pieces, piece);
  }
}

// Notes the pieces of all long bags, in words that the launch before clears. As clear_pieces.
__device__ __forceinline__ void note_pieces(const TiledGroup& group, const BagBatch& batch,
                                            const TiledRange& range,
                                            const TiledWorkspace& workspace,
                                            const ClearingPieces& pieces, int32_t part,
                                            int32_t parts) {
  wait_for_previous_kernel();
  if (workspace.piece_bags == nullptr) return;
  const int32_t warps = static_cast<int32_t>(blockDim.x / 32);
#pragma unroll 1
  for (int32_t piece = part * warps + static_cast<int32_t>(threadIdx.x / 32); piece < pieces.count;
       piece += parts * warps) {
    note_long_bags(group, batch, range, workspace, pieces, piece);
  }
}

}  // namespace flowtt::cuda
