// The four operations on the CPU, on raw pointers, torch-free.
//
// All check the values of indices and offsets before anything is written. They throw
// std::out_of_range for an index out of range and std::invalid_argument for bad offsets.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/parallel.h"
#include "tt_shape.h"

namespace flowtt {

struct EmbeddingBagCall {
  const std::vector<TableShape>& tables;
  const std::vector<int64_t>& first_core;  // of each table, in `cores`
  const std::vector<FeatureColumns>& features;
  ElementType core_type;
  const std::vector<void*>& cores;
  const BagBatch& bags;
  ParallelRunner threads;
};

// output: [batch_size, total_columns], without pooling [nnz, total_columns]; row-major, fully
// written (zeros for empty bags).
void embedding_bag_forward(const EmbeddingBagCall& call, void* output, ElementType output_type,
                           int64_t total_columns);

// core_grads: zero-filled, one per core, in the cores' type; gradients are written to the slices
// that were looked up.
void embedding_bag_backward(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                            const std::vector<void*>& core_grads);

// weights_grad: [nnz] in the accumulation type.
void embedding_bag_weights_grad(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                void* weights_grad);

// One optimizer step on the gradient summed over the whole call, in place, on exactly the core
// slices that were looked up.
void embedding_bag_backward_update(const EmbeddingBagCall& call, const StridedMatrix& grad_output,
                                   const OptimizerArguments& optimizer,
                                   const std::vector<void*>& momentum1,
                                   const std::vector<void*>& momentum2);

}  // namespace flowtt
