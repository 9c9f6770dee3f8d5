// Parses and checks the arguments of the flowtt operators, for every device.
//
// Nothing here reads tensor data: the values of indices and offsets are checked by the kernels
// (CUDA must not synchronise). Errors are std::invalid_argument, ValueError in Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stable_torch.h"
#include "tt_shape.h"

namespace flowtt {

// The arguments every operator has.
struct EmbeddingBagArguments {
  std::vector<TableShape> tables;
  std::vector<int64_t> first_core;  // of each table, in `cores`
  std::vector<FeatureColumns> features;
  int64_t output_rows;    // batch size, or without pooling the number of lookups
  int64_t total_columns;  // of the output
  ElementType core_type;
  BagBatch bags;
  std::vector<void*> core_data;  // flat, table after table

  // Keep the memory behind the raw pointers alive (an argument may have been made contiguous).
  std::vector<Tensor> cores;
  Tensor indices;
  Tensor offsets;
  std::optional<Tensor> per_sample_weights;
};

// Of tables alone: there are no features and no bags.
EmbeddingBagArguments parse_tables(const std::vector<Tensor>& cores,
                                   const std::vector<int64_t>& cores_per_table,
                                   const std::vector<int64_t>& num_embeddings);

EmbeddingBagArguments parse_embedding_bag_arguments(const std::vector<Tensor>& cores,
                                                    const Tensor& indices, const Tensor& offsets,
                                                    const std::optional<Tensor>& per_sample_weights,
                                                    const std::vector<int64_t>& cores_per_table,
                                                    const std::vector<int64_t>& num_embeddings,
                                                    const std::vector<int64_t>& feature_table_map,
                                                    int64_t pooling_mode);

// Checks the output type asked for: fp32, fp16 or bf16, or fp64 for fp64 cores.
ElementType parse_output_type(const EmbeddingBagArguments& arguments, ScalarType output_dtype);

// Checks memory with this many bytes of packed cores, in the one or two parts that so many products
// take. Returns its address.
char* parse_packed_cores(const EmbeddingBagArguments& arguments, const Tensor& packed,
                         int64_t bytes, bool three_products);

// Checks grad_output [output_rows, total_columns]; any strides.
StridedMatrix parse_grad_output(const EmbeddingBagArguments& arguments, const Tensor& grad_output);

// The optimizer states of one update; null where the optimizer has none.
struct OptimizerStates {
  OptimizerArguments optimizer;
  std::vector<void*> momentum1;  // one per core, accumulation type
  std::vector<void*> momentum2;
};

// Also requires contiguous cores: they are written in place.
OptimizerStates parse_optimizer_arguments(
    const EmbeddingBagArguments& arguments, const std::vector<Tensor>& original_cores,
    const std::vector<Tensor>& momentum1, const std::vector<Tensor>& momentum2,
    const Tensor& learning_rate, const Tensor& iteration, const std::string& optimizer, double eps,
    double beta1, double beta2, double weight_decay, bool stochastic_rounding);

ScalarType accumulation_dtype(ElementType core_type);

}  // namespace flowtt
