// Gradients of the cores of tables with three cores: persistent blocks that take a granule of
// lookups, cut it into tiles of prefixes with one i2, and recompute the prefix products of a tile
// on the chip. docs/kernels.md has the drawing.
//
//     row = P G3[i3], P = G1[i1] G2[i2]; g: gradient of the row, as a matrix [(j1, j2), j3]
//     dG3[i3] += P^T g     dP += g G3[i3]^T     dG1[i1] += dP G2[i2]^T     dG2[i2] += G1[i1]^T dP

#pragma once

#include "float_types.cuh"
#include "tiled_backward.h"
#include "tiled_backward_plan.cuh"

namespace flowtt::cuda {

// Entries [first, first + count) of feature f of the group.
struct Granule {
  int32_t f;
  int32_t first;
  int32_t count;  // 0: there are none
};

// What a block has in dynamic shared memory.
template <int kRank>
struct BackwardShared {
  union {
    BackwardTile<kRank> tile;
    struct {
      OrderScratch<kBackwardThreads> order;
      GradientPlanScratch plan;
    } planning;
  };
  GradientPlan plan;
  Segments segments;
  Granule granule;
};

// Parameters of the kernel beside those of the sort.
struct BackwardPass {
  StridedMatrix grad_output;
  int32_t granules;
  int32_t granule;  // lookups of one, at most
  GradientTargets targets[kTiledFeaturesPerLaunch];
};

// Finds granule `number`; feature after feature, of each as many as it needs, of equal length. By
// the first warp.
__device__ __forceinline__ void find_granule(Granule& granule, const Segments& segments,
                                             int32_t features, int32_t most, int32_t number) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t first = segments.first_entry[min(lane, features - 1)];
  const int32_t entries = lane < features ? segments.first_entry[lane + 1] - first : 0;
  const int32_t granules = (entries + most - 1) / most;
  const int32_t up_to = inclusive_sum(granules);
  const int32_t f = __ffs(__ballot_sync(kAllLanes, up_to > number)) - 1;
  if (lane == max(f, 0)) {
    const int32_t each = granules > 0 ? (entries + granules - 1) / granules : 0;
    const int32_t begin = min((number - (up_to - granules)) * each, entries);
    granule = {f, first + begin, f < 0 ? 0 : min(each, entries - begin)};
  }
}

// Plans granule `number`: its feature, or -1 if it has no lookups. Called by all threads; starts
// and ends with a barrier.
template <typename Shared>
__device__ __forceinline__ int32_t plan_granule(Shared& shared, const TiledGroup& group,
                                                const TiledWorkspace& workspace,
                                                const BackwardPass& pass, int32_t number) {
  auto& scratch = shared.planning;
  __syncthreads();
  clear_order(scratch.order);
  if (threadIdx.x < 32) {
    find_granule(shared.granule, shared.segments, group.count, pass.granule, number);
  }
  __syncthreads();
  const Granule granule = shared.granule;
  if (granule.count == 0) return -1;
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const bool exists = i < granule.count;
  const int32_t place = granule.first + min(i, granule.count - 1);
  const uint4 entry = reinterpret_cast<const uint4*>(workspace.entries)[place];
  const float factor = workspace.factors != nullptr ? workspace.factors[place] : 1.0f;
  const uint32_t sorted =
      order_entry(scratch.order, group.features[granule.f], entry.x, entry.y, exists);
  if (exists) {
    scratch.plan.sorted[sorted] = {entry.x, entry.y, entry.w & ~kLoneLookup, factor};
  }
  __syncthreads();
  const int32_t entries = plan_entries(shared.plan, scratch.plan, granule.count);
  plan_tiles(shared.plan, scratch.plan, entries);
  return granule.f;
}

// One feature's tiles, as the threads of a block see them.
template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
class TileGradients {
  using Tile = BackwardTile<kRank>;
  static constexpr uint32_t kHalves = Tile::kHalves;
  static constexpr uint32_t kColumnTiles = kGradientQ * kRank / 8;  // of dG2
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
  __device__ __forceinline__ void run() {
    const int32_t tiles = plan_.tile_count;
#pragma unroll 1
    for (int32_t number = 0; number < tiles; ++number) {
      const GradientTile tile = plan_.tiles[number];
      entries_ = plan_.entries + tile.x % 65536u;
      count_ = tile.x / 65536u;
      const uint32_t i2 = tile.y;
      // The last tile has been read.
      if (number > 0) __syncthreads();
      if (number == 0 || i2 != plan_.tiles[number - 1].y) {
        load_second(i2);
        clear_second_gradient();
        __syncthreads();
      }
      compute_products();
      __syncwarp();
      work_on_lookups();
      __syncwarp();
      add_first_gradients();
      __syncthreads();
      sum_second_gradient();
      if (number + 1 == tiles || i2 != plan_.tiles[number + 1].y) add_second_gradient(i2);
    }
  }

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

  __device__ __forceinline__ void load_second(uint32_t i2) {
    const core_t* const slice = second_ + int64_t{i2} * r1_ * q2_ * r2_;
    const auto element = [&](uint32_t r1, uint32_t j2, uint32_t r2) {
      if (!kExact && (r1 >= r1_ || j2 >= q2_ || r2 >= r2_)) return 0.0f;
      return Product::operand(load(slice + (r1 * q2_ + j2) * r2_ + r2));
    };
    constexpr uint32_t kVectors = Tile::kSecondElements / 4;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kVectors; i += kBackwardThreads) {
      const SecondVector<kRank> v(i);
      store_vector(tile_.second + 4 * i,
                   make_float4(element(v.r1, v.j2, v.r2), element(v.r1 + 1, v.j2, v.r2),
                               element(v.r1 + 2, v.j2, v.r2), element(v.r1 + 3, v.j2, v.r2)));
    }
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kVectors; i += kBackwardThreads) {
      const TransposedVector<kRank> v(i);
      store_vector(tile_.second_transposed + 4 * i,
                   make_float4(element(v.r1, v.j2, v.r2), element(v.r1 + 1, v.j2, v.r2),
                               element(v.r1, v.j2, v.r2 + 1), element(v.r1 + 1, v.j2, v.r2 + 1)));
    }
    if (threadIdx.x == 0 && targets_.touched[1] != nullptr) targets_.touched[1][i2] = 1;
  }

  // P of the warp's entries, 16 rows (slot, j1); those that are not there become zeros.
  __device__ __forceinline__ void compute_products() {
    constexpr uint32_t kOwn = kRank / 4;
    float a[2][kOwn];  // rows g and g + 8, r1 = kOwn t + i
    const uint32_t j1 = g_ % 4;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t slot = g_ / 4 + 2 * half;
      const bool exists = has_entry(slot);
      const uint32_t i1 = exists ? entry(slot).y : 0;
      const core_t* const row = first_ + (int64_t{i1} * q1_ + j1) * r1_ + kOwn * t_;
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        const uint32_t r1 = kOwn * t_ + i;
        const bool is_there = exists && (kExact || (j1 < q1_ && r1 < r1_));
        a[half][i] = is_there ? Product::operand(load(row + i)) : 0.0f;
        tile_.first[Tile::first_place(entry_number(slot) / 2, r1 / 16, 4 * (r1 % 8) + j1) +
                    warp_ % 2 * 2 + r1 / 8 % 2] = a[half][i];
      }
      if (exists && j1 == 0 && t_ == 0 && targets_.touched[0] != nullptr) {
        targets_.touched[0][i1] = 1;
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < 8; ++u) {
      float c[kHalves][4] = {};
#pragma unroll
      for (uint32_t n = 0; n < kHalves; ++n) {
#pragma unroll
        for (uint32_t half = 0; half < kHalves; ++half) {
          const float4 b =
              load_vector(tile_.second + (((u * kHalves + n) * kHalves + half) * 32 + lane_) * 4);
          const uint32_t i = 4 * half;
          Product::multiply_add(c[n], make_float4(a[0][i], a[1][i], a[0][i + 1], a[1][i + 1]), b.x,
                                b.y);
          Product::multiply_add(
              c[n], make_float4(a[0][i + 2], a[1][i + 2], a[0][i + 3], a[1][i + 3]), b.z, b.w);
        }
      }
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t number = entry_number(g_ / 4 + 2 * half);
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          store_pair(tile_.products +
                         Tile::product_place(number, j1 / 2, m, 4 * (u % 2 * 4 + t_) + u / 2) +
                         j1 % 2 * 2,
                     Product::operand(c[m][2 * half]), Product::operand(c[m][2 * half + 1]));
        }
      }
    }
  }

  __device__ __forceinline__ RowGradient load_gradient(uint32_t row) const {
    RowGradient gradient;
    if constexpr (kPairs) {
      const int64_t offset = row * grad_.row_stride;
      const float* const b = gradient_b_ + offset;
      const float* const a = gradient_a_ + offset;
      const uint32_t row_of_j1 = q2_ * q3_;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const bool is_there = kExact || (i < q1_ && t_ < q2_ && g_ < q3_);
        gradient.b[i] = is_there ? __ldg(b + i * row_of_j1) : 0.0f;
      }
      float2 pairs[2];
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const bool is_there = kExact || (g_ / 4 + 2 * half < q1_ && g_ % 4 < q2_ && 2 * t_ < q3_);
        pairs[half] = make_float2(0.0f, 0.0f);
        if (is_there) {
          pairs[half] = __ldg(reinterpret_cast<const float2*>(a + 2 * half * row_of_j1));
        }
      }
      gradient.a = make_float4(pairs[0].x, pairs[1].x, pairs[0].y, pairs[1].y);
    } else {
      const auto element = [&](uint32_t j1, uint32_t j2, uint32_t j3) {
        if (j1 >= q1_ || j2 >= q2_ || j3 >= q3_) return 0.0f;
        const int64_t column = column_ + (j1 * q2_ + j2) * q3_ + j3;
        return load_element<float>(grad_.data, grad_.type,
                                   row * grad_.row_stride + column * grad_.column_stride);
      };
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) gradient.b[i] = element(i, t_, g_);
      const uint32_t j1 = g_ / 4;
      gradient.a =
          make_float4(element(j1, g_ % 4, 2 * t_), element(j1 + 2, g_ % 4, 2 * t_),
                      element(j1, g_ % 4, 2 * t_ + 1), element(j1 + 2, g_ % 4, 2 * t_ + 1));
    }
    return gradient;
  }

  __device__ __forceinline__ ThirdSlice load_third(uint32_t i3) const {
    ThirdSlice slice;
    const core_t* const source = own_third_ + int64_t{i3} * r2_ * q3_;
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      const bool is_there = kExact || (8 * n + g_ < r2_ && 2 * t_ < q3_);
      slice.rows[n] = make_float2(0.0f, 0.0f);
      if constexpr (kPairs && std::is_same_v<core_t, float>) {
        if (is_there) {
          slice.rows[n] = __ldg(reinterpret_cast<const float2*>(source + 8 * n * q3_));
        }
      } else {
        const bool next_is_there = kExact || (is_there && 2 * t_ + 1 < q3_);
        if (is_there) slice.rows[n].x = load(source + 8 * n * q3_);
        if (next_is_there) slice.rows[n].y = load(source + 8 * n * q3_ + 1);
      }
    }
    return slice;
  }

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
  __device__ __forceinline__ void work_on_lookups() {
    if (!has_entry(0)) return;
    Fetched next[2];  // used in turn, so that nothing is moved
    uint32_t lookup = entry(0).x % 65536u;
    fetch(next[0], lookup);
#pragma unroll 1
    for (uint32_t slot = 0; slot < kEntriesPerWarp && has_entry(slot); ++slot) {
      const GradientEntry own = entry(slot);
      const uint32_t end = own.x % 65536u + own.x / 65536u;
      const bool has_next = slot + 1 < kEntriesPerWarp && has_entry(slot + 1);
      const uint32_t after_end = has_next ? entry(slot + 1).x % 65536u : end - 1;
      const uint32_t number = entry_number(slot);
      EntrySums sums;
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          sums.p[m][k] = load_vector(tile_.products + Tile::product_place(number, k, m, lane_));
        }
      }
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.dp[n][i] = 0.0f;
      }
      sums.row = {};
      const auto after = [&] { return lookup + 1 < end ? lookup + 1 : after_end; };
#pragma unroll 1
      while (true) {
        fetch(next[1], after());
        add_lookup(sums, next[0]);
        if (++lookup == end) {
          next[0] = next[1];
          break;
        }
        fetch(next[0], after());
        add_lookup(sums, next[1]);
        if (++lookup == end) break;
      }
      lookup = after_end;
      __syncwarp();
      store_product_gradient(number, sums.dp);
    }
  }

  __device__ __forceinline__ void add_lookup(EntrySums& sums, const Fetched& fetched) const {
    const float factor = fetched.lookup.factor;
    RowGradient& row = sums.row;
#pragma unroll
    for (int i = 0; i < 4; ++i) row.b[i] += factor * fetched.gradient.b[i];
    row.a.x += factor * fetched.gradient.a.x;
    row.a.y += factor * fetched.gradient.a.y;
    row.a.z += factor * fetched.gradient.a.z;
    row.a.w += factor * fetched.gradient.a.w;
    if ((fetched.lookup.third & kLastOfId) == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) row.b[i] = Product::operand(row.b[i]);
    row.a = make_float4(Product::operand(row.a.x), Product::operand(row.a.y),
                        Product::operand(row.a.z), Product::operand(row.a.w));
    add_third_gradient(fetched.lookup.third & ~kLastOfId, sums.p, row.b);
#pragma unroll
    for (uint32_t n = 0; n < kRank / 8; ++n) {
      Product::multiply_add(sums.dp[n], row.a, Product::operand(fetched.third.rows[n].x),
                            Product::operand(fetched.third.rows[n].y));
    }
    row = {};
  }

  __device__ __forceinline__ void add_third_gradient(uint32_t i3, const float4 (&p)[kHalves][2],
                                                     const float (&b)[4]) const {
    float* const slice = third_gradient_ + int64_t{i3} * r2_ * q3_;
    const uint32_t column = 2 * t_;
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
      float c[4] = {};
      Product::multiply_add(c, p[m][0], b[0], b[1]);
      Product::multiply_add(c, p[m][1], b[2], b[3]);
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r2 = 16 * m + 8 * half;
        add(slice + r2 * q3_, c[2 * half], c[2 * half + 1], r2 + g_ < r2_ && column < q3_,
            r2 + g_ < r2_ && column + 1 < q3_);
      }
    }
    if (marks_third_) targets_.touched[2][i3] = 1;
  }

  __device__ __forceinline__ void store_product_gradient(uint32_t number,
                                                         const float (&dp)[kRank / 8][4]) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (uint32_t n = 0; n < kRank / 8; ++n) {
        store_pair(tile_.products +
                       Tile::gradient_place(number, g_ / 4 + 2 * half, g_ % 4, 2 * n + t_ / 2) +
                       t_ % 2 * 2,
                   Product::operand(dp[n][2 * half]), Product::operand(dp[n][2 * half + 1]));
      }
    }
  }

  // dG1 of the warp's entries, transposed: columns are 16 rows (slot, j1).
  __device__ __forceinline__ void add_first_gradients() {
    float c[kHalves][2][4] = {};  // [r1 = 16 m + 2 g and + 1][two slots, columns 2 t and + 1]
#pragma unroll
    for (uint32_t j2 = 0; j2 < kGradientQ; ++j2) {
#pragma unroll
      for (uint32_t v = 0; v < kHalves; ++v) {
        float4 b[2];
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n) {
          b[n] = load_vector(tile_.products + Tile::gradient_place(entry_number(g_ / 4 + 2 * n),
                                                                   g_ % 4, j2, 4 * v + t_));
        }
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          const float* const a =
              tile_.second_transposed + (((j2 * kHalves + v) * 2 * kHalves + m) * 32 + lane_) * 4;
          const float4 even = load_vector(a);
          const float4 odd = load_vector(a + kHalves * 32 * 4);
#pragma unroll
          for (uint32_t n = 0; n < 2; ++n) {
            Product::multiply_add(c[m][n], even, b[n].x, b[n].y);
            Product::multiply_add(c[m][n], odd, b[n].z, b[n].w);
          }
        }
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
      const uint32_t slot = 2 * n + t_ / 2;
      if (!has_entry(slot)) continue;
      float* const slice = targets_.gradients[0] + int64_t{entry(slot).y} * q1_ * r1_;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t j1 = t_ % 2 * 2 + i;
        if (!kExact && j1 >= q1_) continue;
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          const uint32_t r1 = 16 * m + 2 * g_;
          add(slice + j1 * r1_ + r1, c[m][n][i], c[m][n][i + 2], r1 < r1_, r1 + 1 < r1_);
        }
      }
    }
  }

  __device__ __forceinline__ void clear_second_gradient() {
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) second_gradient_[m][i] = 0.0f;
    }
  }

  // 8 columns of dG2, over all entries; over some where there are more warps than columns for them.
  __device__ __forceinline__ void sum_second_gradient() {
    const uint32_t column_tile = warp_ % kColumnTiles;
    const uint32_t j2 = column_tile / (kRank / 8);
    const uint32_t r2 = 8 * (column_tile % (kRank / 8)) + g_;
    constexpr uint32_t kStep = 2 * kBackwardWarps / kColumnTiles;
#pragma unroll 1
    for (uint32_t number = 0; number < count_; number += kBackwardWarps) {
#pragma unroll
      for (uint32_t pair = 0; pair < kBackwardWarps; pair += kStep) {
        const uint32_t i = pair + 2 * (warp_ / kColumnTiles);
        const float b0 = tile_.products[Tile::gradient_place(number + i, t_, j2, r2 / 4) + r2 % 4];
        const float b1 =
            tile_.products[Tile::gradient_place(number + i + 1, t_, j2, r2 / 4) + r2 % 4];
#pragma unroll
        for (uint32_t m = 0; m < kHalves; ++m) {
          Product::multiply_add(
              second_gradient_[m],
              load_vector(tile_.first + Tile::first_place((number + i) / 2, m, lane_)), b0, b1);
        }
      }
    }
  }

  __device__ __forceinline__ void add_second_gradient(uint32_t i2) const {
    const uint32_t column_tile = warp_ % kColumnTiles;
    const uint32_t j2 = column_tile / (kRank / 8);
    const uint32_t r2 = 8 * (column_tile % (kRank / 8)) + 2 * t_;
    float* const slice = targets_.gradients[1] + int64_t{i2} * r1_ * q2_ * r2_;
#pragma unroll
    for (uint32_t m = 0; m < kHalves; ++m) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t r1 = g_ + 16 * m + 8 * half;
        const bool exists = r1 < r1_ && j2 < q2_;
        add(slice + (r1 * q2_ + j2) * r2_ + r2, second_gradient_[m][2 * half],
            second_gradient_[m][2 * half + 1], exists && r2 < r2_, exists && r2 + 1 < r2_);
      }
    }
  }

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
  float second_gradient_[kHalves][4];  // rows r1 = g + 16 m and + 8, columns r2 = 2 t and + 1
};

template <typename core_t, int kRank, bool kThreeProducts, GradientShape kShape>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    tiled_backward_kernel(const __grid_constant__ TiledGroup group,
                          const __grid_constant__ BagBatch batch,
                          const __grid_constant__ TiledRange range,
                          const __grid_constant__ TiledWorkspace workspace,
                          const __grid_constant__ BackwardPass pass) {
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<kRank>*>(shared_bytes);
  allow_dependent_launch();
  load_segments(shared.segments, group, batch, range);
  wait_for_previous_kernel();
  // Offsets out of order can make features overlap; the preparation reports them.
  if (shared.segments.first_entry[group.count] > range.end_lookup - range.first_lookup) return;
#pragma unroll 1
  for (int32_t number = blockIdx.x; number < pass.granules; number += gridDim.x) {
    const int32_t f = plan_granule(shared, group, workspace, pass, number);
    if (f < 0) continue;
    TileGradients<core_t, kRank, kThreeProducts, kShape>(
        shared.tile, shared.plan, group.features[f], pass.targets[f], pass.grad_output)
        .run();
  }
}

}  // namespace flowtt::cuda
