// Host interface of the tiled backward path, free of torch: gradients of the cores of tables that
// the tiled forward kernels take, with three cores. Like launchers.h, nothing here synchronises.

#pragma once

#include "tiled_forward.h"

namespace flowtt::cuda {

// Where the gradients of a feature's cores are added up. Shapes are those of the cores.
struct GradientTargets {
  float* gradients[3];
  uint8_t* touched[3];  // a byte for each slice; null when nobody asks
};

// What the kernels may rely on. But for kAny, rows of grad_output are fp32, and elements of a pair
// of columns are neighbours and aligned to both, in it, in the cores and in the targets.
enum class GradientShape {
  kExact,  // q = (4, 4, rank / 4), ranks as padded; vectors of four columns are neighbours, aligned
  // As kExact with cores of fp32 and one product, on a device of compute capability 9.0,
  // whose warps multiply in groups of four.
  kGrouped,
  kEven,  // q3 and both ranks are even
  kAny,
};

// A multiple of 16 bytes, aligned to them.
struct ClearedMemory {
  void* data;
  int64_t bytes;
};

struct BackwardPlan {
  // Set by the caller: as for the forward pass, of tables of one core type.
  ElementType core_type;
  bool three_products;  // as in TiledPlan
  int32_t rank;         // padded_gradient_rank of all tables
  TiledGroup group;
  GradientTargets targets[kTiledFeaturesPerLaunch];
  ClearedMemory cleared;  // before anything is added
  LookupOrder order;      // that the forward pass has kept, of the same features in their order
  // Set by plan_tiled_backward.
  TiledPlan sort;
  GradientShape shape;
  size_t workspace_bytes;
};

// Whether the kernels take a table, on a device whose blocks may have so much shared memory.
bool has_tiled_backward(ElementType core_type, int64_t output_rows, const TableShape& shape,
                        int shared_limit);

// Both ranks of a table that the kernels take, padded to 16 or 32.
int32_t padded_gradient_rank(const TableShape& shape);

// Completes a plan, for the current device.
cudaError_t plan_tiled_backward(const BagBatch& batch, const StridedMatrix& grad_output,
                                BackwardPlan* plan);

// Adds to the targets. `workspace`: plan.workspace_bytes, aligned to 256 bytes, in any state.
cudaError_t launch_tiled_backward(const BackwardPlan& plan, const BagBatch& batch,
                                  const StridedMatrix& grad_output, void* workspace,
                                  cudaStream_t stream);

}  // namespace flowtt::cuda
