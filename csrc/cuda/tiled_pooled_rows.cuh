// What the pooling kernel is made of: a lane's columns of buffered rows and of sums.

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
// Called by all lanes of a warp; parts may have different lookups. rows: the lane's columns;
// has_columns: whether it has any.
template <typename row_t>
__device__ __forceinline__ void sum_rows(PooledColumns& columns, const TiledWorkspace& workspace,
                                         const row_t* rows, bool has_columns, const PoolLane& lane,
                                         int32_t begin, int32_t end, int32_t step) {
  constexpr int kInFlight = RowVector<row_t>::kInFlight;
  const uint32_t row_bytes = workspace.buffered_row_elements * sizeof(row_t);
  // The factor of a row that was added is of no meaning.
  const auto fetch = [&](int32_t page) {
    const int32_t lookup = page + lane.index;
    uint2 target = make_uint2(kAddedRow, 0);
    if (lookup < end) target = workspace.row_of_lookup[lookup];
    if (target.x == kAddedRow) target.y = 0;
    return target;
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
      // The second half of a batch may have no rows at all.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && at + kInFlight / 2 >= page) break;
#pragma unroll
        for (int i = half * (kInFlight / 2); i < (half + 1) * (kInFlight / 2); ++i) {
          const uint32_t slot = __shfl_sync(kAllLanes, target.x, at + i, lane.lanes);
          row[i].clear();
          if (slot != kAddedRow && has_columns) {
            row[i].load(reinterpret_cast<const row_t*>(reinterpret_cast<const char*>(rows) +
                                                       static_cast<uint64_t>(slot) * row_bytes));
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && at + kInFlight / 2 >= page) break;
#pragma unroll
        for (int i = half * (kInFlight / 2); i < (half + 1) * (kInFlight / 2); ++i) {
          const uint32_t factor = __shfl_sync(kAllLanes, target.y, at + i, lane.lanes);
          row[i].add_to(columns, __uint_as_float(factor));
        }
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

}  // namespace flowtt::cuda
