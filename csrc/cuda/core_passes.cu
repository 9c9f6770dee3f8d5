// What happens to the accumulated core gradients after the backward kernel: a cast into the
// gradient tensors, or one optimizer step on the slices that were touched.
//
// Both kernels: blockIdx.y is the core, blocks of a core stride over its elements or slices.

#include "chain.cuh"
#include "launchers.h"

namespace flowtt::cuda {
namespace {

constexpr int kCastThreads = 256;
constexpr int kStepThreads = 128;
constexpr int64_t kMaxBlocksPerCore = 1024;

template <typename core_t>
__global__ void __launch_bounds__(kCastThreads)
    cast_core_gradients_kernel(const __grid_constant__ CoreGroup group) {
  using acc_t = accumulator_t<core_t>;
  const CoreTask& task = group.tasks[blockIdx.y];
  const int64_t numel = task.num_slices * task.slice_numel;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; e < numel;
       e += stride) {
    static_cast<core_t*>(task.values)[e] =
        from_accumulator<core_t>(static_cast<const acc_t*>(task.gradient)[e]);
  }
}

// Constants of a step, the same for all elements.
template <typename acc_t>
struct StepConstants {
  acc_t learning_rate;
  acc_t eps;
  acc_t beta1;
  acc_t beta2;
  acc_t weight_decay;
  acc_t bias_correction1;  // 1 - beta1^iter
  acc_t bias_correction2;  // 1 - beta2^iter
};

template <typename acc_t>
__device__ StepConstants<acc_t> load_step_constants(const OptimizerArguments& params) {
  StepConstants<acc_t> step{acc_t(*params.learning_rate),
                            acc_t(params.eps),
                            acc_t(params.beta1),
                            acc_t(params.beta2),
                            acc_t(params.weight_decay),
                            acc_t(1),
                            acc_t(1)};
  if (params.type == OptimizerType::kAdam) {
    const double iter = static_cast<double>(*params.iteration);
    step.bias_correction1 = acc_t(1 - pow(params.beta1, iter));
    step.bias_correction2 = acc_t(1 - pow(params.beta2, iter));
  }
  return step;
}

// What SGD, Adagrad and Adam subtract from one element; `e` indexes the core's state.
template <typename acc_t>
__device__ __forceinline__ acc_t elementwise_delta(OptimizerType type,
                                                   const StepConstants<acc_t>& step,
                                                   const CoreTask& task, int64_t e, acc_t value,
                                                   acc_t gradient) {
  switch (type) {
    case OptimizerType::kAdagrad: {
      acc_t& square_sum = static_cast<acc_t*>(task.momentum1)[e];
      square_sum += gradient * gradient;
      return step.learning_rate * gradient / (sqrt(square_sum) + step.eps);
    }
    case OptimizerType::kAdam: {
      acc_t& first = static_cast<acc_t*>(task.momentum1)[e];
      acc_t& second = static_cast<acc_t*>(task.momentum2)[e];
      first = step.beta1 * first + (1 - step.beta1) * gradient;
      second = step.beta2 * second + (1 - step.beta2) * gradient * gradient;
      const acc_t direction =
          (first / step.bias_correction1) / (sqrt(second / step.bias_correction2) + step.eps);
      return step.learning_rate * (direction + step.weight_decay * value);
    }
    default:
      return step.learning_rate * gradient;
  }
}

// Row-wise Adagrad's step size for one slice: one accumulated mean square per slice.
template <typename acc_t>
__device__ acc_t row_wise_step_size(const StepConstants<acc_t>& step, const CoreTask& task,
                                    int64_t slice, const acc_t* gradient) {
  __shared__ acc_t slots[kReductionSlots];
  __shared__ acc_t step_size;
  acc_t partial = 0;
  for (int64_t e = threadIdx.x; e < task.slice_numel; e += blockDim.x) {
    partial += gradient[e] * gradient[e];
  }
  const acc_t square_sum = block_sum(partial, slots);
  if (threadIdx.x == 0) {
    acc_t& state = static_cast<acc_t*>(task.momentum1)[slice];
    state += square_sum / acc_t(task.slice_numel);
    step_size = step.learning_rate / (sqrt(state) + step.eps);
  }
  __syncthreads();
  const acc_t result = step_size;
  __syncthreads();
  return result;
}

// One block a slice. An untouched slice keeps its values and its state, also under Adam.
template <typename core_t>
__global__ void __launch_bounds__(kStepThreads)
    optimizer_step_kernel(const __grid_constant__ CoreGroup group,
                          const __grid_constant__ OptimizerArguments params) {
  using acc_t = accumulator_t<core_t>;
  const CoreTask& task = group.tasks[blockIdx.y];
  const StepConstants<acc_t> step = load_step_constants<acc_t>(params);
  for (int64_t slice = blockIdx.x; slice < task.num_slices; slice += gridDim.x) {
    if (!task.touched[slice]) continue;
    const int64_t begin = slice * task.slice_numel;
    core_t* const values = static_cast<core_t*>(task.values) + begin;
    const acc_t* const gradients = static_cast<const acc_t*>(task.gradient) + begin;
    const bool is_row_wise = params.type == OptimizerType::kRowWiseAdagrad;
    const acc_t step_size =
        is_row_wise ? row_wise_step_size(step, task, slice, gradients) : acc_t(0);
    for (int64_t e = threadIdx.x; e < task.slice_numel; e += blockDim.x) {
      const acc_t value = to_accumulator<acc_t>(values[e]);
      const acc_t delta =
          is_row_wise ? step_size * gradients[e]
                      : elementwise_delta(params.type, step, task, begin + e, value, gradients[e]);
      values[e] = from_accumulator<core_t>(value - delta);
    }
  }
}

template <typename Work>
dim3 core_grid(const CoreGroup& group, Work&& blocks_wanted) {
  int64_t blocks = 1;
  for (int i = 0; i < group.count; ++i) {
    const int64_t wanted = blocks_wanted(group.tasks[i]);
    if (wanted > blocks) blocks = wanted;
  }
  if (blocks > kMaxBlocksPerCore) blocks = kMaxBlocksPerCore;
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(group.count));
}

}  // namespace

cudaError_t launch_cast_core_gradients(ElementType core_type, const CoreGroup& group,
                                       cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  const dim3 grid = core_grid(group, [](const CoreTask& task) {
    return (task.num_slices * task.slice_numel + kCastThreads - 1) / kCastThreads;
  });
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    cast_core_gradients_kernel<core_t><<<grid, kCastThreads, 0, stream>>>(group);
    return cudaGetLastError();
  });
}

cudaError_t launch_optimizer_step(ElementType core_type, const CoreGroup& group,
                                  const OptimizerArguments& params, cudaStream_t stream) {
  if (group.count == 0) return cudaSuccess;
  const dim3 grid = core_grid(group, [](const CoreTask& task) { return task.num_slices; });
  return dispatch_core_type(core_type, [&]<typename core_t>() {
    optimizer_step_kernel<core_t><<<grid, kStepThreads, 0, stream>>>(group, params);
    return cudaGetLastError();
  });
}

}  // namespace flowtt::cuda
