// Host side of the tiled forward path: how a call is cut into ranges, and its workspace.

#include "tiled_forward.h"

#include <algorithm>

#include "device_attributes.h"
#include "tiled_packed_cores.h"
#include "tiled_sort.h"
#include "tiled_tilings.h"
#include "wide_tilings.h"
#include "workspace_layout.h"

namespace flowtt::cuda {
namespace {

// Bounds of the workspace, whatever the batch.
constexpr int64_t kMaxLookupsPerRange = int64_t{1} << 20;
constexpr int64_t kMaxBufferedLookupsPerRange = int64_t{3} << 18;  // they take more memory
constexpr int64_t kMaxSumsBytes = int64_t{8} << 20;
// Of the buffered rows: with one product, with one where lookups are folded, with three. Folding
// keeps a slot for so many lookups for rows that they share.
constexpr int64_t kRowBytesPerLookup = 32;
constexpr int64_t kFoldedRowBytesPerLookup = 56;
constexpr int64_t kExactRowBytesPerLookup = 45;
constexpr int64_t kLookupsPerSharedSlot = 14;
constexpr int64_t kMinRowBytes = int64_t{4} << 20;
constexpr int64_t kMaxRowBytes = int64_t{40} << 20;
constexpr int64_t kMaxDeterministicRowBytes = int64_t{40} << 20;

// More bins make more lookups meet, which counts for most where there are three products; fewer are
// found and written faster, where many lookups are neighbours anyway.
constexpr int64_t kManyFoldedLookups = int64_t{1} << 18;

int32_t most_bins(const TiledPlan& plan) {
  if (plan.folds && plan.lookups_per_range > kManyFoldedLookups) return kMaxTiledBins / 4;
  return plan.three_products || plan.tiling.kind != TilingKind::kTiled ? kMaxTiledBins
                                                                       : kMaxTiledBins / 2;
}

int64_t row_bytes(const TiledPlan& plan) {
  return int64_t{plan.buffered_row_elements} * (plan.three_products ? 4 : 2);
}

TiledWorkspace place_workspace(const TiledPlan& plan, const PooledOutput& output,
                               const LookupOrder& order, WorkspaceLayout* layout) {
  const int64_t buffered = plan.row_slots > 0 ? plan.lookups_per_range : 0;
  const int64_t pieces = buffered / kPoolPiece;
  TiledWorkspace workspace{};
  const PackedCores packed = plan.kept.high != nullptr
                                 ? plan.kept
                                 : take_packed_cores(plan.packed, plan.three_products, layout);
  workspace.packed_high = packed.high;
  workspace.packed_low = packed.low;
  workspace.exponents = packed.exponents;
  // What is only sorted with is dead before anything is written to rows or checkpoints.
  const int64_t chunks = max_chunks(plan, plan.lookups_per_range);
  const int64_t sort_bytes =
      chunks * (kBinSums + kMaxTiledBins) * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t rows_bytes = plan.row_slots * row_bytes(plan);
  const int64_t entries_bytes =
      plan.lookups_per_range * static_cast<int64_t>(sizeof(GroupedLookup));
  void* sorted_with = nullptr;
  if (plan.folds) {
    // Rows take the place of the entries that folding has read.
    workspace.rows =
        layout->take<char>(plan.saves_order ? rows_bytes : std::max(rows_bytes, entries_bytes));
    workspace.entries = static_cast<GroupedLookup*>(workspace.rows);
    sorted_with = layout->take<char>(std::max(entries_bytes, sort_bytes));
    workspace.folded_rows = static_cast<GroupedLookup*>(sorted_with);
    workspace.folded_factors = layout->take<float>(plan.has_factors ? plan.lookups_per_range : 0);
  } else {
    workspace.entries = layout->take<GroupedLookup>(plan.saves_order ? 0 : plan.lookups_per_range);
    workspace.rows = layout->take<char>(buffered > 0 ? std::max(rows_bytes, sort_bytes) : 0);
    sorted_with = workspace.rows;
  }
  workspace.row_slots = static_cast<uint32_t>(plan.row_slots);
  workspace.single_slots = plan.single_slots;
  const bool has_own_factors = plan.has_factors && !plan.saves_order;
  workspace.factors = layout->take<float>(has_own_factors ? plan.lookups_per_range : 0);
  if (plan.saves_order) {
    workspace.entries = order.entries;
    workspace.factors = order.factors;
    workspace.order_counters = order.counters;
  }
  workspace.sums =
      layout->take<float>(plan.has_sums ? plan.samples_per_range * output.row_stride : 0);
  // One after the other: they are cleared together.
  workspace.control = layout->take<uint32_t>(kControlWords);
  workspace.piece_bags = layout->take<uint2>(pieces);
  workspace.piece_arrivals = layout->take<uint32_t>(pieces);
  workspace.checkpoints =
      layout->take<char>(std::max(kCheckpointBytes, buffered > 0 ? 0 : sort_bytes));
  if (buffered == 0) sorted_with = workspace.checkpoints;
  workspace.scratch = layout->take<char>((plan.disabled & kFusionDisabled) != 0
                                             ? kScratchBytesPerMultiprocessor * plan.multiprocessors
                                             : 0);
  workspace.row_of_lookup = layout->take<uint2>(buffered);
  workspace.piece_sums = layout->take<float>(pieces * plan.buffered_row_elements);
  workspace.bin_sums = static_cast<uint32_t*>(sorted_with);
  workspace.bin_starts = workspace.bin_sums + chunks * kBinSums;
  workspace.rows_per_block = plan.rows_per_block;
  workspace.buffered_row_elements = plan.buffered_row_elements;
  return workspace;
}

// Whether rows are buffered, how many, and how many lookups at a time.
void plan_rows(const BagBatch& batch, TiledPlan* plan) {
  int32_t widest = 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    widest = std::max(widest, plan->group.features[f].embedding_dim);
  }
  plan->buffered_row_elements = static_cast<int32_t>(round_up(widest, 8));
  plan->rows_per_block = 0;
  plan->row_slots = 0;
  plan->buffered_sharers = 1;
  const int64_t bags = batch.num_features * batch.batch_size;
  // Without pooling every lookup is a bag of one, whose row is stored.
  const bool pools = batch.pooling_mode != PoolingMode::kNone;
  const bool buffers =
      pools && batch.nnz > 0 && (plan->deterministic || batch.nnz > bags + bags / 4);
  int64_t most = buffers ? kMaxBufferedLookupsPerRange : kMaxLookupsPerRange;
  if (plan->deterministic) {
    most = std::min(most, std::max<int64_t>(kMaxDeterministicRowBytes / row_bytes(*plan), 1));
  }
  const int64_t ranges = std::max<int64_t>(ceil_div(batch.nnz, most), 1);
  plan->lookups_per_range = ceil_div(batch.nnz, ranges);
  plan->folds = buffers && plan->tiling.kind == TilingKind::kTiled;
  plan->single_slots = kAnySlots;
  if (buffers) {
    const int64_t bytes_per_lookup = plan->three_products ? kExactRowBytesPerLookup
                                     : plan->folds        ? kFoldedRowBytesPerLookup
                                                          : kRowBytesPerLookup;
    const int64_t bytes =
        std::clamp(plan->lookups_per_range * bytes_per_lookup, kMinRowBytes, kMaxRowBytes);
    plan->row_slots = plan->lookups_per_range;
    if (!plan->deterministic && bytes / row_bytes(*plan) < plan->row_slots) {
      plan->row_slots = std::max<int64_t>(bytes / row_bytes(*plan), 1);
      if (plan->folds) {
        const int64_t shared = ceil_div(plan->lookups_per_range, kLookupsPerSharedSlot);
        plan->single_slots = static_cast<uint32_t>(std::max<int64_t>(plan->row_slots - shared, 0));
      } else {
        plan->rows_per_block =
            static_cast<int32_t>(ceil_div(plan->row_slots, plan->multiprocessors));
        plan->row_slots = int64_t{plan->rows_per_block} * plan->multiprocessors;
        // Of fp32 rows there is room for few, so only those that lookups share are worth it.
        plan->buffered_sharers = plan->three_products ? 2 : 1;
      }
    }
  }
  // Slots that are dealt out to blocks may not be enough for one of them, however many there are.
  plan->adds_to_sums = pools && (!buffers || plan->rows_per_block > 0 ||
                                 plan->row_slots < plan->lookups_per_range || ranges > 1);
}

void plan_packing(TiledPlan* plan) {
  plan->packed = {};
  plan->group.pack_blocks = 0;
  plan->bins = 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    TiledFeature& feature = plan->group.features[f];
    feature.first_pack_block = plan->group.pack_blocks;
    set_packed_slices(plan->tiling, &feature);
    plan->bins = std::max(plan->bins, set_sort_order(most_bins(*plan), &feature));
    if (plan->kept.high != nullptr) continue;  // the caller has placed and packed its cores
    // A feature that shares its predecessor's cores has no packing pieces: the search for a piece's
    // feature takes the last one that starts there.
    if (f > 0 && plan->group.features[f - 1].table == feature.table) {
      const TiledFeature& owner = plan->group.features[f - 1];
      std::copy(owner.packed, owner.packed + kMaxCores, feature.packed);
      std::copy(owner.exponents, owner.exponents + kMaxCores, feature.exponents);
      continue;
    }
    place_packed_cores(&feature, &plan->packed);
    plan->group.pack_blocks += static_cast<int32_t>(packing_pieces(plan->tiling, feature));
  }
}

// Whether a backward pass sees the digits of the ids as the sort does.
bool sorts_as_backward(const TiledPlan& plan) {
  if (plan.tiling.kind == TilingKind::kTwoCore) return false;
  return std::none_of(plan.group.features, plan.group.features + plan.group.count,
                      has_suffix_pairs);
}

}  // namespace

cudaError_t plan_tiled_forward(const BagBatch& batch, const PooledOutput& output, TiledPlan* plan) {
  cudaError_t error = read_dependent_launch(&plan->dependent_launch);
  if (error != cudaSuccess) return error;
  error = read_attribute(cudaDevAttrMultiProcessorCount, &plan->multiprocessors);
  if (error != cudaSuccess) return error;
  plan_rows(batch, plan);
  plan->has_factors = has_factors(batch);
  plan->has_sums = plan->adds_to_sums && output.type != ElementType::kFloat32;
  plan->samples_per_range = batch.batch_size;
  if (plan->has_sums) {
    const int64_t sums_bytes = output.row_stride * static_cast<int64_t>(sizeof(float));
    plan->samples_per_range = std::clamp<int64_t>(kMaxSumsBytes / sums_bytes, 1, batch.batch_size);
  }

  // Whole vectors need rows that are aligned to them.
  bool aligned = output.row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(output.data) % 16 == 0;
  for (int32_t f = 0; f < plan->group.count; ++f) {
    aligned = aligned && plan->group.features[f].output_column % 4 == 0;
  }
  plan->tiling.exact = plan->tiling.exact && aligned;

  plan_packing(plan);
  plan->chunk_shift = choose_chunk_shift(plan->lookups_per_range, plan->multiprocessors);
  plan->saves_order = plan->wants_order && sorts_as_backward(*plan) &&
                      (plan->disabled & kGroupingDisabled) == 0 && batch.nnz > 0 &&
                      plan->lookups_per_range == batch.nnz &&
                      plan->samples_per_range == batch.batch_size;
  WorkspaceLayout layout(nullptr);
  place_workspace(*plan, output, {}, &layout);
  plan->workspace_bytes = static_cast<size_t>(layout.bytes());
  return cudaSuccess;
}

cudaError_t launch_tiled_forward(const TiledPlan& plan, const BagBatch& batch,
                                 const PooledOutput& output, const LookupOrder& order,
                                 void* workspace, cudaStream_t stream) {
  WorkspaceLayout layout(workspace);
  const TiledWorkspace pieces = place_workspace(plan, output, order, &layout);
  TiledRange range{};
  range.disabled = plan.disabled;
  range.buffered_sharers = plan.buffered_sharers;
  range.chunk_shift = plan.chunk_shift;
  range.bins = plan.bins;
  set_bag_length(batch, &range);
  bool packs_cores = plan.kept.high == nullptr;
  for (int64_t sample = 0; sample < batch.batch_size; sample += plan.samples_per_range) {
    range.first_sample = sample;
    range.end_sample = std::min(batch.batch_size, sample + plan.samples_per_range);
    int64_t lookup = 0;
    do {
      range.first_lookup = lookup;
      range.end_lookup = std::min(batch.nnz, lookup + plan.lookups_per_range);
      const bool ends_sums = range.end_lookup == batch.nnz;
      const TiledLaunch launch{
          plan,      batch, range, pieces, output, packs_cores, plan.adds_to_sums && lookup == 0,
          ends_sums, stream};
      cudaError_t error = launch_tiling(launch);
      if (error != cudaSuccess) return error;
      if (plan.row_slots > 0 || (plan.has_sums && ends_sums)) {
        error = launch_tiled_pool(launch);
        if (error != cudaSuccess) return error;
      }
      packs_cores = false;
      lookup = range.end_lookup;
    } while (lookup < batch.nnz);
  }
  return cudaSuccess;
}

}  // namespace flowtt::cuda
