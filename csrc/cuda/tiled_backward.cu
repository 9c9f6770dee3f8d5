// Host side of the tiled backward path: lookups are sorted, then worked on.

#include "tiled_backward.h"

#include <algorithm>

#include "device_attributes.h"
#include "tiled_backward_launch.cuh"
#include "tiled_backward_planning.cuh"
#include "tiled_backward_tables.h"
#include "tiled_prepare_launch.cuh"
#include "tiled_sort.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxLookupsPerRange = int64_t{1} << 20;
// Lookups that are worth a block.
constexpr int64_t kMinGranule = 16;

// The cores are read as they are.
struct NoPacking {
  struct Scratch {};
  static __device__ __forceinline__ void pack(const TiledFeature&, const TiledWorkspace&, Scratch&,
                                              int32_t) {}
};

struct BackwardWorkspace {
  TiledWorkspace sort;
  BackwardWork work;
};

BackwardWorkspace place_workspace(const BackwardPlan& plan, WorkspaceLayout* layout) {
  const TiledPlan& sort = plan.sort;
  const bool sorts = plan.order.entries == nullptr;
  const int64_t lookups = sort.lookups_per_range;
  const int64_t chunks = sorts ? max_chunks(sort, lookups) : 0;
  BackwardWorkspace workspace{};
  workspace.work.lookups = layout->take<GradientLookup>(lookups);
  workspace.sort.entries = plan.order.entries;
  workspace.sort.factors = plan.order.factors;
  uint32_t* counters = plan.order.counters;
  if (sorts) {
    workspace.sort.control = layout->take<uint32_t>(kControlWords);
    counters = workspace.sort.control;
    // Those of a granule take the place of its entries.
    workspace.sort.entries = reinterpret_cast<GroupedLookup*>(workspace.work.lookups);
    static_assert(sizeof(GradientLookup) == sizeof(GroupedLookup));
    workspace.sort.factors = layout->take<float>(sort.has_factors ? lookups : 0);
  }
  // What is only sorted with is dead before anything is planned.
  const int64_t sort_words = chunks * (kBinSums + kMaxTiledBins);
  const int64_t tiles = first_tile_of_class(lookups, kTileClasses);
  const int64_t work_bytes = lookups * static_cast<int64_t>(sizeof(GradientEntry)) +
                             tiles * static_cast<int64_t>(sizeof(GradientTile));
  char* const shared =
      layout->take<char>(std::max(sort_words * static_cast<int64_t>(sizeof(uint32_t)), work_bytes));
  workspace.sort.bin_sums = reinterpret_cast<uint32_t*>(shared);
  workspace.sort.bin_starts = workspace.sort.bin_sums + chunks * kBinSums;
  workspace.work.entries = reinterpret_cast<GradientEntry*>(shared);
  workspace.work.tiles = reinterpret_cast<GradientTile*>(workspace.work.entries + lookups);
  for (uint32_t i = 0; i < kTileClasses; ++i) {
    workspace.work.first_tiles[i] = static_cast<uint32_t>(first_tile_of_class(lookups, i));
  }
  workspace.work.blocks = static_cast<uint32_t>(plan.tables.blocks);
  workspace.work.tile_counts = counters;
  workspace.work.left_blocks = counters + kTileClasses;
  workspace.work.taken_tiles = counters + kOrderCounters / 2;  // in another line
  return workspace;
}

// cleared: what is to be zeros after it; steps: as the kernel takes it.
cudaError_t launch_planning(const TiledLaunch& launch, const BackwardWork& work,
                            const ClearedVectors& cleared, int64_t* steps) {
  // Large ones are cut into fewer tiles that are not full; small calls are better spread. No
  // granule has lookups of two features.
  const int64_t others = launch.plan.group.count - 1;
  const int64_t granules = std::max<int64_t>(launch.plan.multiprocessors - others, 1);
  const int32_t most = static_cast<int32_t>(
      std::clamp<int64_t>(ceil_div(launch.lookups(), granules), kMinGranule, kPlanThreads));
  const int64_t planning = ceil_div(launch.lookups(), most) + others;
  const int64_t clearing = cleared.count > 0 ? launch.plan.multiprocessors : 0;
  return launch_kernel(tiled_backward_planning_kernel, planning + clearing, kPlanThreads, 0,
                       launch.plan.dependent_launch, launch.stream, launch.plan.group, launch.batch,
                       launch.range, launch.workspace, work, most, static_cast<int32_t>(planning),
                       cleared, steps);
}

template <typename core_t, bool kThreeProducts>
cudaError_t launch_precision(const BackwardPlan& plan, const TiledLaunch& launch,
                             const BackwardPass& pass) {
  const auto launch_wide = [&]<GradientShape kShape>() {
    return launch_gradients<core_t, 32, kThreeProducts, kShape>(plan, launch, pass);
  };
  const auto launch_ranked = [&]<GradientShape kShape>() {
    return plan.tables.rank == 16
               ? launch_gradients<core_t, 16, kThreeProducts, kShape>(plan, launch, pass)
               : launch_wide.template operator()<kShape>();
  };
  switch (plan.shape) {
    case GradientShape::kExact:
      return launch_ranked.template operator()<GradientShape::kExact>();
    case GradientShape::kGrouped:
    case GradientShape::kGroupedBlocks:
      return launch_grouped_gradients(plan, launch, pass);
    case GradientShape::kExactBlocks:
      return launch_wide.template operator()<GradientShape::kExactBlocks>();
    case GradientShape::kEven:
      return launch_ranked.template operator()<GradientShape::kEven>();
    case GradientShape::kAny:
      return launch_ranked.template operator()<GradientShape::kAny>();
    case GradientShape::kTwoCoresEven:
      return launch_wide.template operator()<GradientShape::kTwoCoresEven>();
    case GradientShape::kTwoCoresAny:
      return launch_wide.template operator()<GradientShape::kTwoCoresAny>();
  }
  return cudaErrorInvalidValue;
}

template <typename core_t>
cudaError_t launch_core_type(const BackwardPlan& plan, const TiledLaunch& launch,
                             const BackwardPass& pass) {
  return plan.three_products ? launch_precision<core_t, true>(plan, launch, pass)
                             : launch_precision<core_t, false>(plan, launch, pass);
}

// Whether the warps of the current device multiply in groups, and a block has room for that.
cudaError_t read_grouped(const GradientClass& tables, bool* is_grouped) {
  *is_grouped = false;
  if (!kHasGroupedGradients) return cudaSuccess;
  int major = 0;
  int minor = 0;
  int shared_limit = 0;
  cudaError_t error = read_attribute(cudaDevAttrComputeCapabilityMajor, &major);
  if (error == cudaSuccess) error = read_attribute(cudaDevAttrComputeCapabilityMinor, &minor);
  if (error == cudaSuccess) {
    error = read_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_limit);
  }
  const int needed = tables.rank == 16 ? kGroupedSharedBytes<16> : kGroupedSharedBytes<32>;
  *is_grouped = major == 9 && minor == 0 && shared_limit >= needed;
  return error;
}

}  // namespace

cudaError_t plan_tiled_backward(const BagBatch& batch, const StridedMatrix& grad_output,
                                BackwardPlan* plan) {
  TiledPlan& sort = plan->sort;
  sort = {};
  sort.core_type = plan->core_type;
  cudaError_t error = read_dependent_launch(&sort.dependent_launch);
  if (error != cudaSuccess) return error;
  error = read_attribute(cudaDevAttrMultiProcessorCount, &sort.multiprocessors);
  if (error != cudaSuccess) return error;
  plan->shape = find_gradient_shape(
      *plan, grad_output, batch.pooling_mode == PoolingMode::kNone ? batch.nnz : batch.batch_size);
  const bool has_blocks = plan->shape == GradientShape::kExactBlocks;
  if ((plan->shape == GradientShape::kExact || has_blocks) && !plan->three_products &&
      plan->core_type == ElementType::kFloat32) {
    bool is_grouped = false;
    error = read_grouped(plan->tables, &is_grouped);
    if (error != cudaSuccess) return error;
    if (is_grouped) {
      plan->shape = has_blocks ? GradientShape::kGroupedBlocks : GradientShape::kGrouped;
    }
  }
  sort.bins = 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    sort.bins = std::max(sort.bins, set_sort_order(kMaxTiledBins / 2, &plan->group.features[f]));
  }
  sort.group = plan->group;
  const int64_t ranges = std::max<int64_t>(ceil_div(batch.nnz, kMaxLookupsPerRange), 1);
  sort.lookups_per_range = ceil_div(batch.nnz, ranges);
  sort.samples_per_range = batch.batch_size;
  sort.chunk_shift = choose_chunk_shift(sort.lookups_per_range, sort.multiprocessors);
  sort.has_factors = has_factors(batch);
  // An order is of a whole call.
  if (ranges > 1) plan->order = {};
  WorkspaceLayout layout(nullptr);
  place_workspace(*plan, &layout);
  plan->workspace_bytes = static_cast<size_t>(layout.bytes());
  return cudaSuccess;
}

cudaError_t launch_tiled_backward(const BackwardPlan& plan, const BagBatch& batch,
                                  const StridedMatrix& grad_output, void* workspace,
                                  cudaStream_t stream) {
  const TiledPlan& sort = plan.sort;
  WorkspaceLayout layout(workspace);
  const BackwardWorkspace pieces = place_workspace(plan, &layout);
  BackwardPass pass{grad_output, pieces.work, {}};
  TiledRange range{};
  range.chunk_shift = sort.chunk_shift;
  range.bins = sort.bins;
  range.end_sample = batch.batch_size;
  set_bag_length(batch, &range);
  const PooledOutput no_output{};
  std::copy(plan.targets, plan.targets + kTiledFeaturesPerLaunch, pass.targets);
  for (int64_t lookup = 0; lookup < batch.nnz; lookup = range.end_lookup) {
    range.first_lookup = lookup;
    range.end_lookup = std::min(batch.nnz, lookup + sort.lookups_per_range);
    const TiledLaunch launch{sort,  batch, range, pieces.sort, no_output,
                             false, false, false, stream};
    ClearedVectors cleared{
        static_cast<uint4*>(plan.start.cleared),
        lookup == 0 ? plan.start.cleared_bytes / static_cast<int64_t>(sizeof(uint4)) : 0};
    cudaError_t error = cudaSuccess;
    if (plan.order.entries == nullptr) {
      error = launch_prepare<NoPacking>(launch, cleared);
      cleared.count = 0;
    }
    if (error == cudaSuccess) {
      error =
          launch_planning(launch, pieces.work, cleared, lookup == 0 ? plan.start.steps : nullptr);
    }
    if (error != cudaSuccess) return error;
    error = sort.core_type == ElementType::kFloat32 ? launch_core_type<float>(plan, launch, pass)
            : sort.core_type == ElementType::kFloat16
                ? launch_core_type<__half>(plan, launch, pass)
                : launch_core_type<__nv_bfloat16>(plan, launch, pass);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace flowtt::cuda
