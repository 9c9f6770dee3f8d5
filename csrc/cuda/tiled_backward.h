// Host interface of the tiled backward path, free of torch: gradients of the cores of tables with
// two to four cores. Like launchers.h, nothing here synchronises.

#pragma once

#include <compare>

#include "tiled_forward.h"

namespace flowtt::cuda {

// Where the gradients of a feature's cores are added up. Shapes are those of the cores. Kernels see
// three cores.
struct GradientTargets {
  float* gradients[kMaxCores];
  uint8_t* touched[kMaxCores];  // a byte for each slice; null when nobody asks
};

// What the kernels may rely on. But for kAny and kTwoCoresAny, rows of grad_output are fp32, and
// elements of a pair of columns are neighbours and aligned to both, in it, in the cores and in the
// targets.
enum class GradientShape {
  kExact,  // q = (4, 4, rank / 4), ranks as padded; vectors of four columns are neighbours, aligned
  // As kExact with cores of fp32 and one product, on a device of compute capability 9.0, whose
  // warps multiply in groups of four.
  kGrouped,
  // Tables of such blocks (tiled_backward_block.cuh): q = (4 n, 4, 8), ranks multiples of 32.
  kExactBlocks,
  kGroupedBlocks,
  kEven,  // q3 and both ranks are even
  kAny,
  kTwoCoresEven,  // as kEven and kAny, of tables of two cores (tiled_backward_two_cores.cuh)
  kTwoCoresAny,
};

// What is done once a call, before anything is added.
struct BackwardStart {
  void* cleared;          // memory that becomes zeros
  int64_t cleared_bytes;  // a multiple of 16, as its address is
  int64_t* steps;         // of an optimizer, on the device: becomes one more; or null
};

// Tables of one class share launches.
struct GradientClass {
  int32_t cores;
  int32_t rank;    // columns of a block: 16 if both ranks are at most 16, otherwise 32
  int64_t blocks;  // see tiled_backward_block.cuh
  auto operator<=>(const GradientClass&) const = default;
};

struct BackwardPlan {
  // Set by the caller: as for the forward pass, of tables of one core type and class. Those of two
  // cores as set_three_gradient_cores describes them, of four as launch_pairs does.
  ElementType core_type;
  bool three_products;   // as in TiledPlan
  GradientClass tables;  // of all of them
  TiledGroup group;
  GradientTargets targets[kTiledFeaturesPerLaunch];
  BackwardStart start;
  LookupOrder order;  // that the forward pass has kept, of the same features in their order
  // Set by plan_tiled_backward.
  TiledPlan sort;
  GradientShape shape;
  size_t workspace_bytes;
};

// Whether the kernels take a table, on a device whose blocks may have so much shared memory.
bool has_tiled_backward(ElementType core_type, int64_t output_rows, const TableShape& shape,
                        int shared_limit);

// Of a table that the kernels take.
GradientClass gradient_class(const TableShape& shape);

// Describes a feature of two cores as one of three, of which the second has one slice, a unit
// matrix, which is nowhere. Others stay as they are.
void set_three_gradient_cores(TiledFeature* feature, GradientTargets* targets);

// Completes a plan, for the current device.
cudaError_t plan_tiled_backward(const BagBatch& batch, const StridedMatrix& grad_output,
                                BackwardPlan* plan);

// Adds to the targets. `workspace`: plan.workspace_bytes, aligned to 256 bytes, in any state.
cudaError_t launch_tiled_backward(const BackwardPlan& plan, const BagBatch& batch,
                                  const StridedMatrix& grad_output, void* workspace,
                                  cudaStream_t stream);

}  // namespace flowtt::cuda
