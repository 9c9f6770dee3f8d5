// Host side of the tiled backward path: lookups are sorted, then worked on.

#include "tiled_backward.h"

#include <algorithm>
#include <type_traits>

#include "device_attributes.h"
#include "tiled_backward_launch.cuh"
#include "tiled_backward_pairs.h"
#include "tiled_backward_planning.cuh"
#include "tiled_prepare_launch.cuh"
#include "tiled_sort.h"
#include "tiled_tilings.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

constexpr int kGradientRank = 32;
// Sizes of slices are counted in 32 bits.
constexpr int64_t kMaxSliceElements = int64_t{1} << 30;
constexpr int64_t kMaxSize = int64_t{1} << 14;  // of ranks and q
constexpr int64_t kMaxLookupsPerRange = int64_t{1} << 20;
// Lookups that are worth a block, and so many that most slices of core 2 end within the reach of
// their block.
constexpr int64_t kMinGranule = 16;
constexpr int64_t kMaxGranule = kPlanThreads * 5 / 8;

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
    workspace.sort.entries = layout->take<GroupedLookup>(lookups);
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
  workspace.work.tile_counts = workspace.sort.control;
  workspace.work.taken_tiles = workspace.sort.control + kControlWords / 2;  // in another line
  return workspace;
}

// cleared: what is to be zeros after it; is_sorted: as the kernel takes it.
cudaError_t launch_planning(const TiledLaunch& launch, const BackwardWork& work,
                            const ClearedVectors& cleared, bool is_sorted) {
  // Large granules are cut into fewer tiles that are not full; small calls are better spread. No
  // granule has lookups of two features.
  const int64_t others = launch.plan.group.count - 1;
  const int64_t granules = std::max<int64_t>(launch.plan.multiprocessors - others, 1);
  const int32_t most = static_cast<int32_t>(
      std::clamp<int64_t>(ceil_div(launch.lookups(), granules), kMinGranule, kMaxGranule));
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
    if (is_grouped(plan.shape)) {
      return launch_grouped_gradients(plan, launch, pass);
    }
  }
  if (plan.shape == GradientShape::kExactBlocks) {
    return launch_gradients<core_t, 32, kThreeProducts, GradientShape::kExactBlocks>(plan, launch,
                                                                                     pass);
  }
  if (plan.shape == kExact) {
    return plan.tables.rank == 16
               ? launch_gradients<core_t, 16, kThreeProducts, kExact>(plan, launch, pass)
               : launch_gradients<core_t, 32, kThreeProducts, kExact>(plan, launch, pass);
  }
  if (plan.shape == GradientShape::kTwoCoresEven) {
    return launch_gradients<core_t, 32, kThreeProducts, GradientShape::kTwoCoresEven>(plan, launch,
                                                                                      pass);
  }
  if (plan.shape == GradientShape::kTwoCoresAny) {
    return launch_gradients<core_t, 32, kThreeProducts, GradientShape::kTwoCoresAny>(plan, launch,
                                                                                     pass);
  }
  if (plan.tables.rank == 16) {
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
  bool blocks = exact && plan.tables.rank == kGradientRank;
  for (int32_t f = 0; f < plan.group.count; ++f) {
    const TiledFeature& feature = plan.group.features[f];
    blocks = blocks && feature.q[0] % kGradientQ == 0 && feature.q[1] == kGradientQ &&
             feature.q[2] == kGradientColumns && feature.r[0] % kGradientRank == 0 &&
             feature.r[1] % kGradientRank == 0 && feature.output_column % 4 == 0;
    exact = exact && feature.q[0] == kGradientQ && feature.q[1] == kGradientQ &&
            feature.q[2] == plan.tables.rank / kGradientQ && feature.r[0] == plan.tables.rank &&
            feature.r[1] == plan.tables.rank && feature.output_column % 4 == 0;
    even = even && feature.q[2] % 2 == 0 && feature.r[1] % 2 == 0 &&
           (feature.r[0] % 2 == 0 || feature.cores[1] == nullptr) && feature.output_column % 2 == 0;
    for (int k = 0; k < 3; ++k) {
      const bool aligned =
          is_aligned(feature.cores[k], 16) && is_aligned(plan.targets[f].gradients[k], 16);
      exact = exact && aligned;
      blocks = blocks && aligned && feature.cores[k] != nullptr;
      even = even && is_aligned(feature.cores[k], 8) && is_aligned(plan.targets[f].gradients[k], 8);
    }
  }
  if (plan.tables.cores == 2) {
    return even ? GradientShape::kTwoCoresEven : GradientShape::kTwoCoresAny;
  }
  if (!even) return GradientShape::kAny;
  return exact    ? GradientShape::kExact
         : blocks ? GradientShape::kExactBlocks
                  : GradientShape::kEven;
}

// Whether the warps of the current device multiply in groups, and a block has room for that.
cudaError_t read_grouped(bool* is_grouped) {
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
  *is_grouped = major == 9 && minor == 0 && shared_limit >= kGroupedSharedBytes;
  return error;
}

}  // namespace

bool has_tiled_backward(ElementType core_type, int64_t output_rows, const TableShape& shape,
                        int shared_limit) {
  const size_t needed = gradient_class(shape).rank == 16 ? kBackwardSharedBytes<16>
                                                         : kBackwardSharedBytes<kGradientRank>;
  if (needed > static_cast<size_t>(shared_limit)) return false;
  if (core_type == ElementType::kFloat64 || shape.num_cores < 2) return false;
  if (shape.num_cores == 4 && !has_few_pairs(shape)) return false;
  if (output_rows >= kLoneLookup) return false;  // entries have 31 bits for them
  for (int k = 0; k < shape.num_cores; ++k) {
    if (shape.p[k] > kMaxTiledFactor || shape.q[k] > kMaxSize || shape.r[k] > kMaxSize ||
        shape.slice_numel(k) > kMaxSliceElements) {
      return false;
    }
  }
  return true;
}

GradientClass gradient_class(const TableShape& shape) {
  TiledFeature feature{};
  feature.num_cores = static_cast<int16_t>(shape.num_cores);
  for (int k = 0; k < shape.num_cores; ++k) {
    feature.q[k] = static_cast<int16_t>(shape.q[k]);
    if (k > 0) feature.r[k - 1] = static_cast<int16_t>(shape.r[k]);
  }
  GradientTargets targets{};
  set_three_gradient_cores(&feature, &targets);
  GradientClass tables{};
  tables.cores = shape.num_cores;
  if (tables.cores == 4) set_three_cores(&feature);
  // Two cores have kernels of one rank.
  tables.rank = tables.cores == 2 || std::max(feature.r[0], feature.r[1]) > 16 ? kGradientRank : 16;
  tables.blocks = static_cast<int32_t>(GradientBlocks(feature.q, feature.r, tables.rank).all());
  return tables;
}

void set_three_gradient_cores(TiledFeature* feature, GradientTargets* targets) {
  if (feature->num_cores != 2) return;
  // Rows of core 1 are those of P: as many of them as fill a tile belong to one j1.
  int16_t q2 = kGradientQ;
  while (feature->q[0] % q2 != 0) --q2;
  feature->cores[2] = feature->cores[1];
  feature->p[2] = feature->p[1];
  feature->q[2] = feature->q[1];
  feature->r[1] = feature->r[0];
  targets->gradients[2] = targets->gradients[1];
  targets->touched[2] = targets->touched[1];
  feature->cores[1] = nullptr;
  feature->p[1] = 1;
  feature->q[1] = q2;
  feature->q[0] = static_cast<int16_t>(feature->q[0] / q2);
  feature->r[0] = 1;
  targets->gradients[1] = nullptr;
  targets->touched[1] = nullptr;
  feature->num_cores = 3;
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
  const bool has_blocks = plan->shape == GradientShape::kExactBlocks;
  if ((plan->shape == GradientShape::kExact || has_blocks) && plan->tables.rank == kGradientRank &&
      !plan->three_products && plan->core_type == ElementType::kFloat32) {
    bool is_grouped = false;
    error = read_grouped(&is_grouped);
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
