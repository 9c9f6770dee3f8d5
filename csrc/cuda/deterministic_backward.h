// Host interface of the backward pass whose sums have one order; as launchers.h says.

#pragma once

#include "launchers.h"
#include "stable_sort.h"

namespace flowtt::cuda {

struct DeterministicPlan {
  ElementType core_type;
  ChainPlan chain;
  int32_t lookups_per_range;
  KeyBits sorted_bits;
  size_t sort_bytes;
  int64_t sum_elements;  // of all pieces
  size_t workspace_bytes;
};

// The features of a group are neighbours in the call, in its order. `chain`: of the group, for
// ChainKernel::kGradients.
cudaError_t plan_deterministic_backward(ElementType core_type, const FeatureGroup& group,
                                        const BagBatch& batch, const ChainPlan& chain,
                                        DeterministicPlan* plan);

// As launch_tt_embedding_bag_backward. `workspace`: plan.workspace_bytes, aligned to 256 bytes, in
// any state.
cudaError_t launch_deterministic_backward(const DeterministicPlan& plan, const FeatureGroup& group,
                                          const BagBatch& batch, const StridedMatrix& grad_output,
                                          void* global_scratch, void* workspace,
                                          cudaStream_t stream);

}  // namespace flowtt::cuda
