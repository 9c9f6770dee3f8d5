// Where finished rows go: from the registers of a warp to the output, to the buffered rows, or
// added to sums.

#pragma once

#include "float_types.cuh"
#include "tiled_chain.cuh"
#include "tiled_window.cuh"

namespace flowtt::cuda {

// Writes finished rows. Those of exact tilings are written in pairs of columns, from the lane's
// first column on. kPooled: of bags that may have several
// lookups, whose rows may be buffered, otherwise of kinds that are not.
template <typename Chain, bool kExact, bool kPooled>
class RowEmitter {
 public:
  // `lookups`: address of WindowPlan::lookups.
  __device__ __forceinline__ RowEmitter(const TiledFeature& feature, ElementType output_type,
                                        uint32_t lookups, uint32_t lane)
      : feature_(feature), output_type_(output_type), lookups_(lookups), lane_(lane) {}

  // `row`: as Chain::compute_rows leaves it; `place`: as in RowSource; `destination`: a
  // RowDestination. The same in all lanes but for the row. By whole warps.
  __device__ __forceinline__ void emit(const float (&row)[4], uint32_t place,
                                       const uint4& destination) const {
    float2 pairs[Chain::kPairs];
    Chain::own_pairs(pairs, row, lane_);
    const uint32_t kind = place & kRowKind;
    const uint64_t target = target_of(destination);
    const float factor = __uint_as_float(destination.z);
    if constexpr (kPooled) {
      if (kind == kBufferRow) {
        buffer(pairs, factor, target);
        return;
      }
      if (kind == kAddRow) {
        add(pairs, factor, target);
        return;
      }
    }
    if (kind == kStoreFp32) {
      store_fp32(pairs, factor, target);
    } else if (kind == kStore16Bits) {
      store_16_bits(pairs, factor, target);
    } else if constexpr (!kPooled) {
      emit_each(pairs, static_cast<uint32_t>(target));
    }
  }

  // Two rows of one tile. Those of the usual kinds share their branches.
  __device__ __forceinline__ void emit_pair(const float (&rows)[2][4], uint32_t place,
                                            uint32_t next_place, const uint4& destination,
                                            const uint4& next_destination) const {
    const auto both_are = [&](uint32_t kind) {
      return (((place ^ kind) | (next_place ^ kind)) & kRowKind) == 0;
    };
    const auto emit_both = [&](auto&& write) {
      float2 pairs[2][Chain::kPairs];
      Chain::own_pairs(pairs[0], rows[0], lane_);
      Chain::own_pairs(pairs[1], rows[1], lane_);
      write(pairs[0], __uint_as_float(destination.z), target_of(destination));
      write(pairs[1], __uint_as_float(next_destination.z), target_of(next_destination));
    };
    if constexpr (kPooled) {
      if (both_are(kBufferRow)) {
        emit_both([&](const Pairs& pairs, float factor, uint64_t target) {
          buffer(pairs, factor, target);
        });
        return;
      }
      if (both_are(kAddRow)) {
        emit_both(
            [&](const Pairs& pairs, float factor, uint64_t target) { add(pairs, factor, target); });
        return;
      }
    }
    if (both_are(kStoreFp32)) {
      emit_both([&](const Pairs& pairs, float factor, uint64_t target) {
        store_fp32(pairs, factor, target);
      });
      return;
    }
    emit(rows[0], place, destination);
    emit(rows[1], next_place, next_destination);
  }

 private:
  using Pairs = float2[Chain::kPairs];

  static __device__ __forceinline__ uint64_t target_of(const uint4& destination) {
    return static_cast<uint64_t>(destination.y) << 32 | destination.x;
  }

  __device__ __forceinline__ uint32_t lane_column() const {
    return kExact ? Chain::row_column(lane_) : 0u;
  }

  // Calls pair(columns after the lane's first, values), or element(column, value) for the columns
  // that the row has.
  template <typename Pair, typename Element>
  __device__ __forceinline__ void visit(const Pairs& pairs, Pair&& pair, Element&& element) const {
    if constexpr (kExact) {
#pragma unroll
      for (int i = 0; i < Chain::kPairs; ++i) pair(64 * i, pairs[i]);
    } else {
      constexpr int kQ3 = Chain::kPairs == 2 ? 8 : 4;
      const int padded = Chain::row_column(lane_);
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
  __device__ __forceinline__ void store_fp32(const Pairs& pairs, float factor,
                                             uint64_t target) const {
    float* const row = reinterpret_cast<float*>(target) + lane_column();
    visit(
        pairs,
        [&](int columns, float2 value) {
          __stcs(reinterpret_cast<float2*>(row + columns),
                 make_float2(value.x * factor, value.y * factor));
        },
        [&](int column, float value) { __stcs(row + column, value * factor); });
  }

  __device__ __forceinline__ void store_16_bits(const Pairs& pairs, float factor,
                                                uint64_t target) const {
    __half* const row = reinterpret_cast<__half*>(target) + lane_column();
    visit(
        pairs,
        [&](int columns, float2 value) {
          value = make_float2(value.x * factor, value.y * factor);
          uint32_t rounded = round_pair(value.x, value.y);
          if (output_type_ == ElementType::kBFloat16) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(value.x, value.y);
            rounded = *reinterpret_cast<const uint32_t*>(&pair);
          }
          __stcs(reinterpret_cast<uint32_t*>(row + columns), rounded);
        },
        [&](int column, float value) {
          store_element<float>(row, output_type_, column, value * factor);
        });
  }

  __device__ __forceinline__ void buffer(const Pairs& pairs, float factor, uint64_t target) const {
    if constexpr (Chain::kParts == 1) {
      __half* const row = reinterpret_cast<__half*>(target) + lane_column();
      visit(
          pairs,
          [&](int columns, float2 value) {
            __stcg(reinterpret_cast<uint32_t*>(row + columns),
                   round_pair(value.x * factor, value.y * factor));
          },
          [&](int column, float value) { row[column] = __float2half_rn(value * factor); });
      pad(row);
    } else {
      float* const row = reinterpret_cast<float*>(target) + lane_column();
      visit(
          pairs,
          [&](int columns, float2 value) {
            __stcg(reinterpret_cast<float2*>(row + columns), value);
          },
          [&](int column, float value) { row[column] = value; });
      pad(row);
    }
  }

  // The rest of a buffered row's last vector, which is read with it.
  template <typename T>
  __device__ __forceinline__ void pad(T* row) const {
    if constexpr (!kExact) {
      const uint32_t column = feature_.embedding_dim + lane_;
      if (column < padded_columns(feature_.embedding_dim)) row[column] = T(0.0f);
    }
  }

  __device__ __forceinline__ void add(const Pairs& pairs, float factor, uint64_t target) const {
    float* const row = reinterpret_cast<float*>(target) + lane_column();
    visit(
        pairs,
        [&](int columns, float2 value) {
          add_pair(row + columns, make_float2(value.x * factor, value.y * factor));
        },
        [&](int column, float value) { atomicAdd(row + column, value * factor); });
  }

  // The next destination is on its way while one is served.
  __device__ __forceinline__ void emit_each(const Pairs& pairs, uint32_t lanes) const {
    const auto load = [&](uint32_t lane) {
      return load_shared_vector(lookups_ + lane * static_cast<uint32_t>(sizeof(RowDestination)));
    };
    uint4 next = load(lowest_lane(lanes));
    do {
      lanes &= lanes - 1;
      const uint4 destination = next;
      if (lanes != 0) next = load(lowest_lane(lanes));
      const float factor = __uint_as_float(destination.z);
      const uint64_t target = target_of(destination);
      if (destination.w == kStoreFp32) {
        store_fp32(pairs, factor, target);
      } else if (destination.w == kStore16Bits) {
        store_16_bits(pairs, factor, target);
      } else {
        add(pairs, factor, target);
      }
    } while (lanes != 0);
  }

  const TiledFeature& feature_;
  ElementType output_type_;
  uint32_t lookups_;
  uint32_t lane_;
};

}  // namespace flowtt::cuda
