// Host interface of the CUDA kernels: free of torch, on raw device pointers and a stream.
//
// Every function works on the current device, launches asynchronously on `stream`, allocates
// nothing, may be captured in a CUDA graph, and returns the first CUDA error it meets.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernel_params.h"

namespace flowtt::cuda {

// The kernels index core slices and the levels of a chain with 32 bits, everything else with 64.
inline constexpr int64_t kMaxLevelElements = int64_t{1} << 30;
bool has_32_bit_levels(const TableShape& shape);

// Fills in what a feature's shape says; feature->cores is set. has_32_bit_levels(shape).
void describe_chain(ElementType core_type, const TableShape& shape, TTFeature* feature);

// Launch shape of a chain kernel over one feature group.
struct ChainPlan {
  int block_threads;
  bool is_small_batch;  // tiles of one column
  int features;         // that the blocks are divided over
  int64_t blocks_per_feature;
  int64_t elements_per_block;  // accumulators of scratch a block needs
  int64_t row_elements;        // of a row, rounded up to whole vectors
  size_t shared_bytes;         // dynamic shared memory, 0 when the scratch is global
  size_t global_bytes;         // global scratch the caller provides, 0 when it is shared
};

// The forward kernel forms rows; the gradient kernels take them apart.
enum class ChainKernel { kRows, kGradients };

// Chooses the launch shape for the current device, and the tiles of the group's products. There
// must be bags, without pooling lookups.
cudaError_t plan_chain(ElementType core_type, ChainKernel kernel, const BagBatch& batch,
                       FeatureGroup* group, ChainPlan* plan);

// Writes every element of `output` that belongs to the group's features.
cudaError_t launch_tt_embedding_bag(ElementType core_type, const FeatureGroup& group,
                                    const BagBatch& batch, const PooledOutput& output,
                                    const ChainPlan& plan, void* global_scratch,
                                    cudaStream_t stream);

// Adds to features[].core_gradients (zeroed by the caller) and sets features[].touched.
cudaError_t launch_tt_embedding_bag_backward(ElementType core_type, const FeatureGroup& group,
                                             const BagBatch& batch,
                                             const StridedMatrix& grad_output,
                                             const ChainPlan& plan, void* global_scratch,
                                             cudaStream_t stream);

// Writes weights_grad[position], in the accumulator type, for every lookup of the group's features.
cudaError_t launch_tt_embedding_bag_weights_grad(ElementType core_type, const FeatureGroup& group,
                                                 const BagBatch& batch,
                                                 const StridedMatrix& grad_output,
                                                 void* weights_grad, const ChainPlan& plan,
                                                 void* global_scratch, cudaStream_t stream);

// tasks[].values = tasks[].gradient in the core's type.
cudaError_t launch_cast_core_gradients(ElementType core_type, const CoreGroup& group,
                                       cudaStream_t stream);

// *steps becomes one more.
cudaError_t launch_count_step(int64_t* steps, cudaStream_t stream);

// One optimizer step, number *params.iteration, on every touched slice of tasks[].values.
cudaError_t launch_optimizer_step(ElementType core_type, const CoreGroup& group,
                                  const OptimizerArguments& params, cudaStream_t stream);

}  // namespace flowtt::cuda
