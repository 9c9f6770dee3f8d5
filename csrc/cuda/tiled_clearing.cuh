// What the preparation does besides sorting and packing: it clears what later kernels count in or
// add to, and checks the offsets.

#pragma once

#include <cstdio>

#include "tiled_chunks.cuh"

namespace flowtt::cuda {

constexpr int32_t kMaxBagsPerPiece = kPrepareThreads;

// Memory that is to be zeros.
struct ClearedVectors {
  uint4* first;
  int64_t count;

  // One of `parts` blocks' share. Called by all threads.
  template <int kThreads = kPrepareThreads>
  __device__ __forceinline__ void clear(int32_t part, int32_t parts) const {
#pragma unroll 4
    for (int64_t i = int64_t{part} * kThreads + threadIdx.x; i < count;
         i += int64_t{parts} * kThreads) {
      first[i] = make_uint4(0, 0, 0, 0);
    }
  }
};

// How the bags of a launch are cut into pieces, a block's work each.
struct ClearingPieces {
  int32_t count;
  int32_t pieces_per_feature;
  int32_t bags_per_piece;  // a multiple of kPrepareWarps
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
        workspace.piece_bags[i] = make_uint2(f + 1, static_cast<uint32_t>(warp_sample + source));
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

// Checks the offsets of kPrepareThreads bags of one feature, or fewer, a thread each.
inline __device__ __noinline__ void clear_bags(const TiledGroup& group, const BagBatch& batch,
                                               const TiledRange& range,
                                               const TiledWorkspace& workspace,
                                               const PooledOutput& output,
                                               const ClearingPieces& pieces, int32_t piece) {
  const int64_t samples = range.end_sample - range.first_sample;
  const int32_t f = piece / pieces.pieces_per_feature;
  const TiledFeature& feature = group.features[f];
  const int32_t bags_per_warp = pieces.bags_per_piece / kPrepareWarps;
  const int32_t lane = threadIdx.x % 32;
  const int64_t first =
      static_cast<int64_t>(piece - f * pieces.pieces_per_feature) * pieces.bags_per_piece +
      threadIdx.x / 32 * bags_per_warp;
  const int64_t sample = range.first_sample + first;
  CheckedBag bag{lane < bags_per_warp && first + lane < samples, 0, 0};
  if (bag.exists) {
    const int64_t number = feature.feature * batch.batch_size + sample + lane;
    // Without pooling a feature's lookups are all in one, and nobody asks for bags.
    const bool pools = batch.pooling_mode != PoolingMode::kNone;
    const int64_t end = number + (pools ? 1 : batch.batch_size);
    bag.exists = pools || sample + lane == 0;
    bag.begin = load_index(batch.offsets, batch.offsets_are_int64, number);
    bag.end = load_index(batch.offsets, batch.offsets_are_int64, bag.exists ? end : number);
    if (bag.exists && (bag.begin < 0 || bag.begin > bag.end || bag.end > batch.nnz ||
                       (number == 0 && bag.begin != 0) ||
                       (end == batch.num_features * batch.batch_size && bag.end != batch.nnz))) {
      trap_on_bad_bag(feature, sample + lane, bag.begin, bag.end, batch.nnz);
    }
  }
  clear_warp_bags(feature, f, range, workspace, output, pieces.clears_sums, sample, bag);
}

}  // namespace flowtt::cuda
