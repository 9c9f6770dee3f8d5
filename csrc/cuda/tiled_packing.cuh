// Packing of three cores, a part of the preparation: who packs which slices. Where their elements
// lie is in tiled_slice_layout.cuh.

#pragma once

#include "tiled_chunks.cuh"
#include "tiled_slice_layout.cuh"

namespace flowtt::cuda {

// Packs one slice of core 2 by as many threads as it has vectors; `rank` is the thread's number
// among them. Has barriers.
template <int kRank1, int kRank2, int kQ3, typename core_t>
__device__ __forceinline__ void pack_second_slice(const TiledFeature& feature,
                                                  const TiledWorkspace& workspace, int32_t index,
                                                  int rank, uint32_t* warp_maxima) {
  using Layout = SliceLayout<1, kRank1, kRank2, kQ3>;
  float values[Layout::kElements];
  load_slice_vector<1, kRank1, kRank2, kQ3, false, core_t>(values, feature, index, rank);
  uint32_t bits = largest_bits(values);
  __syncthreads();  // the maxima of the block's last slices have been read
  if (rank % 32 == 0) warp_maxima[rank / 32] = bits;
  __syncthreads();
  bits =
      __reduce_max_sync(kAllLanes, rank % 32 < Layout::kVectors / 32 ? warp_maxima[rank % 32] : 0u);
  store_slice_vector<1, kRank1, kRank2, kQ3>(values, feature, workspace, index, rank, bits);
}

// Packs kCount slices of core 1 or 3 by a warp: `index`, `index` + kPrepareWarps, ...
template <int kCore, int kRank1, int kRank2, int kQ3, bool kFull, typename core_t, int kCount>
__device__ __forceinline__ void pack_small_slices(const TiledFeature& feature,
                                                  const TiledWorkspace& workspace, int32_t index) {
  using Layout = SliceLayout<kCore, kRank1, kRank2, kQ3>;
  static_assert(Layout::kVectors <= 32);
  const int lane = threadIdx.x % 32;
  float values[kCount][Layout::kElements];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    load_slice_vector<kCore, kRank1, kRank2, kQ3, kFull, core_t>(values[i], feature,
                                                                 index + i * kPrepareWarps, lane);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    store_slice_vector<kCore, kRank1, kRank2, kQ3>(
        values[i], feature, workspace, index + i * kPrepareWarps, lane, largest_bits(values[i]));
  }
}

// The slices of core 1 or 3 of a warp, all at once if they have no padding.
template <int kCore, int kRank1, int kRank2, int kQ3, typename core_t, int kSmallSlices>
__device__ __forceinline__ void pack_small_slices(const TiledFeature& feature,
                                                  const TiledWorkspace& workspace, int32_t index) {
  if (is_full<kRank1, kRank2, kQ3>(feature)) {
    pack_small_slices<kCore, kRank1, kRank2, kQ3, true, core_t, kSmallSlices>(feature, workspace,
                                                                              index);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kSmallSlices; ++i) {
    pack_small_slices<kCore, kRank1, kRank2, kQ3, false, core_t, 1>(feature, workspace,
                                                                    index + i * kPrepareWarps);
  }
}

// Consecutive elements of a core, in one load.
template <typename core_t, int kCount>
struct alignas(sizeof(core_t) * kCount) CoreVector {
  core_t elements[kCount];
};

// Packs the columns (b, .) of kCount slices of core 2 that have no padding by a warp, in whole
// vectors. indices: of the slices. combine: from the bits of the largest magnitudes of the warp's
// columns of each slice to those of the whole slices.
template <int kRank1, int kRank2, typename core_t, int kCount, typename Combine>
__device__ __forceinline__ void pack_exact_columns(const TiledFeature& feature,
                                                   const TiledWorkspace& workspace,
                                                   const int32_t (&indices)[kCount], int b,
                                                   Combine&& combine) {
  constexpr int kRows = kRank1 / 4;  // consecutive elements of a packed vector
  constexpr int kTiles = kRank2 / 8;
  const int lane = threadIdx.x % 32;
  const int t = lane % 4;
  const bool is_odd = lane / 4 % 2 != 0;
  const core_t* const from = static_cast<const core_t*>(feature.cores[1]) +
                             (kRows * t * kMaxTiledQ + b) * kRank2 + kTiles * (lane / 4);
  CoreVector<core_t, kTiles> loaded[kCount][kRows];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int e = 0; e < kRows; ++e) {
      loaded[i][e] = *reinterpret_cast<const CoreVector<core_t, kTiles>*>(
          from + static_cast<int64_t>(indices[i]) * (kRank1 * kMaxTiledQ * kRank2) +
          e * kMaxTiledQ * kRank2);
    }
  }
  // Right ranks 2 u + g % 2 of the pair of lanes g, g + 1 belong to the one, but were loaded half
  // by the other.
  float values[kCount][kTiles][kRows];
  uint32_t bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kRows; ++e) {
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        const float even = to_accumulator<float>(loaded[i][e].elements[2 * j]);
        const float odd = to_accumulator<float>(loaded[i][e].elements[2 * j + 1]);
        const float received = __shfl_xor_sync(kAllLanes, is_odd ? even : odd, 4);
        values[i][j][e] = is_odd ? received : even;
        values[i][kTiles / 2 + j][e] = is_odd ? odd : received;
        largest = larger_magnitude(larger_magnitude(largest, even), odd);
      }
    }
    bits[i] = __reduce_max_sync(kAllLanes, __float_as_uint(largest));
  }
  combine(bits);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t exponent = scale_exponent(__uint_as_float(bits[i]));
    if (lane == 0 && b == 0) workspace.exponents[feature.exponents[1] + indices[i]] = exponent;
    const float scale = __int_as_float((exponent + 127) << 23);
    const int64_t offset = feature.packed[1] +
                           static_cast<int64_t>(indices[i]) * feature.slice_halves[1] +
                           (b * kTiles * 32 + lane) * kRows;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const int64_t at = offset + u * 32 * kRows;
      store_packed<kRows>(values[i][u], scale, workspace.packed_high + at,
                          workspace.packed_low != nullptr ? workspace.packed_low + at : nullptr);
    }
  }
}

// What a tiling of three cores packs, in pieces of one block's work: several slices of core 2, of
// core 1 or of core 3.
template <int kRank1, int kRank2, int kQ3, typename core_t>
struct ThreeCorePacking {
  static constexpr int kVectors = kMaxTiledQ * (kRank2 / 8) * 32;  // of a slice of core 2
  static constexpr int kTeams = kPrepareThreads / kVectors;
  // Slices of core 2 of a piece: 32 elements a thread.
  static constexpr int kSlicesPerWarp = 32 * 32 / (kRank1 * kRank2);
  static constexpr int kSlices = kPrepareWarps / kMaxTiledQ * kSlicesPerWarp;
  // Slices of core 1 or 3 of a warp: few, as more take more instructions, which few blocks share
  // the reading of.
  static constexpr int kSmallSlices = kRank1 == 16 ? 2 : 1;
  static constexpr int kSmallPerPiece = kPrepareWarps * kSmallSlices;

  struct Scratch {
    uint32_t warp_maxima[kSlicesPerWarp][kPrepareWarps];
  };

  static constexpr int32_t pieces(int32_t slices, int32_t per_piece) {
    return (slices + per_piece - 1) / per_piece;
  }
  static constexpr int32_t pieces(const TiledFeature& feature) {
    return pieces(feature.p[1], kSlices) + pieces(feature.p[0], kSmallPerPiece) +
           pieces(feature.p[2], kSmallPerPiece);
  }

  // Called by all threads of a block. Scratch may be in use by the piece before.
  static __device__ __forceinline__ void pack(const TiledFeature& feature,
                                              const TiledWorkspace& workspace, Scratch& scratch,
                                              int32_t piece) {
    const int32_t second_pieces = pieces(feature.p[1], kSlices);
    const int32_t first_pieces = pieces(feature.p[0], kSmallPerPiece);
    const int warp = threadIdx.x / 32;
    if (piece < second_pieces) {
      pack_second(feature, workspace, scratch, piece * kSlices);
    } else if (piece < second_pieces + first_pieces) {
      pack_small_slices<0, kRank1, kRank2, kQ3, core_t, kSmallSlices>(
          feature, workspace, (piece - second_pieces) * kSmallPerPiece + warp);
    } else {
      pack_small_slices<2, kRank1, kRank2, kQ3, core_t, kSmallSlices>(
          feature, workspace, (piece - second_pieces - first_pieces) * kSmallPerPiece + warp);
    }
  }

 private:
  static __device__ __forceinline__ void pack_second(const TiledFeature& feature,
                                                     const TiledWorkspace& workspace,
                                                     Scratch& scratch, int32_t first) {
    const int warp = threadIdx.x / 32;
    const bool exact =
        feature.r[0] == kRank1 && feature.r[1] == kRank2 && feature.q[1] == kMaxTiledQ &&
        reinterpret_cast<uintptr_t>(feature.cores[1]) % (kRank2 / 8 * sizeof(core_t)) == 0;
    if (exact) {
      // Warps without a slice of their own repeat the last one, to meet the others at the barrier.
      int32_t indices[kSlicesPerWarp];
#pragma unroll
      for (int i = 0; i < kSlicesPerWarp; ++i) {
        indices[i] =
            min(first + warp / kMaxTiledQ + i * (kPrepareWarps / kMaxTiledQ), feature.p[1] - 1);
      }
      __syncthreads();  // the maxima of the block's last piece have been read
      pack_exact_columns<kRank1, kRank2, core_t>(
          feature, workspace, indices, warp % kMaxTiledQ, [&](uint32_t (&bits)[kSlicesPerWarp]) {
#pragma unroll
            for (int i = 0; i < kSlicesPerWarp; ++i) scratch.warp_maxima[i][warp] = bits[i];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kSlicesPerWarp; ++i) {
              const uint32_t* own = scratch.warp_maxima[i] + warp / kMaxTiledQ * kMaxTiledQ;
              bits[i] = max(max(own[0], own[1]), max(own[2], own[3]));
            }
          });
      return;
    }
    const int team = threadIdx.x / kVectors;
#pragma unroll 1
    for (int32_t slice = first + team; slice - team < first + kSlices; slice += kTeams) {
      pack_second_slice<kRank1, kRank2, kQ3, core_t>(
          feature, workspace, slice, threadIdx.x % kVectors,
          scratch.warp_maxima[0] + team * (kVectors / 32));
    }
  }
};

template <typename Packing>
__device__ __forceinline__ void pack_piece(const TiledGroup& group, const TiledWorkspace& workspace,
                                           typename Packing::Scratch& scratch, int32_t piece) {
  int32_t f = 0;
  while (f + 1 < group.count && group.features[f + 1].first_pack_block <= piece) ++f;
  const TiledFeature& feature = group.features[f];
  Packing::pack(feature, workspace, scratch, piece - feature.first_pack_block);
}

}  // namespace flowtt::cuda
