// Host interface of the tiled forward path, free of torch: which tables it takes, how a call is cut
// into launches, how much device memory it needs. Like launchers.h, nothing here synchronises.

#pragma once

#include <cuda_runtime_api.h>

#include "tiled_params.h"

namespace flowtt::cuda {

// The kernel a table takes: its ranks and q3, padded. Features of one call with equal tilings share
// their launches.
struct Tiling {
  int32_t rank1;
  int32_t rank2;
  int32_t q3;
  bool exact;  // q = (4, 4, q3): rows are whole vectors
  bool operator==(const Tiling&) const = default;
};

// False where the general kernel has to do it. From the sizes alone.
bool find_tiling(ElementType core_type, int64_t batch_size, const TableShape& shape,
                 Tiling* tiling);

// Whether a call of this many lookups is worth two launches and the packing of the cores.
bool tiling_pays(int64_t nnz);

struct TiledPlan {
  Tiling tiling;
  bool three_products;
  ElementType core_type;
  TiledGroup group;
  int32_t chunk_lookups;
  int64_t lookups_per_range;
  int64_t samples_per_range;
  int64_t packed_halves;
  int64_t num_exponents;
  bool has_factors;
  bool has_sums;
  size_t workspace_bytes;
};

// Completes a plan whose tiling, three_products, core_type and group.{count, features} (but for
// where their packed copies lie) are set. Features of one table must be neighbours.
cudaError_t plan_tiled_forward(const BagBatch& batch, const PooledOutput& output, TiledPlan* plan);

// `workspace`: plan.workspace_bytes, aligned to 256 bytes, in any state.
cudaError_t launch_tiled_forward(const TiledPlan& plan, const BagBatch& batch,
                                 const PooledOutput& output, void* workspace, cudaStream_t stream);

}  // namespace flowtt::cuda
