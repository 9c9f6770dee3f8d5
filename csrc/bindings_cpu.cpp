// The CPU kernels of the flowtt operators.
#include <vector>

#include "bindings.h"
#include "cpu/embedding_bag_cpu.h"

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

struct Cpu {
  // Kernels read the cores as they are.
  static Tensor pack(const EmbeddingBagArguments& arguments, ElementType /*output_type*/,
                     bool /*allow_tf32*/) {
    return torch::stable::new_empty(arguments.cores[0], std::vector<int64_t>{0}, ScalarType::Byte);
  }

  static void repack(const EmbeddingBagArguments& /*arguments*/, ElementType /*output_type*/,
                     bool /*allow_tf32*/, Tensor& /*packed*/) {}

  static void forward(const EmbeddingBagArguments& arguments, Tensor& output,
                      ElementType output_type, bool /*allow_tf32*/, bool /*deterministic*/,
                      Tensor* /*order*/, const Tensor* /*packed*/) {
    embedding_bag_forward(cpu_call(arguments), output.data_ptr(), output_type,
                          arguments.total_columns);
  }

  static std::vector<Tensor> backward(const EmbeddingBagArguments& arguments,
                                      const StridedMatrix& grad, bool /*allow_tf32*/,
                                      const Tensor* /*order*/, bool /*deterministic*/) {
    std::vector<Tensor> core_grads;
    std::vector<void*> data;
    for (const Tensor& core : arguments.cores) {
      core_grads.push_back(torch::stable::new_zeros(core, core.sizes()));
      data.push_back(core_grads.back().data_ptr());
    }
    embedding_bag_backward(cpu_call(arguments), grad, data);
    return core_grads;
  }

  static void weights_grad(const EmbeddingBagArguments& arguments, const StridedMatrix& grad,
                           Tensor& weights_grad) {
    embedding_bag_weights_grad(cpu_call(arguments), grad, weights_grad.data_ptr());
  }

  static void backward_update(const EmbeddingBagArguments& arguments, const StridedMatrix& grad,
                              const OptimizerStates& states, bool /*allow_tf32*/,
                              const Tensor* /*order*/, bool /*deterministic*/) {
    embedding_bag_backward_update(cpu_call(arguments), grad, states.optimizer, states.momentum1,
                                  states.momentum2);
  }
};

}  // namespace
}  // namespace flowtt

STABLE_TORCH_LIBRARY_IMPL(flowtt, CPU, m) { flowtt::register_operators<flowtt::Cpu>(m); }
