// The first and the last launch of the preparation, which are the same for all tables.

#include <algorithm>

#include "tiled_kernel_launch.cuh"
#include "tiled_prepare_launch.cuh"
#include "tiled_scatter.cuh"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxClearingPieces = 64;

// Waits before it lets the next kernels start: they read indices and offsets before they wait, and
// kernels ahead of the call may have written them.
__global__ void __launch_bounds__(kPrepareThreads)
    tiled_clear_kernel(uint4* __restrict__ words, int32_t count) {
  wait_for_previous_kernel();
  allow_dependent_launch();
  const int32_t word = static_cast<int32_t>(blockIdx.x * kPrepareThreads + threadIdx.x);
  if (word < count) words[word] = make_uint4(0, 0, 0, 0);
}

}  // namespace

int32_t count_sorting_blocks(const TiledLaunch& launch) {
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  if (lookups == 0) return 0;
  const int64_t chunk = int64_t{1} << launch.range.chunk_shift;
  // No chunk has lookups of two features.
  return static_cast<int32_t>((lookups + chunk - 1) / chunk + launch.plan.group.count - 1);
}

int32_t choose_chunk_shift(const TiledLaunch& launch) {
  static_assert(kPrepareThreads == 512);
  constexpr int32_t kMinShift = 9;
  constexpr int32_t kMaxShift = 11;
  static_assert(1 << kMaxShift == kMaxChunk);
  const int64_t lookups = launch.range.end_lookup - launch.range.first_lookup;
  const int64_t most = int64_t{launch.plan.multiprocessors} * 3 / 2;
  int32_t shift = kMinShift;
  while (shift < kMaxShift && lookups > most << shift) ++shift;
  return shift;
}

cudaError_t launch_clear(const TiledLaunch& launch) {
  const TiledWorkspace& workspace = launch.workspace;
  // These lie one after the other.
  const uint32_t* const end =
      workspace.piece_arrivals != nullptr
          ? workspace.piece_arrivals + launch.plan.lookups_per_range / kPoolPiece
          : workspace.bin_counts + launch.plan.group.count * kMaxTiledBins;
  const int64_t count = (end - workspace.control + 3) / 4;
  return launch_kernel(tiled_clear_kernel, (count + kPrepareThreads - 1) / kPrepareThreads,
                       kPrepareThreads, 0, launch.plan.dependent_launch, launch.stream,
                       reinterpret_cast<uint4*>(workspace.control), static_cast<int32_t>(count));
}

cudaError_t launch_scatter(const TiledLaunch& launch) {
  const TiledRange& range = launch.range;
  const TiledGroup& group = launch.plan.group;
  const int64_t samples = range.end_sample - range.first_sample;
  const int64_t bags_per_piece = std::clamp<int64_t>(
      samples * group.count / kMaxClearingPieces / kPrepareWarps * kPrepareWarps, kPrepareWarps,
      kMaxBagsPerPiece);
  ClearingPieces pieces{};
  pieces.pieces_per_feature = static_cast<int32_t>((samples + bags_per_piece - 1) / bags_per_piece);
  pieces.bags_per_piece = static_cast<int32_t>(bags_per_piece);
  pieces.clears_sums = launch.clears_sums;
  const int32_t scattering = count_sorting_blocks(launch);
  const int64_t blocks = int64_t{scattering} + group.count * pieces.pieces_per_feature;
  const auto kernel = range.chunk_shift == 9    ? tiled_scatter_kernel<1>
                      : range.chunk_shift == 10 ? tiled_scatter_kernel<2>
                                                : tiled_scatter_kernel<4>;
  return launch_kernel(kernel, blocks, kPrepareThreads, 0, launch.plan.dependent_launch,
                       launch.stream, group, launch.batch, range, launch.workspace, launch.output,
                       pieces, scattering);
}

}  // namespace flowtt::cuda
