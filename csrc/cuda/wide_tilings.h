// Host interface of the wide and two-core kernels: which tables they take, and their launches.

#pragma once

#include "tiled_kernel_launch.cuh"
#include "wide_shape.h"

namespace flowtt::cuda {

// Whether, and by which kernel. From the sizes alone.
bool find_wide_tiling(const TableShape& shape, Tiling* tiling);

int64_t wide_slice_halves(const Tiling& tiling, const TiledFeature& feature, int k);
int64_t wide_packing_pieces(const Tiling& tiling, const TiledFeature& feature);

// Launches of one range. Each begins with the preparation.
cudaError_t launch_wide_32(const TiledLaunch& launch);
cudaError_t launch_wide_64(const TiledLaunch& launch);
cudaError_t launch_wide_96(const TiledLaunch& launch);
cudaError_t launch_wide_128(const TiledLaunch& launch);
cudaError_t launch_two_core(const TiledLaunch& launch);

// The preparation, compiled in wide_prepare.cu and two_core_prepare.cu.
template <bool kTwoCores>
cudaError_t launch_wide_prepare(const TiledLaunch& launch);

// Packs the pairs of the last two cores of those features that have four (suffix_pairs.cu), if the
// call's cores have not been packed yet.
cudaError_t launch_suffix_pairs(const TiledLaunch& launch);

// Whether the feature has four cores.
inline bool has_suffix_pairs(const TiledFeature& feature) { return feature.cores[3] != nullptr; }

}  // namespace flowtt::cuda
