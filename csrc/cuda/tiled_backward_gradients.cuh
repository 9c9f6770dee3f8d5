// What the threads of a block know of a feature's tiles in the backward pass, and what they do with
// them: tiled_backward_lookups.cuh and tiled_backward_sums.cuh have the larger parts.

#pragma once

#include <type_traits>

#include "float_types.cuh"
#include "tiled_backward_granule.cuh"

namespace flowtt::cuda {

// One feature's tiles, as the threads of a block see them.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
class TileGradients {
  using Tile = BackwardTile<kRank>;
  static constexpr uint32_t kHalves = Tile::kHalves;
  // Of the columns of dG2, in tiles of 8, those of a warp.
  static constexpr uint32_t kOwnColumns = kGradientQ * kRank / 8 / kBackwardWarps;
  static_assert(kOwnColumns > 0);
  static constexpr bool kExact = kShape == GradientShape::kExact;
  static constexpr bool kPairs = kShape != GradientShape::kAny;
  using Product = GradientProduct<kThreeProducts>;

 public:
  __device__ __forceinline__ TileGradients(Tile& tile, const GradientPlan& plan,
                                           const TiledFeature& feature,
                                           const GradientTargets& targets,
                                           const StridedMatrix& grad_output)
      : tile_(tile),
        plan_(plan),
        targets_(targets),
        grad_(grad_output),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        warp_(threadIdx.x / 32),
        column_(feature.output_column),
        first_(static_cast<const core_t*>(feature.cores[0])),
        second_(static_cast<const core_t*>(feature.cores[1])),
        third_(static_cast<const core_t*>(feature.cores[2])),
        r1_(kExact ? kRank : feature.r[0]),
        r2_(kExact ? kRank : feature.r[1]),
        q1_(kExact ? kGradientQ : feature.q[0]),
        q2_(kExact ? kGradientQ : feature.q[1]),
        q3_(kExact ? kGradientColumns : feature.q[2]),
        gradient_b_(static_cast<const float*>(grad_output.data) + column_ + t_ * q3_ + g_),
        gradient_a_(static_cast<const float*>(grad_output.data) + column_ +
                    (g_ / 4 * q2_ + g_ % 4) * q3_ + 2 * t_),
        own_third_(third_ + g_ * q3_ + 2 * t_),
        third_gradient_(targets.gradients[2] + g_ * q3_ + 2 * t_),
        marks_third_(lane_ == 0 && targets.touched[2] != nullptr) {}

  // All tiles of the plan. Called by all threads, after a barrier.
  __device__ __forceinline__ void run();

 private:
  // The elements of a lookup's gradient that the lane needs, as operands of two products.
  struct RowGradient {
    float b[4];  // rows (j1, j2) = (i, t), column g
    float4 a;    // rows (j1, j2) = g and g + 8 at column 2 t, then the same at 2 t + 1
  };
  struct ThirdSlice {
    float2 rows[kRank / 8];  // r2 = 8 n + g at columns 2 t and 2 t + 1
  };

  // The number in the tile of the entry in a slot of this warp.
  __device__ __forceinline__ uint32_t entry_number(uint32_t slot) const {
    return slot * kBackwardWarps + warp_;
  }
  __device__ __forceinline__ bool has_entry(uint32_t slot) const {
    return entry_of_warp(warp_, slot) < count_;
  }
  __device__ __forceinline__ GradientEntry entry(uint32_t slot) const {
    return entries_[entry_of_warp(warp_, slot)];
  }
  static __device__ __forceinline__ float load(const core_t* source) {
    return to_accumulator<float>(*source);
  }

  // Adds to two neighbours of a gradient; second_exists, first_exists: of them.
  __device__ __forceinline__ void add(float* target, float first, float second, bool first_exists,
                                      bool second_exists) const {
    if constexpr (kPairs) {
      if (kExact || first_exists) add_pair(target, make_float2(first, second));
    } else {
      if (first_exists) atomicAdd(target, first);
      if (second_exists) atomicAdd(target + 1, second);
    }
  }

  __device__ __forceinline__ void load_second(uint32_t i2);

  // P of the warp's entries, 16 rows (slot, j1); those that are not there become zeros.
  __device__ __forceinline__ void compute_products();

  __device__ __forceinline__ RowGradient load_gradient(uint32_t row) const;

  __device__ __forceinline__ ThirdSlice load_third(uint32_t i3) const;

  // What is on its way for a lookup.
  struct Fetched {
    GradientLookup lookup;
    RowGradient gradient;
    ThirdSlice third;
  };
  __device__ __forceinline__ void fetch(Fetched& fetched, uint32_t lookup) const {
    fetched.lookup = plan_.lookups[lookup];
    fetched.gradient = load_gradient(fetched.lookup.row);
    fetched.third = load_third(fetched.lookup.third & ~kLastOfId);
  }

  // Sums over the lookups of an entry.
  struct EntrySums {
    float4 p[kHalves][2];    // operands of dG3: [r2 from 16 m on][rows j1 = 2 k and + 1]
    float dp[kRank / 8][4];  // the entry's dP: rows g and g + 8, columns r2 = 8 n + 2 t and + 1
    RowGradient row;         // of one id
  };

  // dG3 of the lookups of the warp's entries, and dP in the place of P.
  __device__ __forceinline__ void work_on_lookups();

  __device__ __forceinline__ void add_lookup(EntrySums& sums, const Fetched& fetched) const;

  __device__ __forceinline__ void add_third_gradient(uint32_t i3, const float4 (&p)[kHalves][2],
                                                     const float (&b)[4]) const;

  __device__ __forceinline__ void store_product_gradient(uint32_t number,
                                                         const float (&dp)[kRank / 8][4]);

  // dG1 of the warp's entries, transposed: columns are 16 rows (slot, j1).
  __device__ __forceinline__ void add_first_gradients();

  __device__ __forceinline__ void clear_second_gradient() {
#pragma unroll
    for (uint32_t n = 0; n < kOwnColumns; ++n) {
#pragma unroll
      for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) second_gradient_[n][m][i] = 0.0f;
      }
    }
  }

  struct ColumnTile {
    uint32_t j2;
    uint32_t r2;  // the first of 8

    __device__ __forceinline__ ColumnTile(uint32_t warp, uint32_t n) {
      const uint32_t number = warp * kOwnColumns + n;
      j2 = number / (kRank / 8);
      r2 = number % (kRank / 8) * 8;
    }
  };

  // The warp's columns of dG2, over all entries.
  __device__ __forceinline__ void sum_second_gradient();

  __device__ __forceinline__ void add_second_gradient(uint32_t i2) const;

  Tile& tile_;
  const GradientPlan& plan_;
  const GradientTargets& targets_;
  const StridedMatrix& grad_;
  const uint32_t lane_;
  const uint32_t g_;
  const uint32_t t_;
  const uint32_t warp_;
  const int64_t column_;
  const core_t* const first_;
  const core_t* const second_;
  const core_t* const third_;
  const uint32_t r1_;
  const uint32_t r2_;
  const uint32_t q1_;
  const uint32_t q2_;
  const uint32_t q3_;
  // The lane's own elements of the first row or slice.
  const float* const gradient_b_;
  const float* const gradient_a_;
  const core_t* const own_third_;
  float* const third_gradient_;
  const bool marks_third_;
  const GradientEntry* entries_;  // of the tile
  uint32_t count_;
  float second_gradient_[kOwnColumns][kHalves]
                        [4];  // rows r1 = g + 16 m and + 8, columns r2 = 2 t and + 1
};

}  // namespace flowtt::cuda
