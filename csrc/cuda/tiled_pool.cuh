// The last launch of the tiled forward path: sums the buffered rows of each bag, in an order that
// depends on the bag alone, and rounds sums to a 16-bit output.
//
// A row is read by as many lanes as it has vectors of 8 columns; the other lanes of a warp sum
// other bags, or, when one of these is long, other rows of the same bag. Very long bags are cut
// into pieces of kPoolPiece lookups, one a warp; the last warp to finish adds up the pieces.

#pragma once

#include "tiled_segments.cuh"

namespace flowtt::cuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolColumns = 8;    // of a lane
constexpr int kMinLanesShift = 3;  // a part has at least as many lanes

// Bags of at most this many lookups are summed by a part of a warp.
constexpr int64_t kShortBag = 64;

struct PoolPass {
  int32_t piece_blocks;  // at the start of the grid, for the pieces of long bags
  int32_t lanes_shift;   // log2 of the lanes of a bag
  // The sums hold rows that the contraction has added, or those of earlier ranges.
  bool adds_to_sums;
  bool ends_sums;  // after this range the sums are complete
};

struct PooledColumns {
  float sum[kPoolColumns];
};

__device__ __forceinline__ void add_columns(PooledColumns& to, const PooledColumns& from) {
#pragma unroll
  for (int j = 0; j < kPoolColumns; ++j) to.sum[j] += from.sum[j];
}

// One lane's columns of a buffered row.
template <typename row_t>
struct RowVector;

template <>
struct RowVector<__half> {
  static constexpr int kInFlight = 8;  // loaded before the first is used
  uint4 words;
  __device__ __forceinline__ void load(const __half* row) {
    words = *reinterpret_cast<const uint4*>(row);
  }
  __device__ __forceinline__ void clear() { words = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void add_to(PooledColumns& columns, float factor) const {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      columns.sum[2 * i] = fmaf(factor, pair.x, columns.sum[2 * i]);
      columns.sum[2 * i + 1] = fmaf(factor, pair.y, columns.sum[2 * i + 1]);
    }
  }
};

template <>
struct RowVector<float> {
  static constexpr int kInFlight = 4;
  float4 first;
  float4 second;
  __device__ __forceinline__ void load(const float* row) {
    first = reinterpret_cast<const float4*>(row)[0];
    second = reinterpret_cast<const float4*>(row)[1];
  }
  __device__ __forceinline__ void clear() { first = second = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
  __device__ __forceinline__ void add_to(PooledColumns& columns, float factor) const {
    const float values[kPoolColumns] = {first.x,  first.y,  first.z,  first.w,
                                        second.x, second.y, second.z, second.w};
#pragma unroll
    for (int j = 0; j < kPoolColumns; ++j) {
      columns.sum[j] = fmaf(factor, values[j], columns.sum[j]);
    }
  }
};

// The part of a warp that a lane belongs to, and its columns.
struct PoolLane {
  int lanes;  // of a part; at least as many as rows in flight
  int parts;
  int part;
  int index;  // in the part

  __device__ __forceinline__ explicit PoolLane(int lanes_shift)
      : lanes(1 << lanes_shift),
        parts(32 >> lanes_shift),
        part(threadIdx.x % 32 >> lanes_shift),
        index(threadIdx.x % 32 & ((1 << lanes_shift) - 1)) {}
};

// Adds the rows of the lookups [begin, end) of the range, a page of lane.lanes at a time, and so on
// `step` lookups later. Each lane of a part fetches where one row of the page is, a page ahead.
// Called by all lanes of a warp; parts may have different lookups. rows: the lane's columns, or
// null if it has none.
template <typename row_t>
__device__ __forceinline__ void sum_rows(PooledColumns& columns, const TiledWorkspace& workspace,
                                         const row_t* rows, const PoolLane& lane, int32_t begin,
                                         int32_t end, int32_t step) {
  constexpr int kInFlight = RowVector<row_t>::kInFlight;
  const auto fetch = [&](int32_t page) {
    const int32_t lookup = page + lane.index;
    return lookup < end ? workspace.row_of_lookup[lookup] : make_uint2(kAddedRow, 0);
  };
  const int32_t longest = __reduce_max_sync(kAllLanes, max(end - begin, 0));
  uint2 next = fetch(begin);
#pragma unroll 1
  for (int32_t done = 0; done < longest; done += step) {
    const uint2 target = next;
    if (done + step < longest) next = fetch(begin + done + step);
    const int32_t page = min(lane.lanes, longest - done);
#pragma unroll 1
    for (int32_t at = 0; at < page; at += kInFlight) {
      RowVector<row_t> row[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32_t slot = __shfl_sync(kAllLanes, target.x, at + i, lane.lanes);
        row[i].clear();
        if (slot != kAddedRow && rows != nullptr) {
          row[i].load(rows + static_cast<int64_t>(slot) * workspace.buffered_row_elements);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32_t slot = __shfl_sync(kAllLanes, target.x, at + i, lane.lanes);
        const uint32_t factor = __shfl_sync(kAllLanes, target.y, at + i, lane.lanes);
        // The factor of a row that was added is of no meaning.
        row[i].add_to(columns, slot != kAddedRow ? __uint_as_float(factor) : 0.0f);
      }
    }
  }
}

// Where one bag's sums are and where they go.
class BagTarget {
 public:
  __device__ __forceinline__ BagTarget(const TiledFeature& feature, int64_t sample,
                                       const TiledRange& range, const TiledWorkspace& workspace,
                                       const PooledOutput& output, const PoolPass& pass)
      : columns_(feature.embedding_dim),
        output_(output.data),
        output_type_(output.type),
        output_first_(sample * output.row_stride + feature.output_column) {
    if (workspace.sums != nullptr) {
      sums_ = workspace.sums + (sample - range.first_sample) * output.row_stride +
              feature.output_column;
    } else {
      sums_ = output.type == ElementType::kFloat32
                  ? static_cast<float*>(output.data) + output_first_
                  : nullptr;
    }
    writes_output_ = sums_ == nullptr || (workspace.sums != nullptr && pass.ends_sums);
  }

  // The lane's columns begin at `column`.
  __device__ __forceinline__ PooledColumns load_sums(int32_t column) const {
    const float* from = sums_ + column;
    PooledColumns columns{};
    if (column + kPoolColumns <= columns_ && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      const float4 first = reinterpret_cast<const float4*>(from)[0];
      const float4 second = reinterpret_cast<const float4*>(from)[1];
      columns = {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
      return columns;
    }
#pragma unroll
    for (int j = 0; j < kPoolColumns; ++j) {
      if (column + j < columns_) columns.sum[j] = from[j];
    }
    return columns;
  }

  __device__ __forceinline__ int32_t columns() const { return columns_; }

  __device__ __forceinline__ void store(const PooledColumns& columns, int32_t column) const {
    if (!writes_output_) {
      store_as(columns, column, sums_, ElementType::kFloat32, 0);
    } else {
      store_as(columns, column, output_, output_type_, output_first_);
    }
  }

 private:
  __device__ __forceinline__ void store_as(const PooledColumns& columns, int32_t column, void* data,
                                           ElementType type, int64_t first) const {
    const bool whole = column + kPoolColumns <= columns_;
    if (type == ElementType::kFloat32) {
      float* const to = static_cast<float*>(data) + first + column;
      if (whole && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        reinterpret_cast<float4*>(to)[0] =
            make_float4(columns.sum[0], columns.sum[1], columns.sum[2], columns.sum[3]);
        reinterpret_cast<float4*>(to)[1] =
            make_float4(columns.sum[4], columns.sum[5], columns.sum[6], columns.sum[7]);
        return;
      }
    } else {
      __half* const to = static_cast<__half*>(data) + first + column;
      if (whole && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (type == ElementType::kFloat16) {
            pairs[i] = round_pair(columns.sum[2 * i], columns.sum[2 * i + 1]);
          } else {
            const __nv_bfloat162 pair =
                __floats2bfloat162_rn(columns.sum[2 * i], columns.sum[2 * i + 1]);
            pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
          }
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < kPoolColumns; ++j) {
      if (column + j < columns_) {
        store_element<float>(data, type, first + column + j, columns.sum[j]);
      }
    }
  }

  int32_t columns_;
  float* sums_;  // or null
  void* output_;
  ElementType output_type_;
  int64_t output_first_;
  bool writes_output_;
};

// Sums over the parts of a warp that have the same columns.
__device__ __forceinline__ void sum_parts(PooledColumns& columns, int lanes) {
  for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kPoolColumns; ++j) {
      columns.sum[j] += __shfl_xor_sync(kAllLanes, columns.sum[j], offset);
    }
  }
}

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
    PooledColumns sums{};
    if (has_columns && part == 0 && call.pass.adds_to_sums) {
      sums = call.target(feature, sample).load_sums(column);
    }
    PooledColumns columns{};
    if (workspace.rows != nullptr) {
      const row_t* rows =
          has_columns ? static_cast<const row_t*>(workspace.rows) + column : nullptr;
      sum_rows(columns, workspace, rows, lane, begin + part * lane.lanes, is_pooled ? end : begin,
               step);
    }
    add_columns(columns, sums);
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

// Sums one piece of a long bag by a warp, and the whole bag if it is the last to finish.
template <typename row_t>
__device__ __noinline__ void pool_piece(const PoolCall& call, int32_t piece) {
  const auto& [group, batch, range, workspace, output, pass] = call;
  // What is noted of pieces that no long bag has is of no meaning.
  const uint2 noted = workspace.piece_bags[piece];
  if (noted.x >= static_cast<uint32_t>(group.count) || noted.y < range.first_sample ||
      noted.y >= range.end_sample) {
    return;
  }
  const TiledFeature& feature = group.features[noted.x];
  const int64_t bag = feature.feature * batch.batch_size + noted.y;
  const int64_t bag_begin = load_index(batch.offsets, batch.offsets_are_int64, bag);
  const int64_t bag_end = load_index(batch.offsets, batch.offsets_are_int64, bag + 1);
  const BagPieces pieces(range, bag_begin, bag_end);
  if (!pieces.is_long() || piece < pieces.first || piece >= pieces.end) return;

  const PoolLane lane(pass.lanes_shift);
  const int32_t skipped = lane.part * lane.lanes;
  const auto rows_at = [&](int32_t column) {
    return column < feature.embedding_dim ? static_cast<const row_t*>(workspace.rows) + column
                                          : nullptr;
  };
  const auto sums_of = [&](int32_t of_piece, int32_t column) {
    return reinterpret_cast<float4*>(workspace.piece_sums +
                                     int64_t{of_piece} * workspace.buffered_row_elements + column);
  };
#pragma unroll 1
  for (int32_t base = 0; base < feature.embedding_dim; base += lane.lanes * kPoolColumns) {
    const int32_t column = base + lane.index * kPoolColumns;
    PooledColumns columns{};
    sum_rows(columns, workspace, rows_at(column), lane, piece * kPoolPiece + skipped,
             (piece + 1) * kPoolPiece, 32);
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
    sum_rows(columns, workspace, rows_at(column), lane, begin + skipped, pieces.first * kPoolPiece,
             32);
    if (has_columns) {
#pragma unroll 4
      for (int32_t other = pieces.first + lane.part; other < pieces.end; other += lane.parts) {
        RowVector<float> sum;
        sum.first = __ldcg(sums_of(other, column));
        sum.second = __ldcg(sums_of(other, column) + 1);
        sum.add_to(columns, 1.0f);
      }
    }
    sum_rows(columns, workspace, rows_at(column), lane, pieces.end * kPoolPiece + skipped, end, 32);
    sum_parts(columns, lane.lanes);
    if (has_columns && lane.part == 0) target.store(columns, column);
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
    const int64_t piece = block * (kPoolThreads / 32) + warp;
    if (piece < (range.end_lookup - range.first_lookup) / kPoolPiece) {
      pool_piece<row_t>(call, static_cast<int32_t>(piece));
    }
    return;
  }
  pool_bags<row_t>(call, (block - pass.piece_blocks) * (kPoolThreads / 32) + warp);
}

}  // namespace flowtt::cuda
