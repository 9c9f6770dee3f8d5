// What the threads of a block know of a tile in the backward pass, and what they do with it:
// tiled_backward_lookups.cuh and tiled_backward_sums.cuh have the larger parts.

#pragma once

#include <type_traits>

#include "tiled_backward.h"
#include "tiled_backward_queue.cuh"
#include "tiled_backward_rows.cuh"

namespace flowtt::cuda {

// What a block has in dynamic shared memory.
template <int kRank>
struct BackwardShared {
  BackwardTile<kRank> tile;
  GradientRing rings[kBackwardWarps];
  TileSlot slots[2];  // the tile that is worked on, and the next
};

// Parameters of the kernel beside those of the sort.
struct BackwardPass {
  StridedMatrix grad_output;
  BackwardWork work;
  GradientTargets targets[kTiledFeaturesPerLaunch];
};

// One tile, as the threads of a block see it.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
class TileGradients {
  using Tile = BackwardTile<kRank>;
  static constexpr uint32_t kHalves = Tile::kHalves;
  // Of the columns of dG2, in tiles of 8, those of a warp.
  static constexpr uint32_t kOwnColumns = kGradientQ * kRank / 8 / kBackwardWarps;
  static_assert(kOwnColumns > 0);
  static constexpr bool kExact = kShape == GradientShape::kExact;
  static constexpr bool kPairs = kShape != GradientShape::kAny;
  static constexpr uint32_t kExactColumns = kRank / kGradientQ;
  static constexpr bool kFullColumns = kExact && kExactColumns == kGradientColumns;
  using Product = GradientProduct<kThreeProducts>;

 public:
  // Vectors of BackwardTile::second, of which those of a lane differ in j2.
  static constexpr uint32_t kOwnSecond = Tile::kSecondElements / 4 / kBackwardThreads;
  static_assert(kOwnSecond > 0);

  // What a thread loads for a tile before the last one is finished.
  struct Ahead {
    float4 second[kOwnSecond];
    // The lane's lookup: of the warp's lookups, entry after entry.
    uint32_t row;    // GradientRows::name
    uint32_t third;  // as in GradientLookup, and kLastOfEntry and the entry's slot, or kNoLookup
    float factor;
  };

  __device__ __forceinline__ TileGradients(BackwardShared<kRank>& shared, const TileSlot& slot,
                                           const TiledFeature& feature,
                                           const GradientTargets& targets,
                                           const BackwardPass& pass)
      : tile_(shared.tile),
        slot_(slot),
        targets_(targets),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        warp_(threadIdx.x / 32),
        first_(static_cast<const core_t*>(feature.cores[0])),
        second_(static_cast<const core_t*>(feature.cores[1])),
        third_(static_cast<const core_t*>(feature.cores[2])),
        r1_(kExact ? kRank : feature.r[0]),
        r2_(kExact ? kRank : feature.r[1]),
        q1_(kExact ? kGradientQ : feature.q[0]),
        q2_(kExact ? kGradientQ : feature.q[1]),
        q3_(kExact ? kExactColumns : feature.q[2]),
        ring_(shared.rings[warp_]),
        rows_(ring_, pass.grad_output, feature.output_column, q1_, q2_, q3_),
        count_(slot.count()) {}

  // Starts to load what the tile needs.
  __device__ __forceinline__ void load_ahead(Ahead& ahead, const BackwardWork& work) const;

  // Stores what has been loaded of G2[i2]. The last tile's must have been read; a barrier must
  // follow.
  __device__ __forceinline__ void store_second(const Ahead& ahead) const;

  // P of the warp's entries, 16 rows (slot, j1); those that are not there become zeros. Meanwhile
  // the rows of the warp's first lookups are fetched.
  __device__ __forceinline__ void compute_products(const Ahead& ahead);

  // dG3 of the lookups of the warp's entries, and dP in the place of P.
  __device__ __forceinline__ void work_on_lookups(const Ahead& ahead);

  // dG1 of the warp's entries, transposed: columns are 16 rows (slot, j1).
  __device__ __forceinline__ void add_first_gradients() const;

  // The warp's columns of dG2, over all entries.
  __device__ __forceinline__ void add_second_gradient() const;

 private:
  static constexpr uint32_t kNoLookup = 0;
  static constexpr uint32_t kIsLookup = 0x08000000u;
  static constexpr uint32_t kLastOfEntry = 0x40000000u;
  static constexpr uint32_t kSlotShift = 28;

  // Elements of G1 of the warp's entries: rows g and g + 8 of 16 rows (slot, j1), from
  // r1 = kRank / 4 * t on.
  static constexpr uint32_t kOwnFirst = kRank / 4;
  struct FirstRows {
    float rows[2][kOwnFirst];
  };
  // Until the rows of gradients take it, the warp's ring has the slices of its entries, one place
  // each.
  static constexpr uint32_t kFirstBytes = kGradientQ * kRank * sizeof(core_t);
  static constexpr uint32_t kFirstPlace = sizeof(GradientRing) / kEntriesPerWarp;
  static_assert(kFirstBytes <= kFirstPlace);
  __device__ __forceinline__ void fetch_first() const;
  __device__ __forceinline__ FirstRows read_first() const;

  // Starts to fetch the rows of the warp's first lookups.
  __device__ __forceinline__ void start_rows(const Ahead& ahead);

  struct ThirdSlice {
    float2 rows[kRank / 8];  // r2 = 8 n + g at columns 2 t and 2 t + 1
  };

  // Sums over the lookups of an entry.
  struct EntrySums {
    float4 p[kHalves][2];    // operands of dG3: [r2 from 16 m on][rows j1 = 2 k and + 1]
    float dp[kRank / 8][4];  // the entry's dP: rows g and g + 8, columns r2 = 8 n + 2 t and + 1
    RowGradient row;         // of one id
  };

  // Of dG2, those columns of a warp.
  struct ColumnTile {
    uint32_t j2;
    uint32_t r2;  // the first of 8

    __device__ __forceinline__ ColumnTile(uint32_t warp, uint32_t n) {
      const uint32_t number = warp * kOwnColumns + n;
      j2 = number / (kRank / 8);
      r2 = number % (kRank / 8) * 8;
    }
  };

  // The number in the tile of the entry in a slot of this warp.
  __device__ __forceinline__ uint32_t entry_number(uint32_t slot) const {
    return slot * kBackwardWarps + warp_;
  }
  __device__ __forceinline__ bool has_entry(uint32_t slot) const {
    return entry_of_warp(warp_, slot) < count_;
  }
  __device__ __forceinline__ const GradientEntry& entry(uint32_t slot) const {
    return slot_.entries[entry_of_warp(warp_, slot)];
  }
  static __device__ __forceinline__ float load(const core_t* source) {
    return to_accumulator<float>(*source);
  }
  // Adds to two neighbours of a gradient; second_exists, first_exists: of them.
  __device__ __forceinline__ void add(float* target, float first, float second, bool first_exists,
                                      bool second_exists) const {
    if constexpr (kPairs) {
      if (first_exists) add_pair(target, make_float2(first, second));
    } else {
      if (first_exists) atomicAdd(target, first);
      if (second_exists) atomicAdd(target + 1, second);
    }
  }

  __device__ __forceinline__ uint32_t third_elements() const { return r2_ * q3_; }

  // own: the lane's first element of slice 0.
  __device__ __forceinline__ ThirdSlice load_third(const core_t* own, uint32_t i3) const;

  // target: the lane's first element of dG3[i3].
  __device__ __forceinline__ void add_id(EntrySums& sums, float* target,
                                         const ThirdSlice& third) const;

  __device__ __forceinline__ void add_third_gradient(float* target, const float4 (&p)[kHalves][2],
                                                     const float (&b)[4]) const;

  // Places: of the entry's products, and as gradient_place_of takes it.
  __device__ __forceinline__ void store_product_gradient(uint32_t entry_place, uint32_t lane_place,
                                                         const float (&dp)[kRank / 8][4]) const;

  Tile& tile_;
  const TileSlot& slot_;
  const GradientTargets& targets_;
  const uint32_t lane_;
  const uint32_t g_;
  const uint32_t t_;
  const uint32_t warp_;
  const core_t* const first_;
  const core_t* const second_;
  const core_t* const third_;
  const uint32_t r1_;
  const uint32_t r2_;
  const uint32_t q1_;
  const uint32_t q2_;
  const uint32_t q3_;
  GradientRing& ring_;
  GradientRows<kShape, kRank> rows_;
  const uint32_t count_;  // of entries
};

}  // namespace flowtt::cuda
