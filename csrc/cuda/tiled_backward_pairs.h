// Tables of four cores in the tiled backward pass (suffix_gradients.cuh): the host side.

#pragma once

#include "tiled_backward.h"

namespace flowtt::cuda {

// Elements of all pairs of the last two of a table's four cores, of which a launch may have so
// many; they and their gradients take 8 bytes each.
int64_t pair_elements(const TableShape& shape);
inline constexpr int64_t kMaxPairElements = int64_t{5} << 19;

// The memory that the pairs of a plan need. `plan`, here and below: as the caller sets it, of
// tables of four cores.
int64_t pair_bytes(const BackwardPlan& plan);

// Forms the pairs of all tables in `memory`, aligned to 256 bytes, and describes the plan's tables
// as tables of three cores in fp32: what the caller goes on with.
cudaError_t launch_pairs(const BackwardPlan& plan, void* memory, cudaStream_t stream,
                         BackwardPlan* paired);

// Adds the gradients of the pairs to those of the cores that they are of, after the plan of three
// cores has been launched.
cudaError_t launch_pair_gradients(const BackwardPlan& plan, void* memory, cudaStream_t stream);

}  // namespace flowtt::cuda
