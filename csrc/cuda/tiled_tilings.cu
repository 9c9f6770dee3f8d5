// The tilings there are, and which tables they take.

#include "tiled_tilings.h"

#include <algorithm>

#include "tiled_packing.cuh"
#include "wide_tilings.h"

namespace flowtt::cuda {

// Defined in tiled_kernels_*.cu.
cudaError_t launch_tiling_16_4(const TiledLaunch& launch);
cudaError_t launch_tiling_16_8(const TiledLaunch& launch);
cudaError_t launch_tiling_32_4(const TiledLaunch& launch);
cudaError_t launch_tiling_32_8(const TiledLaunch& launch);

namespace {

constexpr int32_t kMaxTiledRank = 32;
constexpr int32_t kMaxTiledColumns = 8;  // q3

// What the two ways cost on an H200, in picoseconds: the general kernel a lookup and a byte of the
// slices that it reads, the tiled ones their launches and a byte of the cores that they pack.
constexpr double kGeneralLookup = 1000.0;
constexpr double kGeneralByte = 1.0 / 6.0;
constexpr double kTiledLaunches = 12e6;
constexpr double kPackedByte = 1.0 / 1.5;
constexpr double kTiledLookup = 300.0;

int64_t packed_slice_halves(const Tiling& tiling, int k) {
  return k == 0   ? int64_t{kMaxTiledQ} * tiling.rank1
         : k == 1 ? int64_t{kMaxTiledQ} * tiling.rank1 * tiling.rank2
                  : int64_t{tiling.q3} * tiling.rank2;
}

bool find_three_core_tiling(const TableShape& shape, Tiling* tiling) {
  if (shape.num_cores != 3) return false;
  if (shape.q[0] > kMaxTiledQ || shape.q[1] > kMaxTiledQ || shape.q[2] > kMaxTiledColumns) {
    return false;
  }
  if (shape.r[1] > kMaxTiledRank || shape.r[2] > kMaxTiledRank) return false;
  if (*std::max_element(shape.p, shape.p + 3) > kMaxTiledFactor) return false;
  tiling->kind = TilingKind::kTiled;
  tiling->rank1 = tiling->rank2 = std::max(shape.r[1], shape.r[2]) > 16 ? 32 : 16;
  tiling->q3 = shape.q[2] > 4 ? 8 : 4;
  tiling->exact = shape.q[0] == 4 && shape.q[1] == 4 && shape.q[2] == tiling->q3;
  int64_t packed_halves = 0;
  for (int k = 0; k < 3; ++k) packed_halves += shape.p[k] * packed_slice_halves(*tiling, k);
  return packed_halves <= kMaxPackedHalves / kTiledFeaturesPerLaunch;
}

}  // namespace

bool find_tiling(ElementType core_type, int64_t output_rows, const TableShape& shape,
                 Tiling* tiling) {
  if (core_type == ElementType::kFloat64 || output_rows >= int64_t{kLoneLookup}) return false;
  return find_three_core_tiling(shape, tiling) || find_wide_tiling(shape, tiling);
}

bool tiling_pays(int64_t lookups, int64_t features, const TableShape& shape) {
  double slice_bytes = 0.0;
  double core_bytes = 0.0;
  for (int k = 0; k < shape.num_cores; ++k) {
    slice_bytes += static_cast<double>(shape.slice_numel(k)) * sizeof(float);
    core_bytes += static_cast<double>(shape.core_numel(k)) * sizeof(float);
  }
  const double general =
      static_cast<double>(lookups) * (kGeneralLookup + slice_bytes * kGeneralByte);
  const double tiled = kTiledLaunches / static_cast<double>(features) + core_bytes * kPackedByte +
                       static_cast<double>(lookups) * kTiledLookup;
  return tiled < general;
}

int64_t packed_slice_halves(const Tiling& tiling, const TiledFeature& feature, int k) {
  return tiling.kind == TilingKind::kTiled ? packed_slice_halves(tiling, k)
                                           : wide_slice_halves(tiling, feature, k);
}

int64_t packing_pieces(const Tiling& tiling, const TiledFeature& feature) {
  if (tiling.kind != TilingKind::kTiled) return wide_packing_pieces(tiling, feature);
  return tiling.rank2 == 16 ? ThreeCorePacking<16, 16, 4, float>::pieces(feature)
                            : ThreeCorePacking<32, 32, 4, float>::pieces(feature);
}

cudaError_t launch_tiling(const TiledLaunch& launch) {
  const Tiling& tiling = launch.plan.tiling;
  if (tiling.kind == TilingKind::kTwoCore) return launch_two_core(launch);
  if (tiling.kind == TilingKind::kWide) {
    return tiling.rank1 == 32   ? launch_wide_32(launch)
           : tiling.rank1 == 64 ? launch_wide_64(launch)
           : tiling.rank1 == 96 ? launch_wide_96(launch)
                                : launch_wide_128(launch);
  }
  if (tiling.rank1 == 16) {
    return tiling.q3 == 4 ? launch_tiling_16_4(launch) : launch_tiling_16_8(launch);
  }
  return tiling.q3 == 4 ? launch_tiling_32_4(launch) : launch_tiling_32_8(launch);
}

}  // namespace flowtt::cuda
