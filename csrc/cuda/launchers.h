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

// Launch shape of a chain kernel over one feature group.
struct ChainPlan {
  int block_threads;
  int64_t grid_blocks;
  int64_t elements_per_block;  // accumulators of scratch a block needs
  int64_t row_elements;
  size_t shared_bytes;  // dynamic shared memory, 0 when the scratch is global
  size_t global_bytes;  // global scratch the caller provides, 0 when it is shared
};

// Chooses the launch shape for the current device; batch_size > 0. The three chain kernels share
// it. cudaErrorInvalidValue unless has_32_bit_levels for every table.
cudaError_t plan_chain(ElementType core_type, const FeatureGroup& group, int64_t batch_size,
                       ChainPlan* plan);

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

// One optimizer step on every touched slice of tasks[].values.
cudaError_t launch_optimizer_step(ElementType core_type, const CoreGroup& group,
                                  const OptimizerArguments& params, cudaStream_t stream);

}  // namespace flowtt::cuda
