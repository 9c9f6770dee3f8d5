// Packing for the wide and the two-core kernels: as tiled_packing.cuh, with sizes known at run time
// only. wide_shape.h has the layouts.

#pragma once

#include "float_types.cuh"
#include "tiled_packing.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

// Where the elements of a vector come from: element e from first + k * k_stride (+ 1 for the second
// column of the layout `right`), if its summed index and column exist.
struct VectorSource {
  int32_t first;
  int32_t k_stride;
  int32_t k;  // summed index of element 0
  int32_t k_end;
  int32_t columns;  // that exist, from the vector's own on; `right` has two in a vector
};

// Summed index of element e, relative to element 0.
template <PackedRole kRole>
__device__ __forceinline__ constexpr int summed_offset(int e) {
  if (kRole == PackedRole::kFirst) return e;
  if (kRole == PackedRole::kRight) return 8 * (e / 4) + e % 2;
  return 16 * (e / 4) + 8 * (e / 2 % 2) + e % 2;
}

template <PackedRole kRole>
__device__ __forceinline__ VectorSource vector_source(const TiledFeature& feature, int32_t v) {
  VectorSource source{};
  if constexpr (kRole == PackedRole::kLeft || kRole == PackedRole::kRight) {
    const TwoCoreShape shape(feature);
    source.k_end = shape.r;
    int32_t column;
    if constexpr (kRole == PackedRole::kLeft) {
      const int32_t lane = v % 32;
      const int32_t step = v / 32 % shape.steps;
      column = v / 32 / shape.steps * 8 + lane / 4;
      source.k = 32 * step + 2 * (lane % 4);
      source.columns = column < shape.q1;
      source.k_stride = 1;
      source.first = column * shape.r + source.k;
    } else {
      const int32_t lane = v % 32;
      const int32_t half_step = v / 32 % (2 * shape.steps);
      column = v / 32 / (2 * shape.steps) * 16 + lane / 4 * 2;
      source.k = 16 * half_step + 2 * (lane % 4);
      source.columns = shape.q2 - column;
      source.k_stride = shape.q2;
      source.first = source.k * shape.q2 + column;
    }
    return source;
  }
  const WideShape shape(feature);
  if constexpr (kRole == PackedRole::kFirst) {
    const int32_t row = v / (4 * shape.steps);
    source.k = v % (4 * shape.steps) * 8;
    source.k_end = shape.r1;
    source.columns = row < shape.q1;
    source.k_stride = 1;
    source.first = row * shape.r1 + source.k;
  } else if constexpr (kRole == PackedRole::kSecond) {
    const int32_t lane = v % 32;
    const int32_t step = v / 32 % shape.steps;
    const int32_t u = v / 32 / shape.steps % 4;
    const int32_t group = v / 32 / shape.steps / 4;
    const int32_t right = group % shape.steps * 32 + lane / 8 * 8 + 2 * u + lane / 4 % 2;
    source.k = 32 * step + 2 * (lane % 4);
    source.k_end = shape.r1;
    source.columns = right < shape.r2;
    source.k_stride = shape.q2 * shape.r2;
    source.first = source.k * source.k_stride + group / shape.steps * shape.r2 + right;
  } else {
    const int32_t g = v / 4 % shape.columns;
    const int32_t step = v / 4 / shape.columns % shape.steps;
    const int32_t column = v / 4 / shape.columns / shape.steps * 8 + g;
    source.k = 32 * step + 2 * (v % 4);
    source.k_end = shape.r2;
    source.columns = column < shape.q3;
    source.k_stride = shape.q3;
    source.first = source.k * shape.q3 + column;
  }
  return source;
}

// Two elements of 16 bits.
template <typename core_t>
__device__ __forceinline__ float2 unpack_pair(uint32_t word) {
  if constexpr (std::is_same_v<core_t, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  } else {
    // bf16 is the upper half of fp32.
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
}

// Largest magnitude of a thread's share of `numel` elements. A NaN wins.
template <typename core_t>
__device__ __forceinline__ float largest_magnitude(const core_t* slice, int32_t numel, int rank,
                                                   int team) {
  float largest = 0.0f;
  constexpr int kPerVector = 16 / sizeof(core_t);
  if (numel % kPerVector != 0 || reinterpret_cast<uintptr_t>(slice) % 16 != 0) {
    for (int32_t i = rank; i < numel; i += team) {
      largest = larger_magnitude(largest, to_accumulator<float>(slice[i]));
    }
    return largest;
  }
  const auto include = [&](uint32_t word) {
    if constexpr (kPerVector == 4) {
      largest = larger_magnitude(largest, __uint_as_float(word));
    } else {
      const float2 pair = unpack_pair<core_t>(word);
      largest = larger_magnitude(larger_magnitude(largest, pair.x), pair.y);
    }
  };
  const uint4* vectors = reinterpret_cast<const uint4*>(slice);
  const int32_t count = numel / kPerVector;
  constexpr int kUnroll = 4;
  for (int32_t base = rank; base < count; base += kUnroll * team) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      loaded[i] =
          base + i * team < count ? __ldg(vectors + base + i * team) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      include(loaded[i].x);
      include(loaded[i].y);
      include(loaded[i].z);
      include(loaded[i].w);
    }
  }
  return largest;
}

// The largest of the team's values, known to all of its threads.
__device__ __forceinline__ float largest_of_team(float largest, int rank, int team,
                                                 uint32_t* warp_maxima) {
  uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest));
  if (team > 32) {
    __syncthreads();  // the block's last piece has been read
    if (rank % 32 == 0) warp_maxima[rank / 32] = bits;
    __syncthreads();
    bits = __reduce_max_sync(kAllLanes, rank % 32 < team / 32 ? warp_maxima[rank % 32] : 0u);
  }
  return __uint_as_float(bits);
}

constexpr int kPackedBatch = 2;  // vectors that a thread holds at a time

// The thread's vectors base, base + team, ...
template <PackedRole kRole, typename core_t>
__device__ __forceinline__ void load_batch(float (&values)[kPackedBatch][kVectorHalves],
                                           const TiledFeature& feature, const core_t* slice,
                                           int32_t base, int32_t vectors, int team) {
#pragma unroll
  for (int i = 0; i < kPackedBatch; ++i) {
    const bool is_vector = base + i * team < vectors;
    VectorSource source{};
    if (is_vector) source = vector_source<kRole>(feature, base + i * team);
#pragma unroll
    for (int e = 0; e < kVectorHalves; ++e) {
      const int k = summed_offset<kRole>(e);
      const int column = kRole == PackedRole::kRight ? e / 2 % 2 : 0;
      const bool exists = is_vector && source.k + k < source.k_end && column < source.columns;
      values[i][e] =
          exists ? to_accumulator<float>(slice[source.first + k * source.k_stride + column]) : 0.0f;
    }
  }
}

// Packs one slice by `team` threads, a warp or the block; `rank` is the thread's number in it.
template <PackedRole kRole, typename core_t>
__device__ __forceinline__ void pack_wide_slice(const TiledFeature& feature,
                                                const TiledWorkspace& workspace, int core,
                                                int32_t index, int32_t numel, int rank, int team,
                                                uint32_t* warp_maxima) {
  const core_t* slice =
      static_cast<const core_t*>(feature.cores[core]) + static_cast<int64_t>(index) * numel;
  const int32_t vectors = static_cast<int32_t>(feature.slice_halves[core]) / kVectorHalves;
  float values[kPackedBatch][kVectorHalves];
  float largest = 0.0f;
  // A slice that the team holds as a whole is read once, a larger one twice.
  const bool is_held = vectors <= kPackedBatch * team;
  if (is_held) {
    load_batch<kRole>(values, feature, slice, rank, vectors, team);
#pragma unroll
    for (int i = 0; i < kPackedBatch; ++i) {
#pragma unroll
      for (int e = 0; e < kVectorHalves; ++e) largest = larger_magnitude(largest, values[i][e]);
    }
  } else {
    largest = largest_magnitude(slice, numel, rank, team);
  }
  const int32_t exponent = scale_exponent(largest_of_team(largest, rank, team, warp_maxima));
  if (rank == 0) workspace.exponents[feature.exponents[core] + index] = exponent;
  const float scale = __int_as_float((exponent + 127) << 23);
  const int64_t offset =
      feature.packed[core] + static_cast<int64_t>(index) * feature.slice_halves[core];
  __half* const high = workspace.packed_high + offset;
  __half* const low = workspace.packed_low != nullptr ? workspace.packed_low + offset : nullptr;
#pragma unroll 1
  for (int32_t base = rank; base < vectors; base += kPackedBatch * team) {
    if (!is_held) load_batch<kRole>(values, feature, slice, base, vectors, team);
#pragma unroll
    for (int i = 0; i < kPackedBatch; ++i) {
      const int32_t v = base + i * team;
      if (v >= vectors) break;
      store_packed<kVectorHalves>(values[i], scale, high + v * kVectorHalves,
                                  low != nullptr ? low + v * kVectorHalves : nullptr);
    }
  }
}

// Slices of at most this many vectors are packed by a warp each, larger ones by a block.
inline constexpr int32_t kMaxWarpVectors = 256;

__host__ __device__ inline int32_t wide_pack_pieces(const TiledFeature& feature, int core) {
  const bool by_warps =
      static_cast<int32_t>(feature.slice_halves[core]) <= kMaxWarpVectors * kVectorHalves;
  return by_warps ? (feature.p[core] + kPrepareWarps - 1) / kPrepareWarps : feature.p[core];
}

template <PackedRole kRole, typename core_t>
__device__ __forceinline__ void pack_wide_core(const TiledFeature& feature,
                                               const TiledWorkspace& workspace, int core,
                                               int32_t numel, int32_t piece,
                                               uint32_t* warp_maxima) {
  if (static_cast<int32_t>(feature.slice_halves[core]) > kMaxWarpVectors * kVectorHalves) {
    pack_wide_slice<kRole, core_t>(feature, workspace, core, piece, numel, threadIdx.x,
                                   kPrepareThreads, warp_maxima);
    return;
  }
  const int32_t index = piece * kPrepareWarps + threadIdx.x / 32;
  if (index >= feature.p[core]) return;
  pack_wide_slice<kRole, core_t>(feature, workspace, core, index, numel, threadIdx.x % 32, 32,
                                 nullptr);
}

// A packing policy of the preparation (tiled_prepare.cuh). Pairs of the last two of four cores are
// packed elsewhere (suffix_pairs.cuh).
template <bool kTwoCores, typename core_t>
struct WidePacking {
  struct Scratch {
    uint32_t warp_maxima[kPrepareWarps];
  };

  // Packs the slices of one piece, a block's work; `piece` counts from the feature's first.
  static __device__ __forceinline__ void pack(const TiledFeature& feature,
                                              const TiledWorkspace& workspace, Scratch& scratch,
                                              int32_t piece) {
    uint32_t* const maxima = scratch.warp_maxima;
    const int32_t second_pieces = wide_pack_pieces(feature, 1);
    const int32_t first_pieces = wide_pack_pieces(feature, 0);
    const int32_t first_piece = piece - second_pieces;
    const int32_t numel0 = feature.q[0] * feature.r[0];
    const int32_t numel1 = feature.r[0] * feature.q[1] * (kTwoCores ? 1 : feature.r[1]);
    constexpr auto kSecondRole = kTwoCores ? PackedRole::kRight : PackedRole::kSecond;
    constexpr auto kFirstRole = kTwoCores ? PackedRole::kLeft : PackedRole::kFirst;
    if (first_piece < 0) {  // the largest slices first
      pack_wide_core<kSecondRole, core_t>(feature, workspace, 1, numel1, piece, maxima);
    } else if (first_piece < first_pieces) {
      pack_wide_core<kFirstRole, core_t>(feature, workspace, 0, numel0, first_piece, maxima);
    } else if constexpr (!kTwoCores) {
      pack_wide_core<PackedRole::kThird, core_t>(feature, workspace, 2, feature.r[1] * feature.q[2],
                                                 first_piece - first_pieces, maxima);
    }
  }
};

// Pieces of a whole feature.
inline int32_t wide_pack_pieces(const TiledFeature& feature, bool two_cores, bool pairs) {
  int32_t pieces = wide_pack_pieces(feature, 0) + wide_pack_pieces(feature, 1);
  if (!two_cores && !pairs) pieces += wide_pack_pieces(feature, 2);
  return pieces;
}

}  // namespace flowtt::cuda
