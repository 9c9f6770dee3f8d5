// Host side of the contraction that sorts its lookups itself.

#pragma once

#include <algorithm>

#include "cluster_limits.cuh"
#include "tiled_contract_launch.cuh"
#include "tiled_sorting_contract.cuh"

namespace flowtt::cuda {

// Clusters of 2^cluster_shift blocks, and the runs that they sort one after the other, each by
// `parts` clusters together.
struct SharesShape {
  int cluster_shift;
  int64_t clusters;
  int64_t parts;
  int64_t run_lookups;  // at most
};

// Large clusters see more lookups at once, but fewer of them may fit.
inline SharesShape choose_clusters(const ClusterLimits& limits, int64_t multiprocessors) {
  constexpr int kLargest = ClusterLimits::kSizes - 1;
  constexpr int kEnough = 8;
  SharesShape shape{};
  shape.cluster_shift = kLargest;
  if (limits.clusters[kLargest] < kEnough) {
    do --shape.cluster_shift;
    while (shape.cluster_shift > 0 && limits.clusters[shape.cluster_shift] == 0);
  }
  // Buffered rows are divided among as many blocks as there are multiprocessors.
  shape.clusters = std::clamp<int64_t>(limits.clusters[shape.cluster_shift], 1,
                                       multiprocessors >> shape.cluster_shift);
  return shape;
}

// As many clusters sort together as have their parts in one round, so that they see as many lookups
// as possible: of these, a cluster reads no more than its registers hold. The host knows how many
// lookups the features have on average only, so several features get runs of an eighth more.
inline void choose_runs(SharesShape* shape, int64_t lookups, int64_t call_features,
                        int64_t group_features, int64_t most_parts) {
  const int64_t most_read = int64_t{kMaxShareChunk} << shape->cluster_shift;
  const int64_t most_kept = int64_t{kMaxSliceLookups} << shape->cluster_shift;
  const int64_t least = int64_t{kMinWindow} << shape->cluster_shift;
  const auto ceil_div = [](int64_t value, int64_t divisor) {
    return (value + divisor - 1) / divisor;
  };
  const auto most = [&](int64_t parts) { return std::min(most_read, parts * most_kept); };
  if (call_features == 1) {
    shape->clusters = std::min(shape->clusters, ceil_div(lookups, least));
    shape->parts = std::min(shape->clusters, most_parts);
    while (shape->parts > 2 && shape->clusters / shape->parts * most(shape->parts) < lookups) {
      shape->parts /= 2;
    }
    const int64_t runs_at_once = shape->clusters / shape->parts;
    const int64_t rounds = ceil_div(lookups, runs_at_once * most(shape->parts));
    shape->run_lookups = ceil_div(lookups, runs_at_once * rounds);
    shape->clusters = runs_at_once * shape->parts;
    return;
  }
  const int64_t average = ceil_div(lookups, call_features);
  shape->parts = std::clamp<int64_t>(shape->clusters / group_features, 1,
                                     std::min(most_parts, ceil_div(average, least)));
  const int64_t run = ceil_div(average, ceil_div(average + average / 8, most(shape->parts)));
  shape->run_lookups = std::min(run + run / 8 + 1, most(shape->parts));
  shape->clusters =
      std::min(shape->clusters, (lookups / shape->run_lookups + group_features) * shape->parts);
}

template <int kRank1, int kRank2, int kQ3, bool kThreeProducts, bool kExact, bool kFused>
cudaError_t launch_sorting_contract_kernel(const TiledLaunch& launch) {
  using Shape = ContractShape<kRank1, kThreeProducts>;
  using Chain = TiledChain<kRank1, kRank2, kQ3, kThreeProducts, Shape::kHeld>;
  using Block = SortingBlock<WarpStorage<Chain, kFused>, Shape::kWarps>;
  constexpr auto kernel = tiled_sorting_contract_kernel<kRank1, kRank2, kQ3, kThreeProducts, kExact,
                                                        kFused, Shape::kHeld, Shape::kWarps>;
  // A slice is whole windows.
  const auto shared_bytes = [](int64_t slice_lookups) {
    const int64_t room = (slice_lookups + kWindow - 1) / kWindow * kWindow + kWindow;
    return sizeof(Block) + static_cast<size_t>(room) * sizeof(GroupedLookup);
  };
  ClusterLimits limits;
  const cudaError_t error =
      find_cluster_limits<kernel>({Shape::kWarps * 32, 1, shared_bytes(kMaxSliceLookups)}, &limits);
  if (error != cudaSuccess) return error;
  const TiledGroup& group = launch.plan.group;
  SharesShape shape = choose_clusters(limits, launch.plan.multiprocessors);
  choose_runs(&shape, launch.range.end_lookup - launch.range.first_lookup,
              launch.batch.num_features, group.count,
              launch.plan.most_parts == 0 ? shape.clusters : launch.plan.most_parts);
  TiledRange range = launch.range;
  range.run_lookups = static_cast<int32_t>(shape.run_lookups);
  range.run_parts = static_cast<int32_t>(shape.parts);
  const int64_t slice_lookups = (shape.run_lookups - 1) / (shape.parts << shape.cluster_shift) + 1;
  return launch_kernel(kernel, shape.clusters << shape.cluster_shift, Shape::kWarps * 32,
                       shared_bytes(slice_lookups), launch.plan.dependent_launch,
                       1 << shape.cluster_shift, launch.stream, group, launch.batch, range,
                       launch.workspace, launch.output);
}

}  // namespace flowtt::cuda
