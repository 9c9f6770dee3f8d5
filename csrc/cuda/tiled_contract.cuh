// The second launch of the tiled forward path: persistent blocks, each with an equal slice of the
// grouped lookups, whatever their ids: a hot prefix is spread over blocks like everything else.

#pragma once

#include "float_types.cuh"
#include "tiled_chain.cuh"
#include "tiled_forward.h"
#include "tiled_window.cuh"

namespace flowtt::cuda {

// What is known of a lookup's factor and target when it is planned.
struct PlannedFactor {
  int32_t exponent;
  float weight;
  bool adds;  // to a sum, instead of storing the row of a bag of its own
};

// Plans the lane's lookup but for its factor, whose ingredients arrive last.
template <typename Chain>
__device__ __forceinline__ PlannedFactor plan_lookup(
    PlannedLookup& planned, const TiledFeature& feature, const TiledRange& range,
    const TiledWorkspace& workspace, const PooledOutput& output, int32_t bin, int64_t position) {
  const uint2 entry = __ldg(workspace.entries + position);
  const uint32_t i1 = entry.x >> 16;
  const uint32_t i3 = entry.x & 0xffffu;
  planned.slices = make_uint2((feature.packed[0] + i1 * Chain::kFirstSlice) * Chain::kHalfBytes,
                              (feature.packed[2] + i3 * Chain::kThirdSlice) * Chain::kHalfBytes);
  planned.bin = bin;
  const bool adds = (entry.y & kLoneLookup) == 0;
  const int64_t sample = entry.y & ~kLoneLookup;
  if (adds && workspace.sums != nullptr) {
    planned.target = reinterpret_cast<char*>(
        workspace.sums + (sample - range.first_sample) * output.row_stride + feature.output_column);
  } else {
    const int64_t element_bytes = output.type == ElementType::kFloat32 ? 4 : 2;
    planned.target = static_cast<char*>(output.data) +
                     (sample * output.row_stride + feature.output_column) * element_bytes;
  }
  const int32_t exponent = __ldg(workspace.exponents + feature.exponents[0] + i1) +
                           __ldg(workspace.exponents + feature.exponents[1] + bin) +
                           __ldg(workspace.exponents + feature.exponents[2] + i3);
  return {exponent, workspace.factors != nullptr ? __ldg(workspace.factors + position) : 1.0f,
          adds};
}

// Computes the rows of a tile into shared memory.
template <typename Chain, int kQ3, bool kExact>
__device__ __forceinline__ void compute_rows(float* rows, const typename Chain::Operands& operands,
                                             const typename Chain::Second& second,
                                             const TiledFeature& feature) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int q2 = kExact ? kMaxTiledQ : feature.q[1];
  const int q3 = kExact ? kQ3 : feature.q[2];
  const int a = 2 * (t % 2);
  const int j3 = g % kQ3;
  const bool has_column = Chain::has_own_results() && (kExact || (j3 < q3 && a < feature.q[0]));
  const bool has_next_row = has_column && (kExact || a + 1 < feature.q[0]);
  float* const own = rows + t / 2 * Chain::kPaddedRow;
  Chain::rows(operands, second, q2, [&](int pair, int b, float value0, float value1) {
    float* const row = own + 2 * pair * Chain::kPaddedRow;
    const int column = (a * q2 + b) * q3 + j3;
    if constexpr (kExact) {
      // The parts of the offset that depend on the lane and those that do not.
      constexpr int kNextRow = kMaxTiledQ * kQ3;
      float* const first = row + Chain::row_offset(a * kNextRow) + j3;
      if (has_column) {
        first[b * kQ3] = value0;
        first[Chain::row_offset(kNextRow) + b * kQ3] = value1;
      }
    } else {
      if (has_column) row[Chain::row_offset(column)] = value0;
      if (has_next_row) row[Chain::row_offset(column + q2 * q3)] = value1;
    }
  });
}

__device__ __forceinline__ void store_16_bit(char* row, ElementType type, int column,
                                             float4 value) {
  uint2 words;
  if (type == ElementType::kFloat16) {
    words = make_uint2(round_pair(value.x, value.y), round_pair(value.z, value.w));
  } else {
    const __nv_bfloat162 first = __floats2bfloat162_rn(value.x, value.y);
    const __nv_bfloat162 second = __floats2bfloat162_rn(value.z, value.w);
    words = make_uint2(*reinterpret_cast<const uint32_t*>(&first),
                       *reinterpret_cast<const uint32_t*>(&second));
  }
  __stcs(reinterpret_cast<uint2*>(reinterpret_cast<__half*>(row) + column), words);
}

// Scales the rows of a tile and stores them or adds them to sums: bit x of `adds` for row x. `plan`
// starts at the tile.
template <typename Chain, int kQ3, bool kExact>
__device__ __forceinline__ void emit_rows(const float* rows, const PlannedLookup* plan,
                                          uint32_t adds, int count, const TiledFeature& feature,
                                          ElementType output_type) {
  const int lane = threadIdx.x % 32;
  if constexpr (kExact) {
    constexpr int kVectors = kMaxTiledQ * kMaxTiledQ * kQ3 / 4;
    constexpr int kRounds = kTileLookups * kVectors / 32;
    constexpr int kBatch = 2;  // rows read before the first is written
#pragma unroll
    for (int first = 0; first < kRounds; first += kBatch) {
      char* target[kBatch];
      float4 value[kBatch];
      const int column = lane % kVectors * 4;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = ((first + i) * 32 + lane) / kVectors;
        const float factor = plan[x].factor;
        target[i] = plan[x].target;
        value[i] = *reinterpret_cast<const float4*>(rows + x * Chain::kPaddedRow +
                                                    Chain::row_offset(column));
        value[i] = make_float4(value[i].x * factor, value[i].y * factor, value[i].z * factor,
                               value[i].w * factor);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = ((first + i) * 32 + lane) / kVectors;
        const bool adds_row = (adds >> x & 1) != 0;
        float* const data = reinterpret_cast<float*>(target[i]) + column;
        add_if(x < count && adds_row, data, value[i]);
        if (output_type == ElementType::kFloat32) {
          store_if(x < count && !adds_row, data, value[i]);
        } else if (x < count && !adds_row) {
          store_16_bit(target[i], output_type, column, value[i]);
        }
      }
    }
  } else {
    for (int x = 0; x < count; ++x) {
      const float factor = plan[x].factor;
      char* const target = plan[x].target;
      for (int column = lane; column < feature.embedding_dim; column += 32) {
        const float value = factor * rows[x * Chain::kPaddedRow + Chain::row_offset(column)];
        if ((adds >> x & 1) != 0) {
          atomicAdd(reinterpret_cast<float*>(target) + column, value);
        } else {
          store_element<float>(target, output_type, column, value);
        }
      }
    }
  }
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1)
    tiled_contract_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ PooledOutput output) {
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts>;
  __shared__ Segments segments;
  // More than a window: tiles may read past its end, and write nothing there.
  constexpr int kPlanned = 32 + kTileLookups;
  extern __shared__ __align__(16) float shared_rows[];  // rows and plan of each warp, bin_start
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float* const rows = shared_rows + warp * kTileLookups * Chain::kPaddedRow;
  PlannedLookup* const plans =
      reinterpret_cast<PlannedLookup*>(shared_rows + kWarps * kTileLookups * Chain::kPaddedRow);
  PlannedLookup* const plan = plans + warp * kPlanned;
  int32_t* const bin_start = reinterpret_cast<int32_t*>(plans + kWarps * kPlanned);

  load_segments(segments, group, batch, range);
  const int64_t total = segments.first_entry[group.count];
  if (total > range.end_lookup - range.first_lookup) return;  // see group_chunk
  const int32_t block_begin = static_cast<int32_t>(total * blockIdx.x / gridDim.x);
  const int32_t block_end = static_cast<int32_t>(total * (blockIdx.x + 1) / gridDim.x);
  wait_for_previous_kernel();

  const uint32_t zero = blockDim.y - 1;
  typename Chain::Second second;
  for (int32_t f = 0; f < group.count; ++f) {
    const int32_t first_entry = segments.first_entry[f];
    const int32_t begin = max(block_begin, first_entry) - first_entry;
    const int32_t end = min(block_end, segments.first_entry[f + 1]) - first_entry;
    if (begin >= end) continue;
    const TiledFeature& feature = group.features[f];
    const FeatureChunks chunks{
        workspace.starts + static_cast<int64_t>(segments.first_chunk[f]) * range.starts_stride,
        range.starts_stride, segments.first_chunk[f + 1] - segments.first_chunk[f],
        range.chunk_lookups, first_entry};
    sum_bin_starts(bin_start, chunks, feature.p[1]);

    const int32_t per_warp = (end - begin + kWarps - 1) / kWarps;
    const int32_t warp_begin = begin + warp * per_warp;
    const int32_t warp_end = min(warp_begin + per_warp, end);
    if (warp_begin >= warp_end) continue;
    const int32_t windows = (warp_end - warp_begin + 31) / 32;
    const int32_t window = (warp_end - warp_begin + windows - 1) / windows;
    const typename Chain::LaneOffsets lane_offsets(feature);
    int32_t resident = -1;  // i2 of the slice in registers
    for (int32_t base = warp_begin; base < warp_end; base += window) {
      const int32_t count = min(window, warp_end - base);
      const int32_t p = base + min(lane, count - 1);
      const int32_t bin = find_bin(bin_start, feature.p[1], p);
      // The large loads start first.
      const int32_t first_bin = __shfl_sync(kAllLanes, bin, 0);
      if (first_bin != resident) {
        Chain::load_second(second, workspace, lane_offsets, first_bin);
        resident = first_bin;
      }
      const int64_t position = find_entry(chunks, bin_start, bin, p);
      __syncwarp();
      const PlannedFactor factor =
          plan_lookup<Chain>(plan[lane], feature, range, workspace, output, bin, position);
      __syncwarp();
      const int32_t left_bin = __shfl_up_sync(kAllLanes, bin, 1);
      const uint32_t bin_heads =
          __ballot_sync(kAllLanes, lane > 0 && lane < count && bin != left_bin);
      const uint32_t adds = __ballot_sync(kAllLanes, factor.adds);
      // Lookups [tile, tile_end) are of one i2.
      const auto end_of_tile = [&](int tile) {
        const uint32_t later = tile < 31 ? bin_heads & (kAllLanes << (tile + 1)) : 0u;
        return min(tile + kTileLookups, later != 0 ? __ffs(later) - 1 : count);
      };
      int tile = 0;
      int tile_end = end_of_tile(0);
      typename Chain::Loaded loaded;
      Chain::load_tile(loaded, workspace, lane_offsets, plan, tile, tile_end - 1);
      plan[lane].factor = ldexpf(factor.weight, -factor.exponent);
      __syncwarp();
      while (tile < count) {
        const int32_t i2 = plan[tile].bin;
        if (i2 != resident) {
          Chain::load_second(second, workspace, lane_offsets, i2);
          resident = i2;
        }
        typename Chain::Operands operands;
        Chain::arrange(operands, loaded, zero);
        const int next = tile_end;
        const int next_end = next < count ? end_of_tile(next) : next;
        compute_rows<Chain, kQ3, kExact>(rows, operands, second, feature);
        if (next < count) {
          Chain::load_tile(loaded, workspace, lane_offsets, plan, next, next_end - 1);
        }
        __syncwarp();
        emit_rows<Chain, kQ3, kExact>(rows, plan + tile, adds >> tile, tile_end - tile, feature,
                                      output.type);
        __syncwarp();
        tile = next;
        tile_end = next_end;
      }
    }
  }
}

}  // namespace flowtt::cuda
