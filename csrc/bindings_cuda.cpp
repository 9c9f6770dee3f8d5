// The CUDA kernels of the flowtt operators.
//
// Nothing here synchronises with the device or copies host memory to it, so every operator can be
// captured in a CUDA graph. All device memory comes from torch's allocator.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "bindings.h"
#include "cuda/deterministic_backward.h"
#include "cuda/launchers.h"
#include "cuda_call.h"
#include "packed_cores.h"
#include "tiled_features.h"

namespace flowtt {
namespace {

using cuda::ChainPlan;
using cuda::CoreGroup;
using cuda::CoreTask;
using cuda::FeatureGroup;
using cuda::TTFeature;

// Accumulators of all core gradients in one allocation, and which slices were looked up. Not
// cleared yet.
struct CoreGradients {
  Tensor memory;
  int64_t bytes;  // a multiple of 16
  std::vector<void*> accumulator_of_core;
  std::vector<uint8_t*> touched_of_core;
};

// Of accumulators, so that those of every core are aligned to vectors.
constexpr int64_t kGradientAlignment = 32;

CoreGradients allocate_core_gradients(const CudaCall& call, bool with_touched) {
  const std::vector<Tensor>& cores = call.arguments().cores;
  const int64_t element_size = call.arguments().core_type == ElementType::kFloat64 ? 8 : 4;
  const auto padded = [](int64_t bytes) {
    return (bytes + kGradientAlignment - 1) / kGradientAlignment * kGradientAlignment;
  };
  int64_t bytes = 0;
  int64_t slices = 0;
  for (const Tensor& core : cores) {
    bytes += padded(core.numel() * element_size);
    slices += with_touched ? core.size(0) : 0;
  }
  bytes += padded(slices);
  CoreGradients gradients{call.empty(bytes, ScalarType::Byte), bytes, {}, {}};
  char* accumulator = static_cast<char*>(gradients.memory.mutable_data_ptr());
  uint8_t* touched =
      with_touched ? reinterpret_cast<uint8_t*>(accumulator) + bytes - padded(slices) : nullptr;
  for (const Tensor& core : cores) {
    gradients.accumulator_of_core.push_back(accumulator);
    gradients.touched_of_core.push_back(touched);
    accumulator += padded(core.numel() * element_size);
    if (with_touched) touched += core.size(0);
  }
  return gradients;
}

TTFeature tt_feature(const EmbeddingBagArguments& arguments, int64_t feature,
                     const CoreGradients* gradients) {
  const FeatureColumns& columns = arguments.features[feature];
  TTFeature result{};
  const TableShape& shape = arguments.tables[columns.table];
  result.output_column = columns.column;
  result.feature = static_cast<int32_t>(feature);
  result.table = columns.table;
  for (int k = 0; k < shape.num_cores; ++k) {
    const int64_t core = arguments.first_core[columns.table] + k;
    result.cores[k] = arguments.core_data[core];
    if (gradients != nullptr) {
      result.core_gradients[k] = gradients->accumulator_of_core[core];
      result.touched[k] = gradients->touched_of_core[core];
    }
  }
  cuda::describe_chain(arguments.core_type, shape, &result);
  return result;
}

std::vector<int64_t> all_features(const EmbeddingBagArguments& arguments) {
  std::vector<int64_t> features(arguments.features.size());
  std::iota(features.begin(), features.end(), 0);
  return features;
}

// Calls launch(group, plan, global_scratch) for as many of the features at a time as one launch
// takes.
template <typename Launch>
void for_each_feature_group(const CudaCall& call, const std::vector<int64_t>& features,
                            const CoreGradients* gradients, cuda::ChainKernel kernel,
                            Launch&& launch) {
  const EmbeddingBagArguments& arguments = call.arguments();
  const int64_t num_features = static_cast<int64_t>(features.size());
  const bool pools = arguments.bags.pooling_mode != PoolingMode::kNone;
  if ((pools ? arguments.bags.batch_size : arguments.bags.nnz) == 0) return;
  for (int64_t first = 0; first < num_features; first += cuda::kFeaturesPerLaunch) {
    FeatureGroup group{};
    const int64_t end = std::min(num_features, first + cuda::kFeaturesPerLaunch);
    for (int64_t i = first; i < end; ++i) {
      group.features[group.count++] = tt_feature(arguments, features[i], gradients);
    }
    ChainPlan plan{};
    call.check(cuda::plan_chain(arguments.core_type, kernel, arguments.bags, &group, &plan));
    std::optional<Tensor> scratch;
    if (plan.global_bytes > 0) scratch = call.empty(plan.global_bytes, ScalarType::Byte);
    call.check(launch(group, plan, scratch ? scratch->mutable_data_ptr() : nullptr));
  }
}

// Calls launch(group) for as many cores at a time as one launch takes.
template <typename Launch>
void for_each_core_group(const CudaCall& call, const CoreGradients& gradients,
                         const std::vector<void*>& values, const OptimizerStates* states,
                         Launch&& launch) {
  const std::vector<Tensor>& cores = call.arguments().cores;
  for (size_t first = 0; first < cores.size(); first += cuda::kCoresPerLaunch) {
    CoreGroup group{};
    group.first = static_cast<int32_t>(first);
    const size_t end = std::min(cores.size(), first + cuda::kCoresPerLaunch);
    for (size_t core = first; core < end; ++core) {
      CoreTask& task = group.tasks[group.count++];
      task.values = values[core];
      task.gradient = gradients.accumulator_of_core[core];
      task.touched = gradients.touched_of_core[core];
      task.momentum1 = states != nullptr ? states->momentum1[core] : nullptr;
      task.momentum2 = states != nullptr ? states->momentum2[core] : nullptr;
      task.num_slices = cores[core].size(0);
      task.slice_numel = cores[core].numel() / task.num_slices;
    }
    call.check(launch(group));
  }
}

void do_start(const CudaCall& call, const cuda::BackwardStart& start) {
  call.check(cudaMemsetAsync(start.cleared, 0, start.cleared_bytes, call.stream()));
  if (start.steps != nullptr) call.check(cuda::launch_count_step(start.steps, call.stream()));
}

void accumulate_in_order(const CudaCall& call, const StridedMatrix& grad_output,
                         const CoreGradients& gradients, const cuda::BackwardStart& start) {
  const EmbeddingBagArguments& arguments = call.arguments();
  do_start(call, start);
  if (arguments.bags.nnz == 0) return;
  for_each_feature_group(
      call, all_features(arguments), &gradients, cuda::ChainKernel::kGradients,
      [&](const FeatureGroup& group, const ChainPlan& chain, void* global_scratch) {
        cuda::DeterministicPlan plan{};
        call.check(cuda::plan_deterministic_backward(arguments.core_type, group, arguments.bags,
                                                     chain, &plan));
        Tensor workspace = call.empty(static_cast<int64_t>(plan.workspace_bytes), ScalarType::Byte);
        return cuda::launch_deterministic_backward(plan, group, arguments.bags, grad_output,
                                                   global_scratch, workspace.mutable_data_ptr(),
                                                   call.stream());
      });
}

// steps: as in BackwardStart.
void accumulate_core_gradients(const CudaCall& call, const StridedMatrix& grad_output,
                               CoreGradients& gradients, int64_t* steps, bool allow_tf32,
                               const Tensor* order, bool deterministic) {
  const cuda::BackwardStart start{gradients.memory.mutable_data_ptr(), gradients.bytes, steps};
  if (deterministic) {
    accumulate_in_order(call, grad_output, gradients, start);
    return;
  }
  const EmbeddingBagArguments& arguments = call.arguments();
  const std::vector<int64_t> remaining = differentiate_tiled_features(
      call, grad_output,
      [&](int32_t table, int k) {
        const int64_t core = arguments.first_core[table] + k;
        return std::pair(static_cast<float*>(gradients.accumulator_of_core[core]),
                         gradients.touched_of_core[core]);
      },
      start, allow_tf32, order);
  if (remaining.size() == arguments.features.size()) do_start(call, start);
  if (arguments.bags.nnz == 0) return;
  for_each_feature_group(
      call, remaining, &gradients, cuda::ChainKernel::kGradients,
      [&](const FeatureGroup& group, const ChainPlan& plan, void* global_scratch) {
        return cuda::launch_tt_embedding_bag_backward(arguments.core_type, group, arguments.bags,
                                                      grad_output, plan, global_scratch,
                                                      call.stream());
      });
}

struct Cuda {
  static Tensor pack(const EmbeddingBagArguments& arguments, ElementType output_type,
                     bool allow_tf32) {
    return pack_cores(CudaCall("pack_tt_cores", arguments), output_type, allow_tf32);
  }

  static void repack(const EmbeddingBagArguments& arguments, ElementType output_type,
                     bool allow_tf32, Tensor& packed) {
    repack_cores(CudaCall("repack_tt_cores", arguments), output_type, allow_tf32, packed);
  }

  static void forward(const EmbeddingBagArguments& arguments, Tensor& output,
                      ElementType output_type, bool allow_tf32, bool deterministic, Tensor* order,
                      const Tensor* packed) {
    const CudaCall call("tt_embedding_bag", arguments);
    const cuda::PooledOutput pooled{output.mutable_data_ptr(), output_type,
                                    arguments.total_columns};
    const std::vector<int64_t> remaining =
        look_up_tiled_features(call, pooled, allow_tf32, deterministic,
                               // Of no use to a backward pass that sorts by slice.
                               deterministic ? nullptr : order, packed);
    for_each_feature_group(
        call, remaining, nullptr, cuda::ChainKernel::kRows,
        [&](const FeatureGroup& group, const ChainPlan& plan, void* global_scratch) {
          return cuda::launch_tt_embedding_bag(arguments.core_type, group, arguments.bags, pooled,
                                               plan, global_scratch, call.stream());
        });
  }

  static std::vector<Tensor> backward(const EmbeddingBagArguments& arguments,
                                      const StridedMatrix& grad, bool allow_tf32,
                                      const Tensor* order, bool deterministic) {
    const CudaCall call("tt_embedding_bag_backward", arguments);
    CoreGradients gradients = allocate_core_gradients(call, /*with_touched=*/false);
    accumulate_core_gradients(call, grad, gradients, /*steps=*/nullptr, allow_tf32, order,
                              deterministic);

    std::vector<Tensor> core_grads;
    std::vector<void*> data;
    for (const Tensor& core : arguments.cores) {
      core_grads.push_back(torch::stable::new_empty(core, core.sizes()));
      data.push_back(core_grads.back().mutable_data_ptr());
    }
    for_each_core_group(call, gradients, data, nullptr, [&](const CoreGroup& group) {
      return cuda::launch_cast_core_gradients(arguments.core_type, group, call.stream());
    });
    return core_grads;
  }

  static void weights_grad(const EmbeddingBagArguments& arguments, const StridedMatrix& grad,
                           Tensor& weights_grad) {
    if (arguments.bags.nnz == 0) return;
    const CudaCall call("tt_embedding_bag_weights_grad", arguments);
    for_each_feature_group(
        call, all_features(arguments), nullptr, cuda::ChainKernel::kGradients,
        [&](const FeatureGroup& group, const ChainPlan& plan, void* global_scratch) {
          return cuda::launch_tt_embedding_bag_weights_grad(
              arguments.core_type, group, arguments.bags, grad, weights_grad.mutable_data_ptr(),
              plan, global_scratch, call.stream());
        });
  }

  static void backward_update(const EmbeddingBagArguments& arguments, const StridedMatrix& grad,
                              const OptimizerStates& states, bool allow_tf32, const Tensor* order,
                              bool deterministic) {
    const CudaCall call("tt_embedding_bag_backward_update", arguments);
    if (arguments.bags.nnz == 0) {
      call.check(cuda::launch_count_step(states.optimizer.iteration, call.stream()));
      return;
    }
    CoreGradients gradients = allocate_core_gradients(call, /*with_touched=*/true);
    accumulate_core_gradients(call, grad, gradients, states.optimizer.iteration, allow_tf32, order,
                              deterministic);
    for_each_core_group(call, gradients, arguments.core_data, &states, [&](const CoreGroup& group) {
      return cuda::launch_optimizer_step(arguments.core_type, group, states.optimizer,
                                         call.stream());
    });
  }
};

}  // namespace
}  // namespace flowtt

STABLE_TORCH_LIBRARY_IMPL(flowtt, CUDA, m) { flowtt::register_operators<flowtt::Cuda>(m); }
