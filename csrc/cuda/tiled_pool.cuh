// The last launch of the tiled forward path: sums the buffered rows of each bag, in an order that
// depends on the bag alone, and rounds sums to a 16-bit output.
//
// A row is read by as many lanes as it has vectors of 16 bytes, a part of a warp. The other parts
// sum other bags, or, of bags that are longer, other rows of the same bag. Very long bags are cut
// into pieces of kPoolPiece lookups; the warp that finishes the last piece adds them up.

#pragma once

#include "tiled_pooled_rows.cuh"

namespace flowtt::cuda {

// A bag and its lookups of the range.
struct RangeBag {
  int64_t sample;
  int32_t begin;
  int32_t end;
  // Its sums may hold rows even if the contraction has added none in this range.
  bool adds;
  bool is_pooled;

  // number: of the sample, from the first one of the range on. Offsets may be read while the
  // kernels ahead are still at work.
  __device__ __forceinline__ RangeBag(const PoolCall& call, const PoolFeature& feature,
                                      uint32_t number) {
    const BagBatch& batch = call.batch;
    const TiledRange& range = call.range;
    const TiledWorkspace& workspace = call.workspace;
    const uint32_t samples = static_cast<uint32_t>(range.end_sample - range.first_sample);
    sample = range.first_sample + min(number, samples - 1);
    const int64_t bag = feature.feature * batch.batch_size + sample;
    const int64_t bag_begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t bag_end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
    const int64_t first = clamped(bag_begin, range.first_lookup, range.end_lookup);
    const int64_t last = clamped(bag_end, first, range.end_lookup);
    begin = static_cast<int32_t>(first - range.first_lookup);
    end = static_cast<int32_t>(last - range.first_lookup);
    adds = call.adds_to_sums && (bag_begin < first || workspace.rows == nullptr);
    // Pieces add themselves up. A bag without lookups in this range has nothing to add to sums, but
    // sums may have to be rounded.
    const bool rounds = workspace.sums != nullptr && call.ends_sums;
    is_pooled = number < samples && (call.pools_lone || bag_end - bag_begin != 1) &&
                (call.pieces == 0 || !BagPieces(range, bag_begin, bag_end).is_long()) &&
                (begin < end || rounds || !call.adds_to_sums);
  }
  __device__ __forceinline__ bool is_short() const { return end - begin <= kShortBag; }
};

// Sums a bag by a part of a warp, or by all of it. Called by all lanes; the bag is the same for all
// if kByWarp.
template <typename row_t, int kLanes, bool kByWarp>
__device__ __forceinline__ void pool_bag(const PoolCall& call, const PoolFeature& feature,
                                         const RangeBag& bag) {
  using Lane = PoolLane<kLanes>;
  constexpr int kColumns = PooledColumns<row_t>::kCount;
  // Fewer lanes than a warp are enough for all columns.
  const int32_t all_columns = kLanes < 32 ? 1 : feature.embedding_dim;
#pragma unroll 1
  for (int32_t base = 0; base < all_columns; base += kLanes * kColumns) {
    const int32_t column = base + Lane::index() * kColumns;
    const bool has_columns = bag.is_pooled && column < feature.embedding_dim;
    const bool stores = has_columns && (!kByWarp || Lane::part() == 0);
    PooledColumns<row_t> columns{};
    bool adds = bag.adds;
    if (call.workspace.rows != nullptr) {
      const bool added = sum_rows<kLanes, kByWarp>(columns, call.workspace, column, has_columns,
                                                   bag.begin, bag.is_pooled ? bag.end : bag.begin);
      adds = adds || (added && call.adds_to_sums);
    }
    if constexpr (kByWarp) sum_parts<kLanes>(columns);
    if (stores) {
      const BagTarget target(call, feature, bag.sample);
      if (adds) target.add_sums(columns, column);
      target.store(columns, column);
    }
  }
}

// The feature and the sample that a part of a warp of this block has a bag of, as RangeBag numbers
// it; no sample in blocks that are there for pieces alone.
template <int kLanes>
struct BagPlace {
  uint32_t feature;
  uint32_t number;

  __device__ __forceinline__ BagPlace(const PoolCall& call, int part) {
    constexpr uint32_t kWarpParts = PoolLane<kLanes>::kParts;
    feature = blockIdx.x / call.blocks_per_feature;
    const uint32_t block = blockIdx.x - feature * call.blocks_per_feature;
    number = (block * (kPoolThreads / 32) + threadIdx.x / 32) * kWarpParts + part;
    if (feature >= call.feature_count) {
      feature = 0;
      number = UINT32_MAX;
    }
  }
};

// Bags of a warp's parts by the whole warp, one after the other. lanes: those of the parts.
template <typename row_t, int kLanes>
__device__ __forceinline__ void pool_by_warp(const PoolCall& call, uint32_t lanes) {
#pragma unroll 1
  while (lanes != 0) {
    const int part = (__ffs(lanes) - 1) / kLanes;
    lanes &= ~(kAllLanes >> (32 - kLanes) << part * kLanes);
    const BagPlace<kLanes> place(call, part);
    const PoolFeature& feature = call.features[place.feature];
    pool_bag<row_t, kLanes, true>(call, feature, RangeBag(call, feature, place.number));
  }
}

// The long bag that a piece lies in, if there is one.
class LongBag {
 public:
  // noted: one of TiledWorkspace::piece_bags.
  __device__ __forceinline__ LongBag(const PoolCall& call, uint2 noted) {
    if (noted.x == 0) return;
    const TiledRange& range = call.range;
    const BagBatch& batch = call.batch;
    const int64_t bag = call.features[noted.x - 1].feature * batch.batch_size + noted.y;
    const int64_t bag_begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
    const int64_t bag_end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
    const BagPieces pieces(range, bag_begin, bag_end);
    if (!pieces.is_long()) return;
    begin = static_cast<int32_t>(max(bag_begin, range.first_lookup) - range.first_lookup);
    end = static_cast<int32_t>(min(bag_end, range.end_lookup) - range.first_lookup);
    first_piece = pieces.first;
    end_piece = pieces.end;
  }
  __device__ __forceinline__ bool has(int32_t piece) const {
    return piece >= first_piece && piece < end_piece;
  }

  int32_t begin = 0;  // its lookups of the range
  int32_t end = 0;
  int32_t first_piece = 0;
  int32_t end_piece = 0;
};

// Sums one piece of a long bag by a warp, and the whole bag if it is the last to finish.
template <typename row_t, int kLanes>
__device__ __forceinline__ void pool_piece(const PoolCall& call, uint2 noted, int32_t piece) {
  using Lane = PoolLane<kLanes>;
  constexpr int kColumns = PooledColumns<row_t>::kCount;
  const PoolFeature& feature = call.features[noted.x - 1];
  const TiledWorkspace& workspace = call.workspace;
  const LongBag bag(call, noted);
  const auto add_rows = [&](PooledColumns<row_t>& columns, int32_t column, int32_t begin,
                            int32_t end) {
    sum_rows<kLanes, true>(columns, workspace, column, column < feature.embedding_dim, begin, end);
  };
  const auto sums_of = [&](int32_t of_piece, int32_t column) {
    return workspace.piece_sums + int64_t{of_piece} * workspace.buffered_row_elements + column;
  };
#pragma unroll 1
  for (int32_t base = 0; base < feature.embedding_dim; base += kLanes * kColumns) {
    const int32_t column = base + Lane::index() * kColumns;
    PooledColumns<row_t> columns{};
    add_rows(columns, column, piece * kPoolPiece, (piece + 1) * kPoolPiece);
    sum_parts<kLanes>(columns);
    if (column < feature.embedding_dim && Lane::part() == 0) {
#pragma unroll
      for (int j = 0; j < kColumns; j += 4) {
        *reinterpret_cast<float4*>(sums_of(piece, column) + j) = columns.four(j);
      }
    }
  }
  __threadfence();
  __syncwarp();
  uint32_t arrived = 0;
  if (threadIdx.x % 32 == 0) arrived = atomicAdd(&workspace.piece_arrivals[bag.first_piece], 1u);
  arrived = __shfl_sync(kAllLanes, arrived, 0);
  if (arrived + 1 != static_cast<uint32_t>(bag.end_piece - bag.first_piece)) return;
  __threadfence();

  const BagTarget target(call, feature, noted.y);
#pragma unroll 1
  for (int32_t base = 0; base < feature.embedding_dim; base += kLanes * kColumns) {
    const int32_t column = base + Lane::index() * kColumns;
    const bool has_columns = column < feature.embedding_dim;
    PooledColumns<row_t> columns{};
    if (has_columns && Lane::part() == 0 && call.adds_to_sums) target.add_sums(columns, column);
    add_rows(columns, column, bag.begin, bag.first_piece * kPoolPiece);
    if (has_columns) {
#pragma unroll 4
      for (int32_t other = bag.first_piece + Lane::part(); other < bag.end_piece;
           other += Lane::kParts) {
#pragma unroll
        for (int j = 0; j < kColumns; j += 4) {
          columns.add_four(j, __ldcg(reinterpret_cast<float4*>(sums_of(other, column) + j)));
        }
      }
    }
    add_rows(columns, column, bag.end_piece * kPoolPiece, bag.end);
    sum_parts<kLanes>(columns);
    if (has_columns && Lane::part() == 0) target.store(columns, column);
  }
}

// The pieces that a warp looks at: first, first + stride, ... Those of one bag lie in different
// blocks.
struct WarpPieces {
  uint32_t first;
  uint32_t stride;

  __device__ __forceinline__ WarpPieces()
      : first(threadIdx.x / 32 * gridDim.x + blockIdx.x), stride(gridDim.x * (kPoolThreads / 32)) {}
  __device__ __forceinline__ uint32_t own() const { return first + threadIdx.x % 32 * stride; }
};

// Sums those that are pieces of long bags: each lane looks at one.
template <typename row_t, int kLanes>
__device__ __forceinline__ void pool_pieces(const PoolCall& call) {
#pragma unroll 1
  for (WarpPieces pieces; pieces.first < call.pieces; pieces.first += 32 * pieces.stride) {
    const uint32_t own = pieces.own();
    uint2 noted = make_uint2(0, 0);
    if (own < call.pieces) noted = call.workspace.piece_bags[own];
    const bool is_long = own < call.pieces && LongBag(call, noted).has(static_cast<int32_t>(own));
#pragma unroll 1
    for (uint32_t lanes = __ballot_sync(kAllLanes, is_long); lanes != 0; lanes &= lanes - 1) {
      const int source = __ffs(lanes) - 1;
      pool_piece<row_t, kLanes>(call,
                                make_uint2(__shfl_sync(kAllLanes, noted.x, source),
                                           __shfl_sync(kAllLanes, noted.y, source)),
                                static_cast<int32_t>(pieces.first + source * pieces.stride));
    }
  }
}

// What is left to a warp when its short bags are done. Not inlined, and the last that it does: it
// takes no registers from short bags, none of which are spilled.
template <typename row_t, int kLanes>
__device__ __noinline__ void pool_longer(const PoolCall& call, uint32_t lanes, bool has_pieces) {
  pool_by_warp<row_t, kLanes>(call, lanes);
  if (has_pieces) pool_pieces<row_t, kLanes>(call);
}

// A bag for each part of a warp of the blocks that have bags, then pieces of long bags. Nothing
// that the kernels ahead write is read before the wait.
template <typename row_t, int kLanes>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks<row_t>)
    tiled_pool_kernel(const __grid_constant__ PoolCall call) {
  allow_dependent_launch();
  const BagPlace<kLanes> place(call, PoolLane<kLanes>::part());
  const PoolFeature& feature = call.features[place.feature];
  RangeBag bag(call, feature, place.number);
  const uint32_t others = __ballot_sync(kAllLanes, bag.is_pooled && !bag.is_short());
  bag.is_pooled = bag.is_pooled && bag.is_short();
  wait_for_previous_kernel();

  // The first piece that a lane has to look at is under way while bags are summed. Mostly there are
  // no long bags, and nothing is noted.
  const WarpPieces pieces;
  uint32_t noted_feature = 0;
  if (pieces.own() < call.pieces) noted_feature = call.workspace.piece_bags[pieces.own()].x;

  pool_bag<row_t, kLanes, false>(call, feature, bag);
  const bool has_pieces =
      __any_sync(kAllLanes, noted_feature != 0) || pieces.first + 32 * pieces.stride < call.pieces;
  if (others != 0 || has_pieces) pool_longer<row_t, kLanes>(call, others, has_pieces);
}

}  // namespace flowtt::cuda
