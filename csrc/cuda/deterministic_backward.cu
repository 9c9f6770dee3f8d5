// Backward, with every sum in one order: core gradients that are equal, bit by bit, from run to
// run.
//
// Core after core, the lookups of a range are sorted by the slice that they read, and the gradients
// of the slices summed in that order (slice_gradients.cuh). Each core has a chain of its own: of
// P_1 ... P_d and U_d ... U_1 (chain_gradient.cuh) only what its gradient needs.

#include "deterministic_backward.h"

#include <algorithm>
#include <bit>

#include "chain_launch.cuh"
#include "slice_gradients.cuh"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

constexpr int64_t kMaxGridBlocks = int64_t{1} << 16;
// That add up the pieces of one slice.
constexpr unsigned kMaxBlocksOfSlice = 32;

// Lookups of a piece, at least: every piece may have to write and read a slice's sum.
constexpr int64_t kMinPiece = 16;

// Bound of the pieces' sums. Large slices have longer pieces, as long as the range if need be: one
// piece has nothing to carry.
constexpr int64_t kMaxSumBytes = int64_t{64} << 20;

// From sizes alone, so that sums are formed in one order on every device.
struct PieceSizes {
  int32_t length;
  int32_t count;
  int64_t elements;  // of a piece's sum
};

PieceSizes piece_sizes(const DeterministicPlan& plan, const FeatureGroup& group, int k,
                       int32_t lookups) {
  int64_t elements = 1;
  for (int f = 0; f < group.count; ++f) {
    const TTFeature& feature = group.features[f];
    if (k < feature.num_cores) {
      elements = std::max<int64_t>(elements, feature.levels[k].slice_numel);
    }
  }
  const int64_t bytes = elements * (plan.core_type == ElementType::kFloat64 ? 8 : 4);
  const int64_t most =
      std::clamp<int64_t>(kMaxSumBytes / bytes, 1, ceil_div(plan.lookups_per_range, kMinPiece));
  // The same in all ranges, of which the last may be shorter.
  const int64_t length = ceil_div(plan.lookups_per_range, most);
  return {static_cast<int32_t>(length), static_cast<int32_t>(ceil_div(lookups, length)), elements};
}

int max_cores(const FeatureGroup& group) {
  int cores = 0;
  for (int f = 0; f < group.count; ++f) cores = std::max(cores, group.features[f].num_cores);
  return cores;
}

// Of core k, that ids can reach.
int64_t slice_count(const TTFeature& feature, int k) {
  const auto ids = [&](int level) {
    return static_cast<int64_t>(feature.levels[level].row_ids.divisor);
  };
  return k == 0 ? ceil_div(feature.num_embeddings, ids(0)) : ids(k - 1) / ids(k);
}

SliceNumbers number_slices(const FeatureGroup& group, int k) {
  SliceNumbers numbers{};
  for (int f = 0; f < group.count; ++f) {
    const TTFeature& feature = group.features[f];
    if (k >= feature.num_cores) continue;
    const TTFeature* const same =
        std::find_if(group.features, group.features + f,
                     [&](const TTFeature& other) { return other.table == feature.table; });
    numbers.first[f] = same == &feature ? numbers.end : numbers.first[same - group.features];
    if (same == &feature) numbers.end += slice_count(feature, k);
  }
  return numbers;
}

struct Workspace {
  LookupOwner* owners;
  uint64_t* lookups;
  uint64_t* sorted;
  void* sort;
  void* sums;
};

Workspace place_workspace(const DeterministicPlan& plan, WorkspaceLayout* layout) {
  Workspace workspace{};
  workspace.owners = layout->take<LookupOwner>(plan.lookups_per_range);
  workspace.lookups = layout->take<uint64_t>(plan.lookups_per_range);
  workspace.sorted = layout->take<uint64_t>(plan.lookups_per_range);
  workspace.sort = layout->take<char>(static_cast<int64_t>(plan.sort_bytes));
  workspace.sums = plan.core_type == ElementType::kFloat64
                       ? static_cast<void*>(layout->take<double>(plan.sum_elements))
                       : layout->take<float>(plan.sum_elements);
  return workspace;
}

unsigned grid_of(int64_t items) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(items, kSliceThreads), 1, kMaxGridBlocks));
}

// What the launches of one group share.
struct Launch {
  const DeterministicPlan& plan;
  const FeatureGroup& group;
  const BagBatch& batch;
  const StridedMatrix& grad_output;
  void* global_scratch;
  Workspace workspace;
  cudaStream_t stream;
};

cudaError_t check_offsets(const Launch& launch) {
  const bool pools = launch.batch.pooling_mode != PoolingMode::kNone;
  const unsigned grid = grid_of(launch.group.count * (pools ? launch.batch.batch_size : 1));
  check_offsets_kernel<<<grid, kSliceThreads, 0, launch.stream>>>(launch.group, launch.batch);
  return cudaGetLastError();
}

cudaError_t find_owners(const Launch& launch, const LookupRange& range) {
  find_owners_kernel<<<grid_of(range.count), kSliceThreads, 0, launch.stream>>>(
      launch.group, launch.batch, range);
  return cudaGetLastError();
}

cudaError_t sort_by_slice(const Launch& launch, const SliceNumbers& numbers,
                          const LookupRange& range, int k) {
  number_slices_kernel<<<grid_of(range.count), kSliceThreads, 0, launch.stream>>>(
      launch.group, launch.batch, numbers, range, k, launch.workspace.lookups);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_stable_sort(launch.workspace.lookups, launch.workspace.sorted, range.count,
                            launch.plan.sorted_bits, launch.workspace.sort, launch.plan.sort_bytes,
                            launch.stream);
}

template <typename core_t>
cudaError_t sum_gradients(const Launch& launch, const SliceNumbers& numbers,
                          const LookupRange& range, int k) {
  const PieceSizes sizes = piece_sizes(launch.plan, launch.group, k, range.count);
  const SlicePieces pieces{launch.workspace.sorted, range.count,   sizes.length, sizes.count,
                           launch.workspace.sums,   sizes.elements};
  ChainPlan chain = launch.plan.chain;
  const bool is_shared = chain.global_bytes == 0;
  const int64_t most_blocks =
      is_shared ? kMaxGridBlocks : chain.blocks_per_feature * chain.features;
  chain.blocks_per_feature = std::min<int64_t>(sizes.count, most_blocks);
  chain.features = 1;
  const auto kernel = is_shared ? slice_gradients_kernel<core_t, ScratchPlace::kShared>
                                : slice_gradients_kernel<core_t, ScratchPlace::kGlobal>;
  const cudaError_t error =
      launch_chain_kernel(kernel, chain, launch.global_scratch, launch.stream, launch.group,
                          launch.batch, launch.grad_output, numbers, range, pieces, k);
  if (error != cudaSuccess || sizes.count == 1) return error;
  const dim3 grid(static_cast<unsigned>(sizes.count - 1),
                  std::min(grid_of(sizes.elements), kMaxBlocksOfSlice));
  const auto sum_kernel = carried_sums_kernel<accumulator_t<core_t>>;
  sum_kernel<<<grid, kSliceThreads, 0, launch.stream>>>(launch.group, numbers, range, pieces, k);
  return cudaGetLastError();
}

}  // namespace

cudaError_t plan_deterministic_backward(ElementType core_type, const FeatureGroup& group,
                                        const BagBatch& batch, const ChainPlan& chain,
                                        DeterministicPlan* plan) {
  plan->core_type = core_type;
  plan->chain = chain;
  const int64_t ranges = std::max<int64_t>(ceil_div(batch.nnz, kMaxLookupsPerRange), 1);
  plan->lookups_per_range = static_cast<int32_t>(ceil_div(batch.nnz, ranges));
  int64_t most_slices = 1;
  plan->sum_elements = 0;
  for (int k = 0; k < max_cores(group); ++k) {
    most_slices = std::max(most_slices, number_slices(group, k).end);
    const PieceSizes sizes = piece_sizes(*plan, group, k, plan->lookups_per_range);
    if (sizes.count > 1) {
      plan->sum_elements = std::max(plan->sum_elements, sizes.count * sizes.elements);
    }
  }
  const int slice_bits = std::bit_width(static_cast<uint64_t>(most_slices));
  if (slice_bits > 64 - kLookupBits) return cudaErrorInvalidValue;  // no memory has so many
  plan->sorted_bits = {kLookupBits, kLookupBits + slice_bits};
  plan->sort_bytes = 0;
  // Of all ranges but the last, and of that.
  for (const int64_t lookups :
       {int64_t{plan->lookups_per_range}, batch.nnz - (ranges - 1) * plan->lookups_per_range}) {
    size_t bytes = 0;
    const cudaError_t error =
        plan_stable_sort(static_cast<int32_t>(lookups), plan->sorted_bits, &bytes);
    if (error != cudaSuccess) return error;
    plan->sort_bytes = std::max(plan->sort_bytes, bytes);
  }
  WorkspaceLayout layout(nullptr);
  place_workspace(*plan, &layout);
  plan->workspace_bytes = static_cast<size_t>(layout.bytes());
  return cudaSuccess;
}

cudaError_t launch_deterministic_backward(const DeterministicPlan& plan, const FeatureGroup& group,
                                          const BagBatch& batch, const StridedMatrix& grad_output,
                                          void* global_scratch, void* workspace,
                                          cudaStream_t stream) {
  WorkspaceLayout layout(workspace);
  const Launch launch{
      plan, group, batch, grad_output, global_scratch, place_workspace(plan, &layout), stream};
  cudaError_t error = check_offsets(launch);
  for (int64_t first = 0; first < batch.nnz && error == cudaSuccess;
       first += plan.lookups_per_range) {
    const LookupRange range{
        first, static_cast<int32_t>(std::min<int64_t>(plan.lookups_per_range, batch.nnz - first)),
        launch.workspace.owners};
    error = find_owners(launch, range);
    for (int k = 0; k < max_cores(group) && error == cudaSuccess; ++k) {
      const SliceNumbers numbers = number_slices(group, k);
      error = sort_by_slice(launch, numbers, range, k);
      if (error != cudaSuccess) break;
      error = dispatch_core_type(plan.core_type, [&]<typename core_t>() {
        return sum_gradients<core_t>(launch, numbers, range, k);
      });
    }
  }
  return error;
}

}  // namespace flowtt::cuda
