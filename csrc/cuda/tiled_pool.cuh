// The last launch of the tiled forward path: sums the buffered rows of each bag, in an order that
// depends on the bag alone, and rounds sums to a 16-bit output.
//
// A row is read by as many lanes as it has vectors of 8 columns; the other lanes of a warp sum
// other bags, or, when one of these is long, other rows of the same bag. Very long bags are cut
// into pieces of kPoolPiece lookups; the warp that finishes the last piece adds them up.

#pragma once

#include "tiled_pooled_rows.cuh"

namespace flowtt::cuda {

// What a launch works on.
struct PoolCall {
  const TiledGroup& group;
  const BagBatch& batch;
  const TiledRange& range;
  const TiledWorkspace& workspace;
  const PooledOutput& output;
  const PoolPass& pass;

  __device__ __forceinline__ BagTarget target(const TiledFeature& feature, int64_t sample) const {
    return BagTarget(feature, sample, range, workspace, output, pass);
  }
};

// Sums a bag by a part of a warp, or by all of it, each part a page of its lookups in turn. begin,
// end: the bag's lookups of the range. Called by all lanes; `is_pooled` is the same for all if
// kByWarp.
template <typename row_t, bool kByWarp>
__device__ __forceinline__ void pool_bag(const PoolCall& call, const PoolLane& lane,
                                         const TiledFeature& feature, int64_t sample,
                                         bool is_pooled, int32_t begin, int32_t end) {
  const TiledWorkspace& workspace = call.workspace;
  const int part = kByWarp ? lane.part : 0;
  const int32_t step = kByWarp ? 32 : lane.lanes;
  const int32_t widest = __reduce_max_sync(kAllLanes, is_pooled ? feature.embedding_dim : 0);
#pragma unroll 1
  for (int32_t base = 0; base < widest; base += lane.lanes * kPoolColumns) {
    const int32_t column = base + lane.index * kPoolColumns;
    const bool has_columns = is_pooled && column < feature.embedding_dim;
    PooledColumns columns{};
    if (has_columns && part == 0 && call.pass.adds_to_sums) {
      columns = call.target(feature, sample).load_sums(column);
    }
    if (workspace.rows != nullptr) {
      const row_t* const rows = static_cast<const row_t*>(workspace.rows) + column;
      sum_rows(columns, workspace, rows, has_columns, lane, begin + part * lane.lanes,
               is_pooled ? end : begin, step);
    }
    if constexpr (kByWarp) sum_parts(columns, lane.lanes);
    if (has_columns && part == 0) call.target(feature, sample).store(columns, column);
  }
}

// One bag for each part of the warp.
template <typename row_t>
__device__ __forceinline__ void pool_bags(const PoolCall& call, int64_t warp) {
  const auto& [group, batch, range, workspace, output, pass] = call;
  const uint32_t samples = static_cast<uint32_t>(range.end_sample - range.first_sample);
  const PoolLane lane(pass.lanes_shift);
  const int64_t bags = int64_t{samples} * group.count;
  const int64_t number = warp * lane.parts + lane.part;
  const int64_t own = min(number, bags - 1);
  int32_t f = 0;
  uint32_t within = static_cast<uint32_t>(own);
  if (group.count > 1) {
    f = static_cast<int32_t>(own / samples);
    within = static_cast<uint32_t>(own - int64_t{f} * samples);
  }
  const TiledFeature& feature = group.features[f];
  const int64_t sample = range.first_sample + within;
  const int64_t bag = feature.feature * batch.batch_size + sample;
  const int64_t bag_begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
  const int64_t bag_end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
  const int64_t begin = clamped(bag_begin, range.first_lookup, range.end_lookup);
  const int64_t end = clamped(bag_end, begin, range.end_lookup);
  // Rows of bags of one lookup are stored already, and pieces add themselves up. A bag without
  // lookups in this range has nothing to add to sums, but sums may have to be rounded.
  const bool rounds = workspace.sums != nullptr && pass.ends_sums;
  const bool is_pooled =
      number < bags && bag_end - bag_begin != 1 &&
      (workspace.piece_bags == nullptr || !BagPieces(range, bag_begin, bag_end).is_long()) &&
      (begin < end || rounds || !pass.adds_to_sums);
  const int32_t first = static_cast<int32_t>(begin - range.first_lookup);
  const int32_t last = static_cast<int32_t>(end - range.first_lookup);
  if (__all_sync(kAllLanes, !is_pooled || last - first <= kShortBag)) {
    pool_bag<row_t, false>(call, lane, feature, sample, is_pooled, first, last);
    return;
  }
#pragma unroll 1
  for (int part = 0; part < lane.parts; ++part) {
    const int source = part * lane.lanes;
    if (!__shfl_sync(kAllLanes, is_pooled, source)) continue;
    pool_bag<row_t, true>(call, lane, group.features[__shfl_sync(kAllLanes, f, source)],
                          __shfl_sync(kAllLanes, sample, source), true,
                          __shfl_sync(kAllLanes, first, source),
                          __shfl_sync(kAllLanes, last, source));
  }
}

// Whether a piece lies in a long bag. What is noted of pieces that no long bag has is of no
// meaning.
__device__ __forceinline__ bool is_piece_of_long_bag(const PoolCall& call, uint2 noted,
                                                     int32_t piece) {
  const auto& [group, batch, range, workspace, output, pass] = call;
  if (noted.x >= static_cast<uint32_t>(group.count) || noted.y < range.first_sample ||
      noted.y >= range.end_sample) {
    return false;
  }
  const int64_t bag = group.features[noted.x].feature * batch.batch_size + noted.y;
  const BagPieces pieces(range, load_index(batch.offsets, batch.offsets_are_int64, bag),
                         load_index(batch.offsets, batch.offsets_are_int64, bag + 1));
  return pieces.is_long() && piece >= pieces.first && piece < pieces.end;
}

// Sums one piece of a long bag by a warp, and the whole bag if it is the last to finish.
template <typename row_t>
__device__ __noinline__ void pool_piece(const PoolCall& call, uint2 noted, int32_t piece) {
  const auto& [group, batch, range, workspace, output, pass] = call;
  const TiledFeature& feature = group.features[noted.x];
  const int64_t bag = feature.feature * batch.batch_size + noted.y;
  const int64_t bag_begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
  const int64_t bag_end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
  const BagPieces pieces(range, bag_begin, bag_end);

  const PoolLane lane(pass.lanes_shift);
  const int32_t skipped = lane.part * lane.lanes;
  const auto add_rows = [&](PooledColumns& columns, int32_t column, int32_t first, int32_t last) {
    sum_rows(columns, workspace, static_cast<const row_t*>(workspace.rows) + column,
             column < feature.embedding_dim, lane, first + skipped, last, 32);
  };
  const auto sums_of = [&](int32_t of_piece, int32_t column) {
    return reinterpret_cast<float4*>(workspace.piece_sums +
                                     int64_t{of_piece} * workspace.buffered_row_elements + column);
  };
#pragma unroll 1
  for (int32_t base = 0; base < feature.embedding_dim; base += lane.lanes * kPoolColumns) {
    const int32_t column = base + lane.index * kPoolColumns;
    PooledColumns columns{};
    add_rows(columns, column, piece * kPoolPiece, (piece + 1) * kPoolPiece);
    sum_parts(columns, lane.lanes);
    if (column < feature.embedding_dim && lane.part == 0) {
      const float* sum = columns.sum;
      sums_of(piece, column)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      sums_of(piece, column)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }
  __threadfence();
  __syncwarp();
  uint32_t arrived = 0;
  if (threadIdx.x % 32 == 0) arrived = atomicAdd(&workspace.piece_arrivals[pieces.first], 1u);
  arrived = __shfl_sync(kAllLanes, arrived, 0);
  if (arrived + 1 != static_cast<uint32_t>(pieces.end - pieces.first)) return;
  __threadfence();

  const BagTarget target = call.target(feature, noted.y);
  const int32_t begin =
      static_cast<int32_t>(max(bag_begin, range.first_lookup) - range.first_lookup);
  const int32_t end = static_cast<int32_t>(min(bag_end, range.end_lookup) - range.first_lookup);
#pragma unroll 1
  for (int32_t base = 0; base < feature.embedding_dim; base += lane.lanes * kPoolColumns) {
    const int32_t column = base + lane.index * kPoolColumns;
    const bool has_columns = column < feature.embedding_dim;
    PooledColumns columns{};
    if (has_columns && lane.part == 0 && pass.adds_to_sums) columns = target.load_sums(column);
    add_rows(columns, column, begin, pieces.first * kPoolPiece);
    if (has_columns) {
#pragma unroll 4
      for (int32_t other = pieces.first + lane.part; other < pieces.end; other += lane.parts) {
        RowVector<float> sum;
        sum.first = __ldcg(sums_of(other, column));
        sum.second = __ldcg(sums_of(other, column) + 1);
        sum.add_to(columns, 1.0f);
      }
    }
    add_rows(columns, column, pieces.end * kPoolPiece, end);
    sum_parts(columns, lane.lanes);
    if (has_columns && lane.part == 0) target.store(columns, column);
  }
}

// The pieces warp, warp + warps, ...: each lane checks one of them.
template <typename row_t>
__device__ __forceinline__ void pool_pieces(const PoolCall& call, int32_t warp, int32_t warps) {
  const int32_t pieces =
      static_cast<int32_t>((call.range.end_lookup - call.range.first_lookup) / kPoolPiece);
#pragma unroll 1
  for (int32_t first = warp; first < pieces; first += 32 * warps) {
    const int32_t own = first + static_cast<int32_t>(threadIdx.x % 32) * warps;
    uint2 noted = make_uint2(0, 0);
    bool is_long = false;
    if (own < pieces) {
      noted = call.workspace.piece_bags[own];
      is_long = is_piece_of_long_bag(call, noted, own);
    }
#pragma unroll 1
    for (uint32_t lanes = __ballot_sync(kAllLanes, is_long); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      pool_piece<row_t>(call,
                        make_uint2(__shfl_sync(kAllLanes, noted.x, source),
                                   __shfl_sync(kAllLanes, noted.y, source)),
                        first + source * warps);
    }
  }
}

template <typename row_t>
__global__ void __launch_bounds__(kPoolThreads, 4)
    tiled_pool_kernel(const __grid_constant__ TiledGroup group,
                      const __grid_constant__ BagBatch batch,
                      const __grid_constant__ TiledRange range,
                      const __grid_constant__ TiledWorkspace workspace,
                      const __grid_constant__ PooledOutput output, PoolPass pass) {
  allow_dependent_launch();
  wait_for_previous_kernel();
  const PoolCall call{group, batch, range, workspace, output, pass};
  const int64_t block = blockIdx.x;
  const int64_t warp = threadIdx.x / 32;
  if (block < pass.piece_blocks) {
    pool_pieces<row_t>(call, static_cast<int32_t>(block * (kPoolThreads / 32) + warp),
                       pass.piece_blocks * (kPoolThreads / 32));
    return;
  }
  pool_bags<row_t>(call, (block - pass.piece_blocks) * (kPoolThreads / 32) + warp);
}

}  // namespace flowtt::cuda
