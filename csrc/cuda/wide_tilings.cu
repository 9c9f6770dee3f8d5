// Which tables the wide and two-core kernels take.

#include "wide_tilings.h"

#include <algorithm>

#include "tiled_tilings.h"
#include "wide_packing.cuh"

namespace flowtt::cuda {
namespace {

// Pairs of the last two of four cores are packed only as far as this many halves go.
constexpr int64_t kMaxPairHalves = int64_t{4} << 20;
// Of one pair, what a warp holds in registers while it sums.
constexpr int64_t kMaxPairElements = 2048;
// Of core 3's slice, what shared memory holds on every device.
constexpr int64_t kMaxPairSliceBytes = int64_t{64} << 10;

TiledFeature three_core_feature(const TableShape& shape) {
  TiledFeature feature{};
  feature.num_cores = static_cast<int16_t>(shape.num_cores);
  for (int k = 0; k < shape.num_cores; ++k) {
    feature.p[k] = static_cast<int32_t>(shape.p[k]);
    feature.q[k] = static_cast<int16_t>(shape.q[k]);
    if (k > 0) feature.r[k - 1] = static_cast<int16_t>(shape.r[k]);
  }
  set_three_cores(&feature);
  return feature;
}

bool find_two_cores(const TableShape& shape, Tiling* tiling) {
  if (shape.q[0] > kMaxTwoCoreRows || shape.q[1] > kMaxTwoCoreColumns) return false;
  if (shape.r[1] > kMaxWideRank) return false;
  tiling->kind = TilingKind::kTwoCore;
  tiling->rank1 = shape.r[1] > 64 ? 128 : shape.r[1] > 32 ? 64 : 32;
  tiling->rank2 = 0;
  tiling->q3 = shape.q[1] > 16 ? 32 : 16;
  return true;
}

}  // namespace

bool find_wide_tiling(const TableShape& shape, Tiling* tiling) {
  tiling->exact = false;
  for (int k = 0; k < shape.num_cores; ++k) {
    if (shape.p[k] > kMaxTiledFactor) return false;
  }
  if (shape.num_cores == 2) {
    if (!find_two_cores(shape, tiling)) return false;
  } else {
    const bool pairs = shape.num_cores == 4;
    const int64_t q3 = pairs ? shape.q[2] * shape.q[3] : shape.q[2];
    if (shape.q[0] > kMaxWideQ || shape.q[1] > kMaxWideQ || q3 > kMaxWideColumns) return false;
    if (shape.r[1] > kMaxWideRank || shape.r[2] > kMaxWideRank) return false;
    if (pairs) {
      if (shape.p[2] * shape.p[3] > kMaxTiledFactor || shape.q[3] > 8) return false;
      const int64_t padded_q4 = shape.q[3] > 4 ? 8 : shape.q[3] > 2 ? 4 : shape.q[3];
      if (shape.r[2] * shape.q[2] * padded_q4 > kMaxPairElements) return false;
      if ((shape.r[2] * shape.q[2] + 1) * shape.r[3] * 4 > kMaxPairSliceBytes) return false;
      const TiledFeature feature = three_core_feature(shape);
      const WideShape wide(feature);
      if (int64_t{feature.p[2]} * wide.vectors(PackedRole::kThird) * kVectorHalves >
          kMaxPairHalves) {
        return false;
      }
    }
    const int64_t rank = std::max(shape.r[1], shape.r[2]);
    tiling->kind = TilingKind::kWide;
    tiling->rank1 = tiling->rank2 = static_cast<int32_t>((rank + 31) / 32 * 32);
    tiling->q3 = 0;
  }
  const TiledFeature feature = three_core_feature(shape);
  int64_t packed_halves = 0;
  for (int k = 0; k < 3; ++k)
    packed_halves += feature.p[k] * wide_slice_halves(*tiling, feature, k);
  return packed_halves <= kMaxPackedHalves / kTiledFeaturesPerLaunch;
}

void set_three_cores(TiledFeature* feature) {
  if (feature->num_cores == 2) {
    feature->p[2] = 1;
    feature->q[2] = 1;
    feature->r[1] = 1;
  } else if (feature->num_cores == 4) {
    // p[3], q[3] and r[2] stay: they say how the pairs are formed.
    feature->p[2] *= feature->p[3];
    feature->q[2] = static_cast<int16_t>(feature->q[2] * feature->q[3]);
  }
  feature->num_cores = 3;
}

int64_t wide_slice_halves(const Tiling& tiling, const TiledFeature& feature, int k) {
  if (tiling.kind == TilingKind::kTwoCore) {
    // The third core that is not there has one exponent, of one empty slice.
    if (k == 2) return 0;
    const TwoCoreShape shape(feature);
    return int64_t{kVectorHalves} * shape.vectors(k == 0 ? PackedRole::kLeft : PackedRole::kRight);
  }
  const WideShape shape(feature);
  constexpr PackedRole kRoles[] = {PackedRole::kFirst, PackedRole::kSecond, PackedRole::kThird};
  return int64_t{kVectorHalves} * shape.vectors(kRoles[k]);
}

int64_t wide_packing_pieces(const Tiling& tiling, const TiledFeature& feature) {
  return wide_pack_pieces(feature, tiling.kind == TilingKind::kTwoCore, has_suffix_pairs(feature));
}

}  // namespace flowtt::cuda
