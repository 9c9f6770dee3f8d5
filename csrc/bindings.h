// The operators as torch calls them, for any device: arguments are parsed and results allocated
// here, and a Device does the work on parsed arguments. The schemas are in torchrec_flowtt/ops.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "stable_torch.h"

namespace flowtt {

// Device::pack(arguments, output_type, allow_tf32)
template <typename Device>
Tensor pack_tt_cores(std::vector<Tensor> cores, std::vector<int64_t> cores_per_table,
                     std::vector<int64_t> num_embeddings, ScalarType output_dtype,
                     bool allow_tf32) {
  const EmbeddingBagArguments arguments = parse_tables(cores, cores_per_table, num_embeddings);
  return Device::pack(arguments, parse_output_type(arguments, output_dtype), allow_tf32);
}

// Device::repack(arguments, output_type, allow_tf32, packed)
template <typename Device>
void repack_tt_cores(Tensor packed, std::vector<Tensor> cores, std::vector<int64_t> cores_per_table,
                     std::vector<int64_t> num_embeddings, ScalarType output_dtype,
                     bool allow_tf32) {
  const EmbeddingBagArguments arguments = parse_tables(cores, cores_per_table, num_embeddings);
  Device::repack(arguments, parse_output_type(arguments, output_dtype), allow_tf32, packed);
}

// Device::forward(arguments, output, output_type, allow_tf32, deterministic, order, packed); order:
// null, or an empty tensor that may be replaced; packed: null, or of pack_tt_cores.
template <typename Device>
Tensor look_up(const EmbeddingBagArguments& arguments, ScalarType output_dtype, bool allow_tf32,
               bool deterministic, Tensor* order, const Tensor* packed) {
  const ElementType output_type = parse_output_type(arguments, output_dtype);
  const std::vector<int64_t> size = {arguments.output_rows, arguments.total_columns};
  Tensor output = torch::stable::new_empty(arguments.cores[0], size, output_dtype);
  Device::forward(arguments, output, output_type, allow_tf32, deterministic, order, packed);
  return output;
}

template <typename Device>
Tensor tt_embedding_bag(std::vector<Tensor> cores, Tensor indices, Tensor offsets,
                        std::optional<Tensor> per_sample_weights,
                        std::vector<int64_t> cores_per_table, std::vector<int64_t> num_embeddings,
                        std::vector<int64_t> feature_table_map, int64_t pooling_mode,
                        ScalarType output_dtype, bool allow_tf32, bool deterministic) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  return look_up<Device>(arguments, output_dtype, allow_tf32, deterministic, nullptr, nullptr);
}

template <typename Device>
Tensor tt_embedding_bag_packed(std::vector<Tensor> cores, Tensor packed, Tensor indices,
                               Tensor offsets, std::optional<Tensor> per_sample_weights,
                               std::vector<int64_t> cores_per_table,
                               std::vector<int64_t> num_embeddings,
                               std::vector<int64_t> feature_table_map, int64_t pooling_mode,
                               ScalarType output_dtype, bool allow_tf32, bool deterministic) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  return look_up<Device>(arguments, output_dtype, allow_tf32, deterministic, nullptr, &packed);
}

// {output, order}
template <typename Device>
std::vector<Tensor> tt_embedding_bag_with_order(
    std::vector<Tensor> cores, Tensor indices, Tensor offsets,
    std::optional<Tensor> per_sample_weights, std::vector<int64_t> cores_per_table,
    std::vector<int64_t> num_embeddings, std::vector<int64_t> feature_table_map,
    int64_t pooling_mode, ScalarType output_dtype, bool allow_tf32, bool deterministic) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  Tensor order = torch::stable::new_empty(cores[0], std::vector<int64_t>{0}, ScalarType::Byte);
  Tensor output =
      look_up<Device>(arguments, output_dtype, allow_tf32, deterministic, &order, nullptr);
  return {output, order};
}

// Device::backward(arguments, grad, allow_tf32, order, deterministic), gradients like the cores;
// order: null or of the forward pass.
template <typename Device>
std::vector<Tensor> tt_embedding_bag_backward(
    Tensor grad_output, std::vector<Tensor> cores, Tensor indices, Tensor offsets,
    std::optional<Tensor> per_sample_weights, std::vector<int64_t> cores_per_table,
    std::vector<int64_t> num_embeddings, std::vector<int64_t> feature_table_map,
    int64_t pooling_mode, bool allow_tf32, std::optional<Tensor> order, bool deterministic) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  return Device::backward(arguments, parse_grad_output(arguments, grad_output), allow_tf32,
                          order.has_value() ? &*order : nullptr, deterministic);
}

// Device::weights_grad(arguments, grad, weights_grad)
template <typename Device>
Tensor tt_embedding_bag_weights_grad(Tensor grad_output, std::vector<Tensor> cores, Tensor indices,
                                     Tensor offsets, std::optional<Tensor> per_sample_weights,
                                     std::vector<int64_t> cores_per_table,
                                     std::vector<int64_t> num_embeddings,
                                     std::vector<int64_t> feature_table_map, int64_t pooling_mode) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const StridedMatrix grad = parse_grad_output(arguments, grad_output);
  Tensor weights_grad = torch::stable::new_empty(cores[0], std::vector<int64_t>{arguments.bags.nnz},
                                                 accumulation_dtype(arguments.core_type));
  Device::weights_grad(arguments, grad, weights_grad);
  return weights_grad;
}

// Device::backward_update(arguments, grad, states, allow_tf32, order, deterministic); order: null
// or of the forward pass.
template <typename Device>
void tt_embedding_bag_backward_update(
    Tensor grad_output, std::vector<Tensor> cores, std::vector<Tensor> momentum1,
    std::vector<Tensor> momentum2, Tensor indices, Tensor offsets,
    std::optional<Tensor> per_sample_weights, std::vector<int64_t> cores_per_table,
    std::vector<int64_t> num_embeddings, std::vector<int64_t> feature_table_map,
    int64_t pooling_mode, Tensor learning_rate, Tensor iter, std::string optimizer, double eps,
    double beta1, double beta2, double weight_decay, bool allow_tf32, std::optional<Tensor> order,
    bool stochastic_rounding, bool deterministic) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const StridedMatrix grad = parse_grad_output(arguments, grad_output);
  const OptimizerStates states =
      parse_optimizer_arguments(arguments, cores, momentum1, momentum2, learning_rate, iter,
                                optimizer, eps, beta1, beta2, weight_decay, stochastic_rounding);
  Device::backward_update(arguments, grad, states, allow_tf32,
                          order.has_value() ? &*order : nullptr, deterministic);
}

template <typename Device>
void register_operators(torch::stable::detail::StableLibrary& library) {
  library.impl("pack_tt_cores", TORCH_BOX(&pack_tt_cores<Device>));
  library.impl("repack_tt_cores", TORCH_BOX(&repack_tt_cores<Device>));
  library.impl("tt_embedding_bag", TORCH_BOX(&tt_embedding_bag<Device>));
  library.impl("tt_embedding_bag_packed", TORCH_BOX(&tt_embedding_bag_packed<Device>));
  library.impl("tt_embedding_bag_with_order", TORCH_BOX(&tt_embedding_bag_with_order<Device>));
  library.impl("tt_embedding_bag_backward", TORCH_BOX(&tt_embedding_bag_backward<Device>));
  library.impl("tt_embedding_bag_weights_grad", TORCH_BOX(&tt_embedding_bag_weights_grad<Device>));
  library.impl("tt_embedding_bag_backward_update",
               TORCH_BOX(&tt_embedding_bag_backward_update<Device>));
}

}  // namespace flowtt
