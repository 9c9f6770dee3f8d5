// What the threads of a block know of a tile in the backward pass, and what they do with it:
// tiled_backward_lookups.cuh and tiled_backward_sums.cuh have the larger parts.

#pragma once

#include <type_traits>

#include "float_types.cuh"
#include "tiled_backward.h"
#include "tiled_backward_group_tile.cuh"
#include "tiled_backward_queue.cuh"

namespace flowtt::cuda {

// What a block has in dynamic shared memory.
template <int kRank, GradientShape kShape>
struct BackwardShared {
  std::conditional_t<kShape == GradientShape::kGrouped, GroupTile<kRank>, BackwardTile<kRank>> tile;
  TileSlot slots[2];  // the tile that is worked on, and the next
  uint2 classes[32];  // see TileQueue
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
  using Group = GroupTile<kRank>;
  static constexpr uint32_t kHalves = Tile::kHalves;
  // Of the columns of dG2, in tiles of 8, those of a warp.
  static constexpr uint32_t kOwnColumns = kGradientQ * kRank / 8 / kBackwardWarps;
  static_assert(kOwnColumns > 0);
  static constexpr bool kGrouped = kShape == GradientShape::kGrouped;
  static constexpr bool kExact = kShape == GradientShape::kExact || kGrouped;
  static constexpr bool kPairs = kShape != GradientShape::kAny;
  static constexpr uint32_t kExactColumns = kRank / kGradientQ;
  static constexpr bool kFullColumns = kExact && kExactColumns == kGradientColumns;
  // Rows of grad_output and slices of core 3 have four columns, which are multiplied as four.
  static constexpr bool kFourColumns = kExact && kExactColumns == 4 && !kThreeProducts;
  using Product = GradientProduct<kThreeProducts>;
  // G2[i2] is loaded by vectors of its rows.
  static constexpr bool kSecondByRows =
      kExact && !kGrouped && kRank == SecondRows::kRank && std::is_same_v<core_t, float>;

 public:
  // Vectors of BackwardTile::second.
  static constexpr uint32_t kOwnSecond = Tile::kSecondElements / 4 / kBackwardThreads;
  static_assert(kOwnSecond > 0);

  // Elements of G1 of the warp's entries: rows g and g + 8 of 16 rows (slot, j1), from
  // r1 = kRank / 4 * t on.
  static constexpr uint32_t kOwnFirst = kRank / 4;
  struct FirstRows {
    float rows[2][kOwnFirst];
  };

  // What a thread loads for a tile before the last one is finished.
  struct Ahead {
    float4 second[kOwnSecond];  // as SecondRows or as SecondVector says
    // The lane's lookup: of the warp's lookups, entry after entry.
    GradientLookup lookup;
    uint32_t flags;  // 0: there is none
  };

  __device__ __forceinline__ TileGradients(BackwardShared<kRank, kShape>& shared,
                                           const TileSlot& slot, const TiledFeature& feature,
                                           const GradientTargets& targets, const BackwardPass& pass)
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
        grad_(pass.grad_output),
        column_(feature.output_column),
        count_(slot.count()) {}

  // kQuads: once for all tiles of a block, before anything else.
  __device__ __forceinline__ void store_places() const;

  // Starts to load what the tile needs.
  __device__ __forceinline__ void load_ahead(Ahead& ahead, const BackwardWork& work) const;

  // Stores what has been loaded of G2[i2]. The last tile's must have been read; a barrier must
  // follow.
  __device__ __forceinline__ void store_second(const Ahead& ahead) const;

  // Starts to load G1 of the warp's entries.
  __device__ __forceinline__ FirstRows load_first() const;

  // P of the warp's entries, 16 rows (slot, j1); those that are not there become zeros.
  __device__ __forceinline__ void compute_products(const FirstRows& first) const;

  // Starts to load what the warp's first lookups need.
  __device__ __forceinline__ void start_lookups(const Ahead& ahead);

  // dG3 of the lookups of the warp's entries, and dP in the place of P.
  __device__ __forceinline__ void work_on_lookups();

  // dG1 of the warp's entries, transposed: columns are 16 rows (slot, j1).
  __device__ __forceinline__ void add_first_gradients() const;

  // The warp's columns of dG2, over all entries: of 8 columns after the other, parts m of 16 rows,
  // r1 = g + 16 m and + 8, columns 2 t and + 1. By groups, what add_second_gradient_by_group says.
  struct SecondSums {
    float tiles[kGrouped ? kRank / 8 : kOwnColumns * kHalves][4];
  };
  __device__ __forceinline__ SecondSums sum_second_gradient() const;
  __device__ __forceinline__ void add_second_gradient(const SecondSums& sums) const;

 private:
  // Beside those of GradientLookup::third.
  static constexpr uint32_t kIsLookup = 0x08000000u;
  static constexpr uint32_t kLastOfEntry = 0x40000000u;
  static constexpr uint32_t kSlotShift = 28;
  // Rows that are on their way while one is worked on.
  static constexpr uint32_t kRowsAhead = 4;

  struct ThirdSlice {
    float2 rows[kRank / 8];  // r2 = 8 n + g at columns 2 t and 2 t + 1, or t and none
  };

  // A lane's share of a row of grad_output, see column_of_lane.
  static constexpr uint32_t kOwnColumnsOfRow =
      kExact ? kGradientQ * kGradientQ * kExactColumns / 32 : 4;
  struct alignas(kOwnColumnsOfRow * sizeof(float)) LaneRow {
    float columns[kOwnColumnsOfRow];
  };
  // The elements of a row, [(j1, j2), j3], that a lane needs as operands.
  struct RowGradient {
    float b[4];  // rows (j1, j2) = (i, t), column g
    float4 a;    // rows (j1, j2) = g and g + 8 at column 2 t, then the same at 2 t + 1; or at t
  };

  // Sums over the lookups of an entry.
  struct EntrySums {
    float4 p[kHalves][2];    // operands of dG3: [r2 from 16 m on][rows j1 = 2 k and + 1]
    float dp[kRank / 8][4];  // the entry's dP: rows g and g + 8, columns r2 = 8 n + 2 t and + 1
    LaneRow row;             // over the lookups of one id
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

  // Gradients of P lie as GroupTile<16>::gradient_lane says.
  static constexpr bool kQuads = kGrouped && kRank == 16;
  // GroupTile<16>::places.
  enum PlaceWord : uint32_t { kFirstAndProduct, kProductAndGradient, kRowAndRow, kSums, kSecond };
  __device__ __forceinline__ uint2 places(PlaceWord word) const {
    const uint32_t pair = tile_.places[word][threadIdx.x];
    return make_uint2(pair % 65536u, pair / 65536u);
  }
  static constexpr bool kRowsInProducts = kGrouped && !Group::kHasRows;

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
  // The lane's element of what starts at `first`, computed once.
  template <typename T>
  static __device__ __forceinline__ T* of_lane(T* first, uint32_t element) {
    return reinterpret_cast<T*>(hold(reinterpret_cast<uint64_t>(first + element)));
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

  // The column that is element i of the lane's share. Whole vectors where rows are vectors.
  __device__ __forceinline__ uint32_t column_of_lane(uint32_t i) const {
    if (kExact) return kOwnColumnsOfRow * lane_ + i;
    return kPairs ? i / 2 * 64 + 2 * lane_ + i % 2 : 32 * i + lane_;
  }
  __device__ __forceinline__ LaneRow load_row(uint32_t row) const;

  // Hands the lanes' shares around. entry_place: of the entry's product, which all have read.
  __device__ __forceinline__ RowGradient exchange(const LaneRow& row, uint32_t entry_place) const;

  // Of the next id.
  __device__ __forceinline__ void load_next_third();

  // entry_place: of the entry's product; target: the lane's first element of dG3[i3].
  __device__ __forceinline__ void add_id(EntrySums& sums, uint32_t entry_place,
                                         float* target) const;

  __device__ __forceinline__ void add_third_gradient(float* target, const float4 (&p)[kHalves][2],
                                                     const float (&b)[4]) const;

  // Places: of the entry's products, and as gradient_place_of takes it; or, for kQuads,
  // gradient_lane of the slot.
  __device__ __forceinline__ void store_product_gradient(uint32_t entry_place, uint32_t lane_place,
                                                         const float (&dp)[kRank / 8][4]) const;

  // Where warps multiply in groups of four: the same, from tiled_backward_groups.cuh.
  __device__ __forceinline__ void load_second_by_group(Ahead& ahead) const;
  __device__ __forceinline__ void store_second_by_group(const Ahead& ahead) const;
  __device__ __forceinline__ void compute_products_by_group(const FirstRows& first) const;
  __device__ __forceinline__ void add_first_gradients_by_group() const;
  __device__ __forceinline__ void add_first_gradients_of_quads() const;
  __device__ __forceinline__ SecondSums sum_second_gradient_by_group() const;
  __device__ __forceinline__ SecondSums sum_second_gradient_of_quads() const;
  __device__ __forceinline__ void add_second_gradient_by_group(const SecondSums& sums) const;
  // Of entries that are not there.
  __device__ __forceinline__ void clear_missing_products() const;

  std::conditional_t<kGrouped, Group, Tile>& tile_;
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
  const StridedMatrix& grad_;
  const int64_t column_;
  const uint32_t count_;  // of entries
  // The lane's lookup.
  struct LaneLookup {
    uint32_t row;    // kExact: vectors of four floats from the first row to it
    uint32_t third;  // as in GradientLookup, and the entry's slot and flags
    float factor;
  };
  LaneLookup own_;
  uint32_t lookups_;          // of the warp
  uint32_t ids_;              // of the warp's ids ahead, a bit for the last lookup of each
  LaneRow rows_[kRowsAhead];  // of the next lookups, used in turn
  ThirdSlice slice_;          // of the next id
  // The lane's first elements of row 0 and of slice 0.
  const float* lane_row_;
  const core_t* lane_third_;
  // kFourColumns: in the rows of a tile, where the lane's operands of a row are, in bytes.
  uint32_t row_a_;
  uint32_t row_b_;
};

}  // namespace flowtt::cuda
