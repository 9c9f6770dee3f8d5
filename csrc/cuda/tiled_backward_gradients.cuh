// What the threads of a block know of a tile in the backward pass, and what they do with it:
// tiled_backward_loads.cuh, tiled_backward_rows.cuh, tiled_backward_lookups.cuh,
// tiled_backward_turns.cuh and tiled_backward_sums.cuh have the larger parts.

#pragma once

#include <type_traits>

#include "float_types.cuh"
#include "tiled_backward.h"
#include "tiled_backward_block.cuh"
#include "tiled_backward_group_tile.cuh"
#include "tiled_backward_quad_tile.cuh"
#include "tiled_backward_queue.cuh"

namespace flowtt::cuda {

constexpr bool is_grouped(GradientShape shape) {
  return shape == GradientShape::kGrouped || shape == GradientShape::kGroupedBlocks;
}

// Whether tables may have blocks (tiled_backward_block.cuh): not where sizes are known.
constexpr bool has_blocks(GradientShape shape) {
  return shape != GradientShape::kExact && shape != GradientShape::kGrouped;
}

template <int kRank, GradientShape kShape>
using TileOf =
    std::conditional_t<!is_grouped(kShape), BackwardTile<kRank>,
                       std::conditional_t<kRank == QuadTile::kRank, QuadTile, GroupTile>>;

// What a block has in dynamic shared memory.
template <int kRank, GradientShape kShape>
struct BackwardShared {
  TileOf<kRank, kShape> tile;
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
  static constexpr uint32_t kHalves = Tile::kHalves;
  // Of the columns of dG2, in tiles of 8, those of a warp.
  static constexpr uint32_t kOwnColumns = kGradientQ * kRank / 8 / kBackwardWarps;
  static_assert(kOwnColumns > 0);
  static constexpr bool kGrouped = is_grouped(kShape);
  static constexpr bool kQuads = kGrouped && kRank == QuadTile::kRank;  // see QuadTile
  // The sizes of a block are known, and those of the whole table.
  static constexpr bool kExact =
      kShape == GradientShape::kExact || kShape == GradientShape::kExactBlocks || kGrouped;
  static constexpr bool kWhole = kExact && !has_blocks(kShape);
  static constexpr bool kTwoCores =
      kShape == GradientShape::kTwoCoresEven || kShape == GradientShape::kTwoCoresAny;
  static constexpr bool kPairs =
      kShape != GradientShape::kAny && kShape != GradientShape::kTwoCoresAny;
  static constexpr uint32_t kExactColumns = kRank / kGradientQ;
  static constexpr bool kFullColumns = kExact && kExactColumns == kGradientColumns;
  // Half of them: a row is as wide as the shortest product is deep.
  static constexpr bool kNarrow = kExact && 2 * kExactColumns == kGradientColumns;
  static_assert(!kExact || kFullColumns || kNarrow);
  // Lookups are taken in turns (tiled_backward_turns.cuh): wider rows would want more registers.
  static constexpr bool kInTurns = kNarrow && !kThreeProducts;
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

  using OwnSecond = float4[kOwnSecond];

  // What a thread loads for a tile before the last one is finished.
  struct Ahead {
    OwnSecond second;  // as SecondRows or as SecondVector says
    // The lane's lookup: of the warp's lookups, entry after entry.
    GradientLookup lookup;
    uint32_t flags;  // 0: there is none
  };

  __device__ __forceinline__ TileGradients(BackwardShared<kRank, kShape>& shared,
                                           const TileSlot& slot, const TiledFeature& feature,
                                           const GradientTargets& targets, const BackwardPass& pass,
                                           uint32_t warp)
      : tile_(shared.tile),
        slot_(slot),
        targets_(targets),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        warp_(warp),
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
        count_(uniform(slot.count())) {
    if constexpr (!kWhole) {
      whole_ = {static_cast<uint32_t>(feature.r[0]), static_cast<uint32_t>(feature.r[1]),
                static_cast<uint32_t>(feature.q[0]),
                kExact ? kGradientQ : static_cast<uint32_t>(feature.q[1]),
                kExact ? kExactColumns : static_cast<uint32_t>(feature.q[2])};
      steps_ = 1;
      if (pass.work.blocks * (whole_.r1 > kRank ? 2 : 1) > 1) enter_block(feature);
    }
  }

  // P beyond the first step, and the gradients of G1 and G2 of all steps but the first. Called by
  // all threads; have barriers. The first step's G2 has been stored, and is what is stored in the
  // end.
  __device__ __forceinline__ void compute_product_steps();
  __device__ __forceinline__ void add_gradient_steps();

  // A value that all lanes of the warp have. With one product it is faster not to tell the
  // compiler, unless lookups are taken in turns, whose branches all depend on such values.
  template <typename T>
  static __device__ __forceinline__ T uniform(T value) {
    return kThreeProducts || kInTurns ? same_in_warp(value) : value;
  }

  // kQuads: once for all tiles of a block, before anything else.
  __device__ __forceinline__ void store_places() const;

  // Starts to load what the tile needs.
  __device__ __forceinline__ void load_ahead(Ahead& ahead, const BackwardWork& work) const;

  // Stores what has been loaded of G2[i2]. The last tile's must have been read; a barrier must
  // follow.
  __device__ __forceinline__ void store_second(const OwnSecond& own) const;

  // Starts to load G1 of the warp's entries.
  __device__ __forceinline__ FirstRows load_first() const;

  // P of the warp's entries, 16 rows (slot, j1), or what a step adds to it; of those that are not
  // there the last step makes zeros.
  __device__ __forceinline__ void compute_products(const FirstRows& first) const;

  // Starts to load what the warp's first lookups need.
  __device__ __forceinline__ void start_lookups(const Ahead& ahead);

  // dG3 of the lookups of the warp's entries, and dP in the place of P.
  __device__ __forceinline__ void work_on_lookups();

  // dG1 of the warp's entries, transposed: columns are 16 rows (slot, j1).
  __device__ __forceinline__ void add_first_gradients() const;

  // The warp's columns of dG2, over all entries. kQuads: see sum_second_gradient_of_quads.
  struct SecondSums {
    // Rows r1 = g + 16 m and + 8, columns 2 t and + 1.
    float columns[kQuads ? 2 : kOwnColumns][kHalves][4];
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
  // kInTurns: of them, those of which lanes are told at once where they start.
  static constexpr uint32_t kRowsTold = 2;

  struct ThirdSlice {
    // r2 = 8 n + g at columns 2 t and 2 t + 1, or where rows are narrow at column t.
    std::conditional_t<kNarrow, float, float2> rows[kRank / 8];
    uint32_t first;  // kInTurns: its first element, of core 3
  };

  // A lane's share of a row of grad_output: what the lane needs as operand a, or see RowPlace.
  static constexpr uint32_t kOwnColumnsOfRow =
      kExact ? kGradientQ * kGradientQ * kExactColumns / 32 : 4;
  struct LaneRow {
    float columns[kOwnColumnsOfRow];
  };
  // The elements of a row, [(j1, j2), j3], that a lane needs as operands.
  struct RowGradient {
    float b[4];  // rows (j1, j2) = (i, t), column g, or where rows are narrow g % 4
    // Rows (j1, j2) = g and g + 8 at column 2 t, then the same at 2 t + 1. Where rows are narrow,
    // at column t.
    std::conditional_t<kNarrow, float2, float4> a;
  };

  // Sums over the lookups of an entry.
  struct EntrySums {
    float4 p[kHalves][2];    // operands of dG3: [r2 from 16 m on][rows j1 = 2 k and + 1]
    float dp[kRank / 8][4];  // the entry's dP: rows g and g + 8, columns r2 = 8 n + 2 t and + 1
    LaneRow row;             // over the lookups of one id
  };

  // kInTurns: what an id adds to dG3, columns 2 t and + 1 of rows r2 = g and g + 8.
  struct ThirdSums {
    float rows[4];
    uint32_t first;  // element of the slice, or kNoSlice
  };
  static constexpr uint32_t kNoSlice = ~0u;

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

  // From one row, or slice, to the next, in elements: of cores and of their gradients.
  __device__ __forceinline__ uint32_t first_row() const { return kWhole ? kRank : whole_.r1; }
  __device__ __forceinline__ uint32_t first_elements() const {
    return kWhole ? kGradientQ * kRank
                  : whole_.q1 * (kTwoCores ? whole_.q2 * whole_.r2 : whole_.r1);
  }
  __device__ __forceinline__ uint32_t second_columns() const { return kWhole ? kRank : whole_.r2; }
  __device__ __forceinline__ uint32_t second_row() const {
    return kWhole ? kGradientQ * kRank : (kExact ? kGradientQ : whole_.q2) * whole_.r2;
  }
  __device__ __forceinline__ uint32_t second_elements() const {
    return kWhole ? Tile::kSecondElements : whole_.r1 * second_row();
  }
  __device__ __forceinline__ uint32_t third_row() const {
    return kExact ? kExactColumns : whole_.q3;
  }
  __device__ __forceinline__ uint32_t third_elements() const {
    return kWhole ? kRank * kExactColumns : whole_.r2 * third_row();
  }
  // Where core k's gradient begins; as the cores, at the block and the step.
  __device__ __forceinline__ float* gradient_of_core(int k) const {
    float* const whole = targets_.gradients[k];
    return kWhole ? whole : whole + offsets_[k];
  }

  // Of two cores: P of the warp's entries, and what becomes of dP.
  __device__ __forceinline__ void load_products() const;
  __device__ __forceinline__ void add_product_gradients() const;

  // Narrows everything down to the block of the slot, and to the first step.
  __device__ __forceinline__ void enter_block(const TiledFeature& feature);
  __device__ __forceinline__ void enter_step(uint32_t step);
  __device__ __forceinline__ bool is_last_step() const { return kWhole || step_ + 1 == steps_; }
  __device__ __forceinline__ bool is_first_step() const { return kWhole || step_ == 0; }

  // Starts to load G2[i2], and where the thread loads vectors of rows.
  __device__ __forceinline__ void load_second(OwnSecond& own) const;
  template <typename Rows>
  __device__ __forceinline__ void load_second_rows(OwnSecond& loaded, const Rows& own) const;
  // Stores G1 of the warp's entries, as operand of the product that gives dG2.
  __device__ __forceinline__ void store_first(const FirstRows& first) const;

  // Not kExact: the element of a row, padded to (4, 4, 8), that is number i of the lane's share.
  struct RowPlace {
    uint32_t j1;
    uint32_t j2;
    uint32_t j3;
  };
  __device__ __forceinline__ RowPlace row_place(uint32_t i) const {
    const uint32_t element = kPairs ? i / 2 * 64 + 2 * lane_ + i % 2 : 32 * i + lane_;
    return {element / (kGradientQ * kGradientColumns), element / kGradientColumns % kGradientQ,
            element % kGradientColumns};
  }
  __device__ __forceinline__ uint32_t row_column(const RowPlace& place) const {
    return (place.j1 * whole_.q2 + place.j2) * whole_.q3 + place.j3;
  }
  __device__ __forceinline__ LaneRow load_row(uint32_t row) const;

  // Hands the lanes' shares around, by shuffles (kExact) or through shared memory.
  __device__ __forceinline__ RowGradient exchange(const LaneRow& row) const;
  __device__ __forceinline__ RowGradient exchange_by_shuffles(const LaneRow& row) const;

  // The lane's first element of a slice of dG3.
  __device__ __forceinline__ uint32_t element_of_lane() const {
    const uint32_t r2 = kQuads ? QuadTile::row_of_third(g_) : g_;
    return kNarrow ? (r2 + t_ / 2 * 8) * kExactColumns + t_ % 2 * 2 : r2 * third_row() + 2 * t_;
  }

  // Of the next id.
  __device__ __forceinline__ void load_next_third();
  // source: the lane's first element.
  __device__ __forceinline__ void load_third(const core_t* source);

  // Places: of the entry's products, and as product_place takes it.
  __device__ __forceinline__ void start_entry(EntrySums& sums, uint32_t entry_place,
                                              uint32_t lane_place) const;

  // target: the lane's first element of dG3[i3].
  __device__ __forceinline__ void add_id(EntrySums& sums, float* target) const;
  // Takes the sum over the lookups of an id.
  __device__ __forceinline__ RowGradient take_row(EntrySums& sums) const;

  __device__ __forceinline__ void add_third_gradient(float* target, const float4 (&p)[kHalves][2],
                                                     const float (&b)[4]) const;
  // kNarrow: c as multiply_add gives it.
  __device__ __forceinline__ void add_narrow_third(float* target, const float (&c)[4]) const;
  // Adds an id's part of dP.
  __device__ __forceinline__ void add_product_gradient(EntrySums& sums,
                                                       const RowGradient& row) const;

  // Places: of the entry's products, and as gradient_place_of takes it, or QuadTile.
  __device__ __forceinline__ void store_product_gradient(uint32_t entry_place, uint32_t lane_place,
                                                         const float (&dp)[kRank / 8][4]) const;

  // kInTurns: the same, from tiled_backward_turns.cuh.
  __device__ __forceinline__ void start_turns();
  __device__ __forceinline__ void work_in_turns();
  // Of the id of a lookup. After the last one, any slice.
  __device__ __forceinline__ void load_third_of(uint32_t number);
  // third: of the last id, whose sums leave, and then of this one.
  __device__ __forceinline__ void add_id_in_turns(EntrySums& sums, ThirdSums& third,
                                                  float* target_of_lane) const;

  // Where warps multiply in groups of four: the same, from tiled_backward_groups.cuh.
  __device__ __forceinline__ void load_second_by_group(OwnSecond& loaded) const;
  __device__ __forceinline__ void store_second_by_group(const OwnSecond& loaded) const;
  __device__ __forceinline__ void store_first_by_group(const FirstRows& first) const;
  __device__ __forceinline__ void compute_products_by_group(const FirstRows& first) const;
  __device__ __forceinline__ void add_first_gradients_by_group() const;
  __device__ __forceinline__ SecondSums sum_second_gradient_by_group() const;
  __device__ __forceinline__ void add_second_gradient_by_group(const SecondSums& sums) const;
  // The same where ranks are 16, from tiled_backward_quads.cuh.
  __device__ __forceinline__ uint2 places(QuadTile::PlaceWord word) const {
    const uint32_t pair = tile_.places[word][threadIdx.x];
    return make_uint2(pair % 65536u, pair / 65536u);
  }
  __device__ __forceinline__ void store_second_of_quads(const OwnSecond& loaded) const;
  __device__ __forceinline__ void compute_products_of_quads(const FirstRows& first) const;
  __device__ __forceinline__ void add_first_gradients_of_quads() const;
  __device__ __forceinline__ SecondSums sum_second_gradient_of_quads() const;
  __device__ __forceinline__ void add_second_gradient_of_quads(const SecondSums& sums) const;
  // Of entries that are not there.
  __device__ __forceinline__ void clear_missing_products() const;

  TileOf<kRank, kShape>& tile_;
  const TileSlot& slot_;
  const GradientTargets& targets_;
  const uint32_t lane_;
  const uint32_t g_;
  const uint32_t t_;
  const uint32_t warp_;
  // Of the block, where the table has several.
  const core_t* first_;
  const core_t* second_;
  const core_t* third_;
  uint32_t r1_;
  uint32_t r2_;
  uint32_t q1_;
  uint32_t q2_;
  uint32_t q3_;
  const StridedMatrix& grad_;
  int64_t column_;
  const uint32_t count_;  // of entries
  // Not kWhole: sizes of the table.
  struct WholeSizes {
    uint32_t r1;
    uint32_t r2;
    uint32_t q1;
    uint32_t q2;
    uint32_t q3;
  };
  WholeSizes whole_;
  uint32_t offsets_[3] = {};  // of the block in a slice of each core
  uint32_t step_ = 0;
  uint32_t steps_;
  // The lane's lookup.
  struct LaneLookup {
    uint32_t row;  // kExact: vectors of four floats from the first row to it
    // As in GradientLookup, and the entry's slot and flags. kInTurns: the first element of the
    // slice of core 3.
    uint32_t third;
    float factor;
  };
  LaneLookup own_;
  uint32_t lookups_;          // of the warp
  uint32_t ids_;              // of the warp's ids ahead, a bit for the last lookup of each
  LaneRow rows_[kRowsAhead];  // of the next lookups, used in turn
  ThirdSlice slice_;          // of the next id
  // kInTurns.
  uint32_t entries_;  // a bit for the last lookup of each of the warp's entries
  bool is_weighted_;  // not all factors of the warp's lookups are 1
  uint32_t sender_;   // the lane that sends first in exchange_by_shuffles
  // The lane's first elements of row 0 and of slice 0.
  const float* lane_row_;
  const core_t* lane_third_;
};

}  // namespace flowtt::cuda
