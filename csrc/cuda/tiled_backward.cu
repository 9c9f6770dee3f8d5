// Host side of the tiled backward path: lookups are sorted, then worked on.

#include "tiled_backward.h"

#include <algorithm>
#include <type_traits>

#include "device_attributes.h"
#include "tiled_backward_launch.cuh"
#include "tiled_backward_planning.cuh"
#include "tiled_prepare_launch.cuh"
#include "tiled_sort.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

constexpr int kMaxGradientRank = 32;
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
  workspace.sort.control = layout->take<uint32_t>(kControlWords);
  if (sorts) {
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
  workspace.work.tile_counts = workspace.sort.control;
  workspace.work.taken_tiles = workspace.sort.control + kControlWords / 2;  // in another line
  return workspace;
}

// cleared: what is to be zeros after it; is_sorted: as the kernel takes it.
cudaError_t launch_planning(const TiledLaunch& launch, const BackwardWork& work,
                            const ClearedVectors& cleared, bool is_sorted) {
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
                       cleared, is_sorted);
}

template <typename core_t, bool kThreeProducts>
cudaError_t launch_precision(const BackwardPlan& plan, const TiledLaunch& launch,
                             const BackwardPass& pass) {
  constexpr auto kExact = GradientShape::kExact;
  constexpr auto kEven = GradientShape::kEven;
  constexpr auto kAny = GradientShape::kAny;
  if constexpr (!kThreeProducts && std::is_same_v<core_t, float>) {
    if (plan.shape == GradientShape::kGrouped) return launch_grouped_gradients(plan, launch, pass);
  }
  if (plan.shape == kExact) {
    return plan.rank == 16
               ? launch_gradients<core_t, 16, kThreeProducts, kExact>(plan, launch, pass)
               : launch_gradients<core_t, 32, kThreeProducts, kExact>(plan, launch, pass);
  }
  if (plan.rank == 16) {
    return plan.shape == kEven
               ? launch_gradients<core_t, 16, kThreeProducts, kEven>(plan, launch, pass)
               : launch_gradients<core_t, 16, kThreeProducts, kAny>(plan, launch, pass);
  }
  return plan.shape == kEven
             ? launch_gradients<core_t, 32, kThreeProducts, kEven>(plan, launch, pass)
             : launch_gradients<core_t, 32, kThreeProducts, kAny>(plan, launch, pass);
}

template <typename core_t>
cudaError_t launch_core_type(const BackwardPlan& plan, const TiledLaunch& launch,
                             const BackwardPass& pass) {
  return plan.three_products ? launch_precision<core_t, true>(plan, launch, pass)
                             : launch_precision<core_t, false>(plan, launch, pass);
}

bool is_aligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Rows are numbered in vectors of four floats: kExact needs 32 bits for them.
constexpr int64_t kMaxVectors = int64_t{1} << 32;

// output_rows: of grad_output.
GradientShape find_shape(const BackwardPlan& plan, const StridedMatrix& grad_output,
                         int64_t output_rows) {
  bool even = grad_output.type == ElementType::kFloat32 && grad_output.column_stride == 1 &&
              grad_output.row_stride % 2 == 0 && is_aligned(grad_output.data, 8);
  bool exact = grad_output.row_stride % 4 == 0 && is_aligned(grad_output.data, 16) &&
               output_rows * (grad_output.row_stride / 4) < kMaxVectors;
  for (int32_t f = 0; f < plan.group.count; ++f) {
    const TiledFeature& feature = plan.group.features[f];
    exact = exact && feature.q[0] == kGradientQ && feature.q[1] == kGradientQ &&
            feature.q[2] == plan.rank / kGradientQ && feature.r[0] == plan.rank &&
            feature.r[1] == plan.rank && feature.output_column % 4 == 0;
    even = even && feature.q[2] % 2 == 0 && feature.r[0] % 2 == 0 && feature.r[1] % 2 == 0 &&
           feature.output_column % 2 == 0;
    for (int k = 0; k < 3; ++k) {
      exact = exact && is_aligned(feature.cores[k], 16);
      even = even && is_aligned(feature.cores[k], 8) && is_aligned(plan.targets[f].gradients[k], 8);
    }
  }
  return !even ? GradientShape::kAny : exact ? GradientShape::kExact : GradientShape::kEven;
}

// Whether the warps of the current device multiply in groups, and a block has room for that.
cudaError_t read_grouped(int32_t rank, bool* is_grouped) {
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
  const int needed = rank == 16 ? kGroupedSharedBytes<16> : kGroupedSharedBytes<32>;
  *is_grouped = major == 9 && minor == 0 && shared_limit >= needed;
  return error;
}

}  // namespace

bool has_tiled_backward(ElementType core_type, int64_t output_rows, const TableShape& shape,
                        int shared_limit) {
  const size_t needed =
      padded_gradient_rank(shape) == 16 ? kBackwardSharedBytes<16> : kBackwardSharedBytes<32>;
  if (needed > static_cast<size_t>(shared_limit)) return false;
  if (core_type == ElementType::kFloat64 || shape.num_cores != 3) return false;
  if (output_rows >= kLoneLookup) return false;  // entries have 31 bits for them
  return *std::max_element(shape.p, shape.p + 3) <= kMaxTiledFactor && shape.q[0] <= kGradientQ &&
         shape.q[1] <= kGradientQ && shape.q[2] <= kGradientColumns &&
         shape.r[1] <= kMaxGradientRank && shape.r[2] <= kMaxGradientRank;
}

int32_t padded_gradient_rank(const TableShape& shape) {
  return std::max(shape.r[1], shape.r[2]) > 16 ? kMaxGradientRank : 16;
}

cudaError_t plan_tiled_backward(const BagBatch& batch, const StridedMatrix& grad_output,
                                BackwardPlan* plan) {
  TiledPlan& sort = plan->sort;
  sort = {};
  sort.core_type = plan->core_type;
  cudaError_t error = read_dependent_launch(&sort.dependent_launch);
  if (error != cudaSuccess) return error;
  error = read_attribute(cudaDevAttrMultiProcessorCount, &sort.multiprocessors);
  if (error != cudaSuccess) return error;
  plan->shape = find_shape(*plan, grad_output,
                           batch.pooling_mode == PoolingMode::kNone ? batch.nnz : batch.batch_size);
  // Core gradients are allocated anew, so this is no loss.
  bool aligned = true;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    for (float* const gradient : plan->targets[f].gradients) {
      aligned = aligned && is_aligned(gradient, 16);
    }
  }
  if (plan->shape == GradientShape::kExact && aligned && !plan->three_products &&
      plan->core_type == ElementType::kFloat32) {
    bool is_grouped = false;
    error = read_grouped(plan->rank, &is_grouped);
    if (error != cudaSuccess) return error;
    if (is_grouped) plan->shape = GradientShape::kGrouped;
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
        static_cast<uint4*>(plan.cleared.data),
        lookup == 0 ? plan.cleared.bytes / static_cast<int64_t>(sizeof(uint4)) : 0};
    cudaError_t error = cudaSuccess;
    if (plan.order.entries == nullptr) {
      error = launch_prepare<NoPacking>(launch, cleared);
      cleared.count = 0;
    } else {
      const ClearedVectors counters{reinterpret_cast<uint4*>(pieces.sort.control),
                                    kControlWords / 4};
      error = launch_kernel(tiled_backward_counters_kernel, 1, kPlanThreads, 0,
                            sort.dependent_launch, stream, counters);
    }
    const bool is_sorted = plan.order.entries != nullptr;
    if (error == cudaSuccess) error = launch_planning(launch, pieces.work, cleared, is_sorted);
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
