// What the pooling kernel is made of: a lane's columns of buffered rows and of sums.

#pragma once

#include <type_traits>

#include "tiled_segments.cuh"

namespace flowtt::cuda {

constexpr int kPoolThreads = 256;
// Blocks of a multiprocessor, and rows that a lane loads before it adds the first of them. Bags of
// fp32 rows have sums to add as well, and nothing to do while those arrive: more blocks hide that.
template <typename row_t>
constexpr int kPoolBlocks = 4;
template <>
constexpr int kPoolBlocks<float> = 5;
template <typename row_t>
constexpr int kRowsInFlight = 4;
template <>
constexpr int kRowsInFlight<float> = 4;

// Bags of at most this many lookups are summed by a part of a warp.
constexpr int32_t kShortBag = 64;

// Instead of a slot, beside kAddedRow: there is no lookup.
constexpr uint32_t kNoRow = kAddedRow - 1;

// What the kernel has to know of a feature.
struct PoolFeature {
  int64_t output_column;
  int32_t embedding_dim;
  int32_t feature;
};

// What a launch works on.
struct PoolCall {
  BagBatch batch;
  TiledRange range;
  TiledWorkspace workspace;
  PooledOutput output;
  uint32_t pieces;              // of the range; 0 where bags are not cut into pieces
  uint32_t blocks_per_feature;  // with bags, feature after feature
  uint32_t feature_count;
  // The sums hold rows that the contraction has added, or those of earlier ranges.
  bool adds_to_sums;
  bool ends_sums;   // after this range the sums are complete
  bool pools_lone;  // bags of one lookup too, whose rows otherwise are stored already
  PoolFeature features[kTiledFeaturesPerLaunch];
};

// A lane's columns: a vector of 16 bytes of a buffered row.
template <typename row_t>
struct PooledColumns {
  static constexpr int kCount = 16 / sizeof(row_t);
  float sum[kCount];

  __device__ __forceinline__ void add_row(uint4 row, float factor) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<row_t, __half>) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        sum[2 * i] = fmaf(factor, pair.x, sum[2 * i]);
        sum[2 * i + 1] = fmaf(factor, pair.y, sum[2 * i + 1]);
      } else {
        sum[i] = fmaf(factor, __uint_as_float(words[i]), sum[i]);
      }
    }
  }
  // Columns j to j + 3.
  __device__ __forceinline__ float4 four(int j) const {
    return make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
  }
  __device__ __forceinline__ void add_four(int j, float4 four) {
    sum[j] += four.x;
    sum[j + 1] += four.y;
    sum[j + 2] += four.z;
    sum[j + 3] += four.w;
  }
};

// The part of a warp that a lane belongs to: as many lanes as a row has vectors, or all.
template <int kLanes>
struct PoolLane {
  static constexpr int kParts = 32 / kLanes;
  static __device__ __forceinline__ int part() { return threadIdx.x % 32 / kLanes; }
  static __device__ __forceinline__ int index() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ uint32_t lanes_of_part() {
    return kAllLanes >> (32 - kLanes) << part() * kLanes;
  }
};

// Rows of fp16 are read by few bags of a multiprocessor, those of fp32 by more: only rows that
// lookups share are worth fp32.
template <typename row_t>
__device__ __forceinline__ uint4 load_row(const char* row) {
  const uint4* const words = reinterpret_cast<const uint4*>(row);
  return std::is_same_v<row_t, float> ? *words : __ldcs(words);
}

// Adds the rows of the lookups [begin, end) of the range, a page of kLanes at a time: each lane of
// a part fetches where one row of the page is, a page ahead. With kByWarp the parts of the warp
// take pages in turn, otherwise each has lookups of its own. Called by all lanes of a warp;
// has_columns: whether the lane has any. Returns whether the contraction has added some of the
// part's rows.
template <int kLanes, bool kByWarp, typename row_t>
__device__ __forceinline__ bool sum_rows(PooledColumns<row_t>& columns,
                                         const TiledWorkspace& workspace, int32_t column,
                                         bool has_columns, int32_t begin, int32_t end) {
  using Lane = PoolLane<kLanes>;
  constexpr int kInFlight = kRowsInFlight<row_t>;
  constexpr int kStep = kByWarp ? 32 : kLanes;
  const uint32_t row_bytes = workspace.buffered_row_elements * sizeof(row_t);
  const char* const rows = static_cast<const char*>(workspace.rows) + column * sizeof(row_t);
  int32_t longest = max(end - begin, 0);
  if constexpr (kByWarp) {
    longest = longest / kStep * kLanes + min(longest % kStep, kLanes);
    begin += Lane::part() * kLanes;
  } else {
    longest = __reduce_max_sync(kAllLanes, longest);
  }
  int32_t lookup = begin + Lane::index();
  const auto fetch = [&] {
    uint2 target = make_uint2(kNoRow, 0);
    if (lookup < end) target = workspace.row_of_lookup[lookup];
    return target;
  };
  bool added = false;
  // Nothing looks at a page before its turn comes: it would wait for it there.
  uint2 next = fetch();
#pragma unroll 1
  for (int32_t done = 0; done < longest; done += kLanes) {
    uint2 target = next;
    lookup += kStep;
    next = fetch();
    if (target.x == kAddedRow) {
      added = true;
      target.y = 0;  // the factor is of no meaning
    }
    const int page = min(kLanes, longest - done);
#pragma unroll 1
    for (int at = 0; at < page; at += kInFlight) {
      uint4 row[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32_t slot = __shfl_sync(kAllLanes, target.x, at + i, kLanes);
        // Not only where there is a row: the compiler would load the parts of the address again.
        const char* const own = rows + uint64_t{slot} * row_bytes;
        row[i] = make_uint4(0, 0, 0, 0);
        if (slot < kNoRow && has_columns) row[i] = load_row<row_t>(own);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32_t factor = __shfl_sync(kAllLanes, target.y, at + i, kLanes);
        columns.add_row(row[i], __uint_as_float(factor));
      }
    }
  }
  return (__ballot_sync(kAllLanes, added) & (kByWarp ? kAllLanes : Lane::lanes_of_part())) != 0;
}

// Sums over the parts of a warp that have the same columns.
template <int kLanes, typename row_t>
__device__ __forceinline__ void sum_parts(PooledColumns<row_t>& columns) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int j = 0; j < PooledColumns<row_t>::kCount; ++j) {
      columns.sum[j] += __shfl_xor_sync(kAllLanes, columns.sum[j], offset);
    }
  }
}

// Where one bag's sums are and where they go. Neither is read again soon: they shall not take the
// place of rows in the caches.
class BagTarget {
 public:
  __device__ __forceinline__ BagTarget(const PoolCall& call, const PoolFeature& feature,
                                       int64_t sample)
      : columns_(feature.embedding_dim),
        data_(call.output.data),
        type_(call.output.type),
        first_(sample * call.output.row_stride + feature.output_column) {
    const bool has_sums = call.workspace.sums != nullptr;
    const int64_t sums_first =
        has_sums ? first_ - call.range.first_sample * call.output.row_stride : first_;
    sums_ = (has_sums ? call.workspace.sums : static_cast<float*>(data_)) + sums_first;
    if (has_sums && !call.ends_sums) {
      data_ = call.workspace.sums;
      type_ = ElementType::kFloat32;
      first_ = sums_first;
    }
  }

  // Adds what the sums hold. The lane's columns begin at `column`.
  template <typename row_t>
  __device__ __forceinline__ void add_sums(PooledColumns<row_t>& columns, int32_t column) const {
    constexpr int kCount = PooledColumns<row_t>::kCount;
    const float* const from = sums_ + column;
    if (is_whole<kCount>(column) && is_aligned(from)) {
#pragma unroll
      for (int j = 0; j < kCount; j += 4) {
        columns.add_four(j, __ldcs(reinterpret_cast<const float4*>(from + j)));
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (column + j < columns_) columns.sum[j] += from[j];
    }
  }

  template <typename row_t>
  __device__ __forceinline__ void store(const PooledColumns<row_t>& columns, int32_t column) const {
    constexpr int kCount = PooledColumns<row_t>::kCount;
    const int64_t first = first_ + column;
    if (type_ == ElementType::kFloat32) {
      float* const to = static_cast<float*>(data_) + first;
      if (is_whole<kCount>(column) && is_aligned(to)) {
#pragma unroll
        for (int j = 0; j < kCount; j += 4) {
          __stcs(reinterpret_cast<float4*>(to + j), columns.four(j));
        }
        return;
      }
    } else {
      __half* const to = static_cast<__half*>(data_) + first;
      if (is_whole<kCount>(column) && is_aligned(to, 2 * kCount)) {
        store_16_bits(columns, to);
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (column + j < columns_) store_element<float>(data_, type_, first + j, columns.sum[j]);
    }
  }

 private:
  template <int kCount>
  __device__ __forceinline__ bool is_whole(int32_t column) const {
    return column + kCount <= columns_;
  }
  static __device__ __forceinline__ bool is_aligned(const void* address, int bytes = 16) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
  }

  template <typename row_t>
  __device__ __forceinline__ void store_16_bits(const PooledColumns<row_t>& columns,
                                                __half* to) const {
    constexpr int kPairs = PooledColumns<row_t>::kCount / 2;
    uint32_t pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = round_pair(columns.sum[2 * i], columns.sum[2 * i + 1]);
      if (type_ == ElementType::kBFloat16) {
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(columns.sum[2 * i], columns.sum[2 * i + 1]);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    if constexpr (kPairs == 4) {
      __stcs(reinterpret_cast<uint4*>(to), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    } else {
      __stcs(reinterpret_cast<uint2*>(to), make_uint2(pairs[0], pairs[1]));
    }
  }

  int32_t columns_;
  void* data_;
  ElementType type_;
  int64_t first_;
  float* sums_;  // of no meaning where none are added
};

}  // namespace flowtt::cuda
