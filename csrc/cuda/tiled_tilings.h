// What the host needs to know of each tiling: how large its packed slices are, and its launches.

#pragma once

#include "tiled_kernel_launch.cuh"

namespace flowtt::cuda {

// Kernels address packed cores with 32 bits of bytes. Of all tables that one launch may find.
inline constexpr int64_t kMaxPackedHalves = (int64_t{1} << 31) - 1;

// Describes a feature of two or four cores as one of three, which all kernels work on: the third of
// two cores has one slice of one element that is not there, and the last two of four are contracted
// in pairs (suffix_pairs.cuh). Sorting sees the digits of three cores too.
void set_three_cores(TiledFeature* feature);

// Halves of one packed slice of core k.
int64_t packed_slice_halves(const Tiling& tiling, const TiledFeature& feature, int k);

// Blocks' worth of work that packing the feature's cores is.
int64_t packing_pieces(const Tiling& tiling, const TiledFeature& feature);

// Prepares and contracts one range.
cudaError_t launch_tiling(const TiledLaunch& launch);

// Sums the buffered rows of the range's bags, and rounds finished sums to a 16-bit output.
cudaError_t launch_tiled_fold(const TiledLaunch& launch);
cudaError_t launch_tiled_pool(const TiledLaunch& launch);

}  // namespace flowtt::cuda
