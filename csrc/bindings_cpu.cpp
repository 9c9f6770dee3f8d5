// Registers the CPU kernels of the flowtt operators; the schemas are in torchrec_flowtt/ops.
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/embedding_bag_cpu.h"
#include "stable_torch.h"

namespace flowtt {
namespace {

// Lets the torch-free kernels run on torch's threads.
ParallelRunner torch_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t num_tasks, const ParallelTask& task) {
            torch::stable::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) {
                task(i);
              }
            });
          }};
}

EmbeddingBagCall cpu_call(const EmbeddingBagArguments& arguments) {
  return {arguments.tables,    arguments.first_core, arguments.features, arguments.core_type,
          arguments.core_data, arguments.bags,       torch_threads()};
}

Tensor tt_embedding_bag_cpu(std::vector<Tensor> cores, Tensor indices, Tensor offsets,
                            std::optional<Tensor> per_sample_weights,
                            std::vector<int64_t> cores_per_table,
                            std::vector<int64_t> num_embeddings,
                            std::vector<int64_t> feature_table_map, int64_t pooling_mode,
                            ScalarType output_dtype, bool /*allow_tf32*/) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const ElementType output_type = parse_output_type(arguments, output_dtype);
  const std::vector<int64_t> size = {arguments.bags.batch_size, arguments.total_columns};
  Tensor output = torch::stable::new_empty(cores[0], size, output_dtype);
  embedding_bag_forward(cpu_call(arguments), output.data_ptr(), output_type,
                        arguments.total_columns);
  return output;
}

std::vector<Tensor> tt_embedding_bag_backward_cpu(Tensor grad_output, std::vector<Tensor> cores,
                                                  Tensor indices, Tensor offsets,
                                                  std::optional<Tensor> per_sample_weights,
                                                  std::vector<int64_t> cores_per_table,
                                                  std::vector<int64_t> num_embeddings,
                                                  std::vector<int64_t> feature_table_map,
                                                  int64_t pooling_mode) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const StridedMatrix grad = parse_grad_output(arguments, grad_output);
  std::vector<Tensor> core_grads;
  std::vector<void*> data;
  for (const Tensor& core : cores) {
    core_grads.push_back(torch::stable::new_zeros(core, core.sizes()));
    data.push_back(core_grads.back().data_ptr());
  }
  embedding_bag_backward(cpu_call(arguments), grad, data);
  return core_grads;
}

Tensor tt_embedding_bag_weights_grad_cpu(Tensor grad_output, std::vector<Tensor> cores,
                                         Tensor indices, Tensor offsets,
                                         std::optional<Tensor> per_sample_weights,
                                         std::vector<int64_t> cores_per_table,
                                         std::vector<int64_t> num_embeddings,
                                         std::vector<int64_t> feature_table_map,
                                         int64_t pooling_mode) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const StridedMatrix grad = parse_grad_output(arguments, grad_output);
  const std::vector<int64_t> size = {arguments.bags.nnz};
  Tensor weights_grad =
      torch::stable::new_empty(cores[0], size, accumulation_dtype(arguments.core_type));
  embedding_bag_weights_grad(cpu_call(arguments), grad, weights_grad.data_ptr());
  return weights_grad;
}

void tt_embedding_bag_backward_update_cpu(
    Tensor grad_output, std::vector<Tensor> cores, std::vector<Tensor> momentum1,
    std::vector<Tensor> momentum2, Tensor indices, Tensor offsets,
    std::optional<Tensor> per_sample_weights, std::vector<int64_t> cores_per_table,
    std::vector<int64_t> num_embeddings, std::vector<int64_t> feature_table_map,
    int64_t pooling_mode, Tensor learning_rate, Tensor iter, std::string optimizer, double eps,
    double beta1, double beta2, double weight_decay) {
  const EmbeddingBagArguments arguments =
      parse_embedding_bag_arguments(cores, indices, offsets, per_sample_weights, cores_per_table,
                                    num_embeddings, feature_table_map, pooling_mode);
  const StridedMatrix grad = parse_grad_output(arguments, grad_output);
  const OptimizerStates states =
      parse_optimizer_arguments(arguments, cores, momentum1, momentum2, learning_rate, iter,
                                optimizer, eps, beta1, beta2, weight_decay);
  embedding_bag_backward_update(cpu_call(arguments), grad, states.optimizer, states.momentum1,
                                states.momentum2);
}

}  // namespace
}  // namespace flowtt

STABLE_TORCH_LIBRARY_IMPL(flowtt, CPU, m) {
  m.impl("tt_embedding_bag", TORCH_BOX(&flowtt::tt_embedding_bag_cpu));
  m.impl("tt_embedding_bag_backward", TORCH_BOX(&flowtt::tt_embedding_bag_backward_cpu));
  m.impl("tt_embedding_bag_weights_grad", TORCH_BOX(&flowtt::tt_embedding_bag_weights_grad_cpu));
  m.impl("tt_embedding_bag_backward_update",
         TORCH_BOX(&flowtt::tt_embedding_bag_backward_update_cpu));
}
