// The launches that pack the pairs of the last two of four cores.

#include "suffix_pairs.cuh"

#include <algorithm>

#include "wide_tilings.h"

namespace flowtt::cuda {
namespace {

template <int kQ4, int kSums>
cudaError_t launch_pairs(const TiledLaunch& launch, const TiledFeature& feature) {
  constexpr auto kernel = suffix_pairs_kernel<kQ4, kSums>;
  constexpr int32_t kBlocksPerMultiprocessor = 2;
  const PairShape pair(feature);
  const size_t shared_bytes = pair.shared_floats(kQ4) * sizeof(float);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  const int32_t p3 = feature.p[2] / pair.p4;
  const int32_t parts = std::clamp(kBlocksPerMultiprocessor * launch.plan.multiprocessors / p3, 1,
                                   (pair.p4 + kPairWarps - 1) / kPairWarps);
  kernel<<<dim3(p3, parts), kPairWarps * 32, shared_bytes, launch.stream>>>(
      feature, launch.workspace, launch.plan.core_type);
  return cudaGetLastError();
}

template <int kQ4>
cudaError_t launch_pairs(const TiledLaunch& launch, const TiledFeature& feature) {
  const PairShape pair(feature);
  return pair.rows * kQ4 <= 16 * 32 ? launch_pairs<kQ4, 16>(launch, feature)
                                    : launch_pairs<kQ4, 64>(launch, feature);
}

}  // namespace

cudaError_t launch_suffix_pairs(const TiledLaunch& launch) {
  if (!launch.packs_cores) return cudaSuccess;
  const TiledGroup& group = launch.plan.group;
  for (int32_t f = 0; f < group.count; ++f) {
    const TiledFeature& feature = group.features[f];
    if (!has_suffix_pairs(feature)) continue;
    if (f > 0 && group.features[f - 1].table == feature.table) continue;  // shares its packed cores
    const int32_t q4 = feature.q[3];
    const cudaError_t error = q4 == 1   ? launch_pairs<1>(launch, feature)
                              : q4 == 2 ? launch_pairs<2>(launch, feature)
                              : q4 <= 4 ? launch_pairs<4>(launch, feature)
                                        : launch_pairs<8>(launch, feature);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flowtt::cuda
