// Host interface of the tiled forward path, free of torch: which tables it takes, how a call is cut
// into launches, how much device memory it needs. Like launchers.h, nothing here synchronises.

#pragma once

#include <cuda_runtime_api.h>

#include <compare>

#include "tiled_params.h"

namespace flowtt::cuda {

enum class TilingKind : int32_t {
  kTiled,    // three cores, tiled_contract.cuh
  kWide,     // three or four cores, wide_contract.cuh
  kTwoCore,  // two_core_contract.cuh
};

// The lookups of a call in the order that they were sorted into, which a backward pass can use
// again. In memory of the caller's.
struct LookupOrder {
  uint32_t* counters;      // [kOrderCounters], zeros between two calls
  GroupedLookup* entries;  // as in TiledWorkspace, one for each lookup; null: there is none
  float* factors;          // as in TiledWorkspace
};

// The kernel a table takes: its ranks and q3, padded. Features of one call with equal tilings share
// their launches.
struct Tiling {
  TilingKind kind;
  int32_t rank1;
  int32_t rank2;
  int32_t q3;
  bool exact;  // q = (4, 4, q3): rows are whole vectors
  auto operator<=>(const Tiling&) const = default;
};

// Packed cores of tables, as in TiledWorkspace.
struct PackedCores {
  __half* high;
  __half* low;
  int32_t* exponents;
};

// How much that is.
struct PackedSizes {
  int64_t halves;  // of `high`, and of `low` if there is one
  int64_t exponents;
};

// False where the general kernel has to do it. From the sizes alone.
bool find_tiling(ElementType core_type, int64_t output_rows, const TableShape& shape,
                 Tiling* tiling);

// Whether a table that is looked up this many times on average is worth the launches and the
// packing of its cores. `features`: of the call, which share the launches.
bool tiling_pays(int64_t lookups, int64_t features, const TableShape& shape);

struct TiledPlan {
  // Set by the caller. Of the features: cores, num_embeddings, output_column, p, q, r, num_cores,
  // embedding_dim, feature, table; packed and exponents too where `kept` is set. Features of one
  // table must be neighbours.
  Tiling tiling;
  ElementType core_type;
  bool three_products;
  bool deterministic;  // every sum in the same order in every run
  uint32_t disabled;   // mechanisms, see tiled_params.h
  bool wants_order;    // of the lookups, see saves_order
  PackedCores kept;    // packed before, of all features; null: the call packs its cores
  TiledGroup group;
  // Set by plan_tiled_forward.
  int64_t lookups_per_range;
  int64_t samples_per_range;
  int32_t chunk_shift;            // as in TiledRange
  int32_t bins;                   // as in TiledRange
  PackedSizes packed;             // in the workspace
  int64_t row_slots;              // 0: rows of bags are added to their sums
  bool folds;                     // equal ids are folded before the contraction
  uint32_t single_slots;          // as in TiledWorkspace
  int32_t rows_per_block;         // as in TiledWorkspace
  int32_t buffered_row_elements;  // as in TiledWorkspace
  int32_t buffered_sharers;       // as in TiledRange
  int32_t multiprocessors;
  bool dependent_launch;  // the device has programmatic dependent launch
  bool has_factors;
  bool adds_to_sums;  // sums are not written once, by the pooling kernel
  bool has_sums;      // in the workspace
  bool saves_order;   // launch_tiled_forward writes it down: the call is sorted, and at once
  size_t workspace_bytes;
};

// Completes a plan, for the current device.
cudaError_t plan_tiled_forward(const BagBatch& batch, const PooledOutput& output, TiledPlan* plan);

// `workspace`: plan.workspace_bytes, aligned to 256 bytes, in any state. `order`: where it is kept.
cudaError_t launch_tiled_forward(const TiledPlan& plan, const BagBatch& batch,
                                 const PooledOutput& output, const LookupOrder& order,
                                 void* workspace, cudaStream_t stream);

}  // namespace flowtt::cuda
