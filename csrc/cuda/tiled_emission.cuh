// Where finished rows go: from the registers of a warp to the output, to the buffered rows, or
// added to sums.

#pragma once

#include "float_types.cuh"
#include "tiled_chain.cuh"
#include "tiled_window.cuh"

namespace flowtt::cuda {

// The targets of one feature's rows. Rows of exact tilings are written in pairs of columns; the
// lane's first column is part of the addresses then.
template <typename Chain, bool kExact>
class RowEmitter {
 public:
  __device__ __forceinline__ RowEmitter(const TiledFeature& feature, const TiledRange& range,
                                        const TiledWorkspace& workspace, const PooledOutput& output)
      : feature_(feature), range_(range), workspace_(workspace), output_(output) {
    lane_column_ = kExact ? Chain::row_column(threadIdx.x % 32) : 0;
    is_fp32_ = output.type == ElementType::kFloat32;
    const int element = is_fp32_ ? 4 : 2;
    stride_ = static_cast<uint32_t>(output.row_stride) * element;
    output_row_ = static_cast<char*>(output.data) +
                  (feature.output_column + lane_column_) * element;
  }

  // `row`: as Chain::compute_row leaves it. By whole warps; `planned` is the same in all lanes.
  __device__ __forceinline__ void emit(const float (&row)[4], const PlannedRow& planned,
                                       const WindowPlan& plan) const {
    float2 pairs[Chain::kPairs];
    Chain::own_pairs(pairs, row, threadIdx.x % 32);
    const uint32_t kind = planned.prefix & kRowKind;
    if (kind == kStoreRow) {
      store(pairs, planned.factor, planned.target);
    } else if (kind == kBufferRow) {
      buffer(pairs, planned.target);
    } else {
      for (uint32_t lanes = planned.target; lanes != 0; lanes &= lanes - 1) {
        const uint2 lookup = plan.lookups[lowest_lane(lanes)];
        const uint32_t sample = lookup.x & ~kLoneLookup;
        if ((lookup.x & kLoneLookup) != 0) {
          store(pairs, __uint_as_float(lookup.y), sample);
        } else {
          add(pairs, __uint_as_float(lookup.y), sample);
        }
      }
    }
  }

 private:
  using Pairs = float2[Chain::kPairs];

  // Calls pair(columns after the lane's first, values), or element(column, value) for the columns
  // that the row has.
  template <typename Pair, typename Element>
  __device__ __forceinline__ void visit(const Pairs& pairs, Pair&& pair, Element&& element) const {
    if constexpr (kExact) {
#pragma unroll
      for (int i = 0; i < Chain::kPairs; ++i) pair(64 * i, pairs[i]);
    } else {
      constexpr int kQ3 = Chain::kPairs == 2 ? 8 : 4;
      const int padded = Chain::row_column(threadIdx.x % 32);
      const int j3 = padded % kQ3;
#pragma unroll
      for (int i = 0; i < Chain::kPairs; ++i) {
        const int row = padded / kQ3 + 8 * i;
        const int j1 = row / kMaxTiledQ;
        const int j2 = row % kMaxTiledQ;
        if (j1 >= feature_.q[0] || j2 >= feature_.q[1]) continue;
        const int column = (j1 * feature_.q[1] + j2) * feature_.q[2] + j3;
        if (j3 < feature_.q[2]) element(column, pairs[i].x);
        if (j3 + 1 < feature_.q[2]) element(column + 1, pairs[i].y);
      }
    }
  }

  // Stored rows are not read again soon, so they need no place in the caches.
  __device__ __forceinline__ void store(const Pairs& pairs, float factor, uint32_t sample) const {
    char* const target = output_row_ + static_cast<uint64_t>(sample) * stride_;
    visit(
        pairs,
        [&](int columns, float2 value) {
          value = make_float2(value.x * factor, value.y * factor);
          if (is_fp32_) {
            __stcs(reinterpret_cast<float2*>(target + columns * 4), value);
          } else if (output_.type == ElementType::kFloat16) {
            __stcs(reinterpret_cast<uint32_t*>(target + columns * 2),
                   round_pair(value.x, value.y));
          } else {
            const __nv_bfloat162 rounded = __floats2bfloat162_rn(value.x, value.y);
            __stcs(reinterpret_cast<uint32_t*>(target + columns * 2),
                   *reinterpret_cast<const uint32_t*>(&rounded));
          }
        },
        [&](int column, float value) {
          store_element<float>(target, output_.type, column, value * factor);
        });
  }

  __device__ __forceinline__ void buffer(const Pairs& pairs, uint32_t slot) const {
    const uint64_t first = static_cast<uint64_t>(slot) * workspace_.buffered_row_elements;
    if constexpr (Chain::kParts == 1) {
      constexpr float kScale = 1.0f / (1 << kBufferedRowShift);
      __half* const target = static_cast<__half*>(workspace_.rows) + first + lane_column_;
      visit(
          pairs,
          [&](int columns, float2 value) {
            *reinterpret_cast<uint32_t*>(target + columns) =
                round_pair(value.x * kScale, value.y * kScale);
          },
          [&](int column, float value) { target[column] = __float2half_rn(value * kScale); });
    } else {
      float* const target = static_cast<float*>(workspace_.rows) + first + lane_column_;
      visit(
          pairs,
          [&](int columns, float2 value) { *reinterpret_cast<float2*>(target + columns) = value; },
          [&](int column, float value) { target[column] = value; });
    }
  }

  __device__ __forceinline__ void add(const Pairs& pairs, float factor, uint32_t sample) const {
    float* const target = (workspace_.sums != nullptr
                               ? workspace_.sums + (sample - range_.first_sample) *
                                                       output_.row_stride
                               : static_cast<float*>(output_.data) + sample * output_.row_stride) +
                          feature_.output_column + lane_column_;
    visit(
        pairs,
        [&](int columns, float2 value) {
          add_pair(target + columns, make_float2(value.x * factor, value.y * factor));
        },
        [&](int column, float value) { atomicAdd(target + column, value * factor); });
  }

  const TiledFeature& feature_;
  const TiledRange& range_;
  const TiledWorkspace& workspace_;
  const PooledOutput& output_;
  int lane_column_;
  bool is_fp32_;
  uint32_t stride_;
  char* output_row_;
};

}  // namespace flowtt::cuda
